"""Numbers and a target: puzzles with many right answers, all of them known.

  python -m launch.revival.countdown runs/revival/countdown

An answer is an expression that uses each number once, such as 3*4+5+7 for
3 4 5 7 -> 24; the scorer of reasoning-gym's `countdown` decides. There are 24
orders of four numbers and 27 choices of three operators from + - *, so that
all 648 expressions without brackets can be listed, and the 16 to 48 right ones
among them. With --paths there are three numbers, and steps to the target come
before the answer, in any order; the scorer sees only the answer:

  4*3=12,5+12=17<answer>3*4+5</answer>

taught.py describes the folder.
"""

import argparse
import itertools
import operator
import pathlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launch.revival import taught
from launch.revival.taught import Puzzle


class Kind(NamedTuple):
  """What is asked."""

  numbers: int
  paths: bool  # steps before the answer
  prompts: int  # of each side
  fewest: int  # right responses to a prompt
  most: int


def kind(*, paths: bool, scale: int) -> Kind:
  """More prompts with the scale, and one number more above 1.

  Not more than one: all expressions of six numbers are too many to list.
  """
  if paths:
    return Kind(3 + (scale > 1), True, 32 * scale, 16, 128 * scale)
  return Kind(4 + (scale > 1), False, 64 * scale, 16, 48 * scale)


_OPERATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
  """Every expression without brackets, and its value."""
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
  """Every response of the taught form, and its value.

  With steps, only the values of steps and answer must agree.
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
  """Distinct puzzles for both sides, with targets 5 to 60."""
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
  return Puzzle(
    "countdown-" + "-".join(map(str, (*numbers, target))),
    f"{' '.join(map(str, numbers))} -> {target}",
    {
      "source_dataset": "countdown",
      "numbers": list(numbers),
      "target": target,
    },
    right,
    [*itertools.chain(*said.values())],
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--paths", action="store_true")
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--seed", type=int, default=0)
  a = parser.parse_args()
  some = puzzles(kind(paths=a.paths, scale=a.scale), seed=a.seed)
  taught.make(a.directory, some, scale=a.scale, seed=a.seed)


if __name__ == "__main__":
  main()
