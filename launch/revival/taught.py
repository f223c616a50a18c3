"""Puzzles with many known right answers, and a policy that knows them a little.

A folder has train.jsonl and heldout.jsonl, in the format of
brorl_jax/tasks/data/dataset.py, known.json with the right responses to each
prompt, and policy/: a small transformer that was taught the prompts of both,
with few right answers and most of them rarely.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from brorl_jax.learner import optimizer, pair_packing, supervised
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.attention import Rope
from brorl_jax.model.policy import Policy

# Share of right demonstrations, uniform in its logarithm between prompts, 10 %
# on average. With 25 % everywhere N = 16 learns all prompts and none is left to
# be revived; with 1 % at least 4 of 32 were left, too few to tell arms apart.
_LEAST_RIGHT, _MOST_RIGHT = 0.003, 0.5


class Puzzle(NamedTuple):
  """A prompt with responses of the form that is taught.

  Attributes:
    id: In the files.
    question: The prompt.
    metadata: Input of reasoning-gym's scorer.
    right: All that there are.
    wrong: Some.
  """

  id: str
  question: str
  metadata: dict[str, Any]
  right: list[str]
  wrong: list[str]


def example(puzzle: Puzzle) -> dict:
  """A line of a data file."""
  return {
    "id": puzzle.id,
    "domain": "gym",
    "prompt": puzzle.question,
    "entry": {
      "question": puzzle.question,
      "answer": puzzle.right[0],
      "metadata": puzzle.metadata,
    },
  }


def demonstrations(
  some: Sequence[Puzzle], text: tokenizer.Tokenizer, *, each: int, seed: int
) -> list[pair_packing.Pair]:
  """`each` answers to every puzzle, few of them right.

  How often each one is said is uneven (lognormal, sigma 1.5), so that a few
  right ones are known well and many hardly.
  """
  rng = np.random.default_rng(seed)
  out = []
  for puzzle in some:
    share = np.exp(rng.uniform(*np.log([_LEAST_RIGHT, _MOST_RIGHT])))
    weights = [
      rng.lognormal(sigma=1.5, size=len(k))
      for k in (puzzle.right, puzzle.wrong)
    ]
    odds = np.concatenate(
      [
        w / w.sum() * s
        for w, s in zip(weights, (share, 1 - share), strict=True)
      ]
    )
    said = rng.choice([*puzzle.right, *puzzle.wrong], size=each, p=odds)
    question = text.render([{"role": "user", "content": puzzle.question}])
    answers = [[*text.encode(str(t)), text.stop_ids[0]] for t in said]
    out += [pair_packing.Pair(question, answer) for answer in answers]
  return out


def teach(
  directory: pathlib.Path,
  some: Sequence[Puzzle],
  *,
  seed: int,
  width: int,
  layers: int,
  steps: int,
) -> None:
  """Writes a policy as a Hugging Face directory."""
  texts = [text for p in some for text in (p.question, *p.right)]
  text = tokenizer.build(directory, texts, size=320)
  policy = Policy(
    vocab=text.size,
    width=width,
    layers=layers,
    heads=4,
    kv_heads=4,
    head_size=width // 4,
    mlp=4 * width,
    rope=Rope(100.0),
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
  )
  tx, _ = optimizer.adamw(
    lr=3e-3,
    warmup=50,
    total=steps,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    second_moment="full",
  )
  # About 256 demonstrations in an update.
  layout = pair_packing.Layout(tokens=256, rows=16, microbatches=1)
  params = supervised.train(
    policy.init(jax.random.key(seed)),
    demonstrations(some, text, each=4000, seed=seed),
    packed_logp=policy.packed_logp,
    tx=tx,
    layout=layout,
    count=steps,
    seed=seed,
    look=lambda now: print(
      f"warm-up {now.update}/{steps}: {now.loss or 0.0:.3f} nats per token",
      file=sys.stderr,
      flush=True,
    ),
  )
  huggingface.save(directory, policy, params)


def write(
  directory: pathlib.Path, some: Mapping[str, Sequence[Puzzle]]
) -> None:
  """One file for each side, and known.json."""
  directory.mkdir(parents=True, exist_ok=True)
  for name, side in some.items():
    lines = [json.dumps(example(puzzle)) + "\n" for puzzle in side]
    (directory / f"{name}.jsonl").write_text("".join(lines))
  known = {
    name: {puzzle.id: sorted(puzzle.right) for puzzle in side}
    for name, side in some.items()
  }
  (directory / "known.json").write_text(json.dumps(known, indent=1) + "\n")


def make(
  directory: pathlib.Path, some: Sequence[Puzzle], *, scale: int, seed: int
) -> None:
  """All of a folder: the first half is trained on."""
  half = len(some) // 2
  write(directory, {"train": some[:half], "heldout": some[half:]})
  teach(
    directory / "policy",
    some,
    seed=seed,
    width=64 * scale,
    layers=1 + scale,
    steps=1500,
  )
