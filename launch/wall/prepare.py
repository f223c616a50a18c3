"""Prompts and the policy that all arms of a task begin with.

  python -m launch.wall.prepare runs/wall/countdown countdown

The folder gets a Hugging Face directory, hard.jsonl and heldout.jsonl. Those of
`own` are in brorl_jax/assets/hard: 4 minutes of a core.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from brorl_jax.learner import state as states
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from launch.embedded import supervised
from launch.embedded.tokenizer import build
from launch.wall import exact
from launch.wall.tasks import TASKS, Problem, example, hard

PROMPTS = 128
CANDIDATES = {"own": 1024, "steps": 1024, "countdown": 256}
UPDATES = 600  # of the warm-up, with 400 to 600 demonstrations each
_RATE = 3e-3


def demonstrations(
  some: Sequence[Problem], text: tokenizer.Tokenizer, *, each: int, seed: int
) -> list[supervised.Pair]:
  """`each` answers to every problem, drawn by their odds."""
  rng = np.random.default_rng(seed)
  out = []
  for one in some:
    question = text.render([{"role": "user", "content": one.question}])
    drawn = rng.choice(len(one.said), size=each, p=one.odds / one.odds.sum())
    tokens = {
      k: [*text.encode(str(one.said[k])), text.stop_ids[0]] for k in set(drawn)
    }
    out += [supervised.Pair(question, tokens[k]) for k in drawn]
  return out


def teach(directory: pathlib.Path, some: Sequence[Problem]) -> None:
  """Writes a policy of 150,000 parameters that has seen demonstrations.

  Characters are tokens, so that an answer has one spelling.
  """
  texts = [text for p in some for text in (p.question, *p.right)]
  text = build(directory, texts, size=259, merges=0)
  size: Any = dict(width=64, layers=2, heads=4, kv_heads=4, head_size=16)
  policy = Policy(
    vocab=text.size,
    **size,
    mlp=256,
    rope=Rope(100.0),
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
  )
  adam = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
  tx, _ = states.adamw(lr=_RATE, warmup=50, total=UPDATES, **adam)
  each = max(600 * UPDATES // len(some), 1)
  params = supervised.train(
    policy.init(jax.random.key(0)),
    demonstrations(some, text, each=each, seed=0),
    response_logp=policy.response_logp,
    tx=tx,
    layout=supervised.PairLayout(tokens=256, rows=24, microbatches=1),
    count=UPDATES,
    seed=0,
    look=lambda update, _: print(f"warm-up {update}/{UPDATES}", flush=True),
  )
  huggingface.save(directory, policy, params)


def prepare(directory: pathlib.Path, task: str) -> None:
  """All of a folder; "done" is its last file."""
  directory.mkdir(parents=True, exist_ok=True)
  some = TASKS[task](count=CANDIDATES[task], seed=0)
  teach(directory, [one for pair in some for one in (pair.train, pair.heldout)])
  p = exact.pass_rates(directory, [example(x.train) for x in some]).sum(axis=1)
  chosen = hard(some, p, count=PROMPTS)
  for name, of in (("hard", "train"), ("heldout", "heldout")):
    lines = [json.dumps(example(getattr(pair, of))) + "\n" for pair in chosen]
    (directory / f"{name}.jsonl").write_text("".join(lines))
  (directory / "done").touch()


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("task", choices=sorted(TASKS))
  a = parser.parse_args()
  prepare(a.directory, a.task)
