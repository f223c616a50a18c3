"""Creates the embedded policy: tokenizer, two stages of warm-up, export."""

import pathlib
import sys
from typing import Any

import jax

from brorl_jax.config.data import Family
from brorl_jax.errors import UserError
from brorl_jax.learner import pair_packing, warmup
from brorl_jax.main import programs, settings
from brorl_jax.main.commands import warmup as warmup_command
from brorl_jax.main.stages.examples import families
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.runs import folder
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.domains import DRAW

_TOKENIZER_TEXTS = 1500  # per family


def run(c: Any, workdir: pathlib.Path) -> None:
  """Writes a Hugging Face directory to `workdir`."""
  folder.check_empty(workdir)
  try:
    settings.check_warmup(c)
    _say(programs.log_line())
    puzzles = draw(c)
    policy = _policy(c)
    every = max(c.puzzles // _TOKENIZER_TEXTS, 1)
    texts = [puzzle.question for puzzle in puzzles[::every]]
    more = {"whole": c.tags, "merges": c.merges} if "tags" in c else {}
    text = tokenizer.build(workdir, texts, size=c.vocab, **more)
    params = policy.init(jax.random.key(c.seed))
    first, mixed = _responses(c)
    rows = c.rows // c.microbatches
    layout = pair_packing.Layout(c.row_tokens, rows, c.microbatches)
    for number, (name, steps, lr, respond) in enumerate(
      (
        ("right", c.steps, c.lr, first),
        ("mixed", c.mixed_steps, c.mixed_lr, mixed),
      )
    ):
      pairs = warmup.demonstrations(
        puzzles,
        text,
        respond,
        prompt_tokens=c.prompt_tokens,
        max_new_tokens=c.max_new_tokens,
        seed=4 * c.seed + 2 * number + 1,
      )
      params = warmup_command.train(
        policy,
        params,
        pairs,
        name=f"{name} demonstrations, update",
        layout=layout,
        count=steps,
        seed=4 * c.seed + 2 * number + 2,
        looks=[],
        lr=lr,
        warmup=50,
        b1=0.9,
        b2=c.b2,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=c.max_grad_norm,
      )
  except ValueError as e:
    raise UserError(str(e)) from None
  huggingface.save(workdir, policy, params)
  _say(f"wrote {workdir}")


def _policy(c: Any) -> Policy:
  return Policy(
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


def _responses(c: Any) -> tuple[warmup.Respond, warmup.Respond]:
  """Those of the first stage and of the second."""
  if "right" in c:  # answers alone
    return warmup.answers({}), warmup.answers(c.right.to_dict())
  of = lambda shares: warmup.solutions(DRAW.write, shares.to_dict(), c.at_once)
  return of(c.qualities), of(c.mixed_qualities)


def _families(c: Any) -> dict[str, Family]:
  return {k: Family(**v) for k, v in c.families.to_dict().items()}


def draw(c: Any) -> list[Example]:
  """Examples of every puzzle family, from seeds that training never uses."""
  return [
    DRAW.one(family, "warmup", i, seed=c.seed)
    for family in families(_families(c))
    for i in range(c.puzzles)
  ]


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
