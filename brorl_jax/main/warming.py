"""Makes the embedded policy: tokenizer, two stages of warm-up, export."""

import pathlib
import sys
import time

import jax
from jaxtyping import PyTree

from brorl_jax import hf, tokenizer, update, warmup
from brorl_jax.attention import Rope
from brorl_jax.main import folder, programs, settings
from brorl_jax.main.examples import families
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy
from brorl_jax.tasks import gym
from brorl_jax.tasks.base import Example

_TOKENIZER_TEXTS = 1500  # per family


def run(c: Config, workdir: pathlib.Path) -> None:
  """Writes a Hugging Face directory to `workdir`."""
  folder.check_empty(workdir)
  try:
    settings.check_warmup(c)
    _say(programs.says())
    puzzles = draw(c)
    policy = Policy(
      vocab=c.vocab,
      width=c.width,
      layers=c.layers,
      heads=c.heads,
      kv_heads=c.kv_heads,
      head_size=c.width // c.heads,
      mlp=c.mlp,
      rope=Rope(c.rope_theta),
      norm_eps=1e-6,
      tied=True,
      qkv_bias=True,
    )
    every = max(c.puzzles // _TOKENIZER_TEXTS, 1)
    texts = [puzzle.question for puzzle in puzzles[::every]]
    text = tokenizer.build(workdir, texts, size=c.vocab)
    params = policy.init(jax.random.key(c.seed))
    for number, (name, steps, lr, right) in enumerate(
      (
        ("right", c.steps, c.lr, {}),
        ("mixed", c.mixed_steps, c.mixed_lr, c.right.to_dict()),
      )
    ):
      params = stage(
        c,
        policy,
        params,
        warmup.demonstrations(
          puzzles,
          text,
          right=right,
          prompt_tokens=c.prompt_tokens,
          max_new_tokens=c.max_new_tokens,
          seed=4 * c.seed + 2 * number + 1,
        ),
        name=name,
        steps=steps,
        lr=lr,
        seed=4 * c.seed + 2 * number + 2,
      )
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  hf.save(workdir, policy, params)
  _say(f"wrote {workdir}")


def draw(c: Config) -> list[Example]:
  """Examples of every family, from seeds that training never draws."""
  return [
    gym.puzzle(family, "warmup", i, seed=c.seed)
    for family in families(c)
    for i in range(c.puzzles)
  ]


def stage(
  c: Config,
  policy: Policy,
  params: PyTree,
  data: warmup.Demonstrations,
  *,
  name: str,
  steps: int,
  lr: float,
  seed: int,
) -> PyTree:
  """One supervised stage, its rate falling to 0 as a cosine."""
  tx, _ = update.optimizer(
    lr=lr,
    warmup=50,
    total=steps,
    b1=0.9,
    b2=c.b2,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=c.max_grad_norm,
  )
  start = time.monotonic()
  return warmup.train(
    params,
    data,
    response_logp=policy.response_logp,
    tx=tx,
    steps=steps,
    batch=c.batch,
    seed=seed,
    log=lambda i, loss: _say(
      f"{name} demonstrations, update {i}/{steps}: {loss:.3f} nats per token, "
      f"{time.monotonic() - start:.0f} s"
    ),
  )


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
