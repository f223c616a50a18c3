"""Makes the embedded policy: tokenizer, two stages of warm-up, export."""

import pathlib
import sys
import time

import jax

from brorl_jax import hf, tokenizer, update, warmup
from brorl_jax.main import settings
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy
from brorl_jax.tasks import gym

_TOKENIZER_TEXTS = 1500  # per family


def run(c: Config, workdir: pathlib.Path) -> None:
  """Writes a Hugging Face directory to `workdir`."""
  if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise settings.UserError(f"workdir {workdir} is not an empty folder")
  for field in ("puzzles", "batch", "steps", "mixed_steps", "lr", "mixed_lr"):
    if c[field] <= 0:
      raise settings.UserError(f"config.{field} = {c[field]} must be positive")
  say = lambda text: print(text, file=sys.stderr, flush=True)
  try:
    families = [
      gym.Family(name, f.settings.to_dict(), f.weight)
      for name, f in c.families.items()
    ]
    gym.check(families)
    policy = Policy(
      vocab=c.vocab,
      width=c.width,
      layers=c.layers,
      heads=c.heads,
      kv_heads=c.kv_heads,
      head_size=c.width // c.heads,
      mlp=c.mlp,
      rope_theta=c.rope_theta,
      norm_eps=1e-6,
      tied=True,
      qkv_bias=True,
    )
    puzzles = [
      gym.puzzle(family, "warmup", i, seed=c.seed)
      for family in families
      for i in range(c.puzzles)
    ]
    every = max(c.puzzles // _TOKENIZER_TEXTS, 1)
    texts = [puzzle.question for puzzle in puzzles[::every]]
    text = tokenizer.build(workdir, texts, size=c.vocab)

    params = policy.init(jax.random.key(c.seed))
    stages = (
      ("right", c.steps, c.lr, {}),
      ("mixed", c.mixed_steps, c.mixed_lr, c.right.to_dict()),
    )
    for number, (name, steps, lr, right) in enumerate(stages):
      data = warmup.demonstrations(
        puzzles,
        text,
        right=right,
        prompt_tokens=c.prompt_tokens,
        max_new_tokens=c.max_new_tokens,
        seed=2 * number + 1 + 4 * c.seed,
      )
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
      params = warmup.train(
        params,
        data,
        response_logits=policy.response_logits,
        tx=tx,
        steps=steps,
        batch=c.batch,
        seed=2 * number + 2 + 4 * c.seed,
        log=lambda i, loss, name=name, steps=steps, start=start: say(
          f"{name} demonstrations, update {i}/{steps}: "
          f"{loss:.3f} nats per token, {time.monotonic() - start:.0f} s"
        ),
      )
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  hf.save(workdir, policy, params)
  say(f"wrote {workdir}")
