"""Numbers and a target: puzzles with many right answers, all of them known.

  python launch/revival/countdown.py runs/revival/countdown

An answer is an expression that uses each number once, such as 3*4+5+7 for
3 4 5 7 -> 24; the judge of reasoning-gym's `countdown` decides. There are 24
orders of four numbers and 27 choices of three operators from + - *, so that
all 648 expressions without brackets can be listed, and the 16 to 48 right ones
among them. With --paths there are three numbers, and steps to the target are
written before the answer, in any of their orders; the judge sees the answer:

  4*3=12,5+12=17<answer>3*4+5</answer>

The folder gets train.jsonl and heldout.jsonl, in the format of
brorl_jax/tasks/dataset.py, known.json with the right responses to each prompt,
and policy/: a small transformer that was taught the prompts of both, with few
right answers and most of them rarely.
"""

import argparse
import itertools
import json
import operator
import pathlib
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from brorl_jax import hf, tokenizer, update, warmup
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy

PROMPT_TOKENS = 16
# Share of right demonstrations, uniform in its logarithm between prompts, 10 %
# on average. With 25 % everywhere N = 16 learns all prompts and none is left to
# be revived; with 1 % at least 4 of 32 were left, too few to tell arms apart.
_LEAST_RIGHT, _MOST_RIGHT = 0.003, 0.5


class Kind(NamedTuple):
  """What is asked."""

  numbers: int
  paths: bool  # steps before the answer
  prompts: int  # of each side
  fewest: int  # right responses to a prompt
  most: int


class Puzzle(NamedTuple):
  """A prompt with every response of the form that is taught."""

  numbers: tuple[int, ...]
  target: int
  right: list[str]
  wrong: list[str]

  @property
  def id(self) -> str:
    return "countdown-" + "-".join(map(str, (*self.numbers, self.target)))

  @property
  def question(self) -> str:
    return f"{' '.join(map(str, self.numbers))} -> {self.target}"


def kind(*, paths: bool, scale: int) -> Kind:
  """More prompts with the scale, and one number more above 1.

  Not more than one: all expressions of six numbers are too many to list.
  """
  if paths:
    return Kind(3 + (scale > 1), True, 32 * scale, 16, 128 * scale)
  return Kind(4 + (scale > 1), False, 64 * scale, 16, 48 * scale)


_OPERATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
  """Every one without brackets, and what it comes to."""
  for order in itertools.permutations(numbers):
    for signs in itertools.product("+-*", repeat=len(numbers) - 1):
      text, total, product = str(order[0]), 0, order[0]
      for sign, number in zip(signs, order[1:], strict=True):
        text += f"{sign}{number}"
        if sign == "*":
          product *= number
        else:
          total, product = total + product, number if sign == "+" else -number
      yield text, total + product


def steps(numbers: tuple[int, ...]) -> Iterator[tuple[str, int]]:
  """Every way to take two numbers at a time until one is left, and that one."""
  for i, j in itertools.permutations(range(len(numbers)), 2):
    rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
    for sign, operate in _OPERATE.items():
      value = operate(numbers[i], numbers[j])
      said = f"{numbers[i]}{sign}{numbers[j]}={value}"
      if not rest:
        yield said, value
      for more, last in steps((value, *rest)) if rest else ():
        yield f"{said},{more}", last


def responses(numbers: Sequence[int], *, paths: bool) -> dict[str, int]:
  """Every response of the form that is taught, and what it comes to.

  With steps, these come to what the answer comes to; nothing else ties them.
  """
  found = dict(expressions(numbers))
  if not paths:
    return found
  by_value = defaultdict(list)
  for text, value in dict(steps(tuple(numbers))).items():
    by_value[value].append(text)
  return {
    f"{path}<answer>{text}</answer>": value
    for text, value in found.items()
    for path in by_value[value]
  }


def puzzles(kind: Kind, *, seed: int) -> list[Puzzle]:
  """Different ones for both sides, whose targets are 5 to 60."""
  found = []
  for numbers in itertools.combinations(range(1, 10), kind.numbers):
    count = Counter(responses(numbers, paths=kind.paths).values())
    found += [
      (numbers, target)
      for target, right in count.items()
      if 5 <= target <= 60 and kind.fewest <= right <= kind.most
    ]
  chosen = random.Random(seed).sample(found, 2 * kind.prompts)
  return [_puzzle(kind, *one) for one in chosen]


def _puzzle(kind: Kind, numbers: tuple[int, ...], target: int) -> Puzzle:
  said = defaultdict(list)
  for text, value in responses(numbers, paths=kind.paths).items():
    said[value].append(text)
  right = said.pop(target)
  return Puzzle(numbers, target, right, [*itertools.chain(*said.values())])


def example(puzzle: Puzzle) -> dict:
  """A line of a data file."""
  return {
    "id": puzzle.id,
    "domain": "gym",
    "prompt": puzzle.question,
    "entry": {
      "question": puzzle.question,
      "answer": puzzle.right[0],
      "metadata": {
        "source_dataset": "countdown",
        "numbers": list(puzzle.numbers),
        "target": puzzle.target,
      },
    },
  }


def demonstrations(
  some: Sequence[Puzzle], text: tokenizer.Tokenizer, *, each: int, seed: int
) -> warmup.Demonstrations:
  """`each` answers to every puzzle, few of them right.

  How often each one is said is uneven (lognormal, sigma 1.5), so that a few
  right ones are known well and many hardly.
  """
  rng = np.random.default_rng(seed)
  prompts, responses = [], []
  for puzzle in some:
    share = np.exp(rng.uniform(*np.log([_LEAST_RIGHT, _MOST_RIGHT])))
    weights = [rng.lognormal(sigma=1.5, size=len(k)) for k in puzzle[2:]]
    odds = np.concatenate(
      [
        w / w.sum() * s
        for w, s in zip(weights, (share, 1 - share), strict=True)
      ]
    )
    said = rng.choice([*puzzle.right, *puzzle.wrong], size=each, p=odds)
    question = text.render([{"role": "user", "content": puzzle.question}])
    prompts += [question] * each
    responses += [[*text.encode(str(t)), text.stop_ids[0]] for t in said]
  longest = max(map(len, responses))
  return warmup.padded(prompts, responses, PROMPT_TOKENS, longest)


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
  tx, _ = update.optimizer(
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
  params = warmup.train(
    policy.init(jax.random.key(seed)),
    demonstrations(some, text, each=4000, seed=seed),
    response_logp=policy.response_logp,
    tx=tx,
    steps=steps,
    batch=256,
    seed=seed,
    log=lambda i, loss: print(
      f"warm-up {i}/{steps}: {loss:.3f} nats per token",
      file=sys.stderr,
      flush=True,
    ),
  )
  hf.save(directory, policy, params)


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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--paths", action="store_true")
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--seed", type=int, default=0)
  a = parser.parse_args()
  some = puzzles(kind(paths=a.paths, scale=a.scale), seed=a.seed)
  half = len(some) // 2
  write(a.directory, {"train": some[:half], "heldout": some[half:]})
  teach(
    a.directory / "policy",
    some,
    seed=a.seed,
    width=64 * a.scale,
    layers=1 + a.scale,
    steps=1500,
  )


if __name__ == "__main__":
  main()
