"""Steps of countdown: one operation a line, after attempts that fail."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from launch.embedded.steps.pen import NO, Entry

_LARGEST = 999  # of a value in an attempt that fails
_TRIES = 100


class _Part(NamedTuple):
  """A value in hand and the expression that makes it."""

  value: int
  text: str
  binds: int  # 3: a number, 2: a product, 1: a sum


class Attempt(NamedTuple):
  """All numbers used: a line for each operation, value and expression."""

  lines: tuple[str, ...]
  value: int
  text: str


def _joined(a: _Part, b: _Part) -> list[tuple[str, _Part]]:
  """What two parts make: lines and whole numbers that are not negative."""
  a, b = (b, a) if b.value > a.value else (a, b)

  def made(sign: str, value: int, left: int, right: int, binds: int):
    texts = [
      part.text if part.binds >= least else f"({part.text})"
      for part, least in ((a, left), (b, right))
    ]
    line = f"{a.value}{sign}{b.value}={value}"
    return line, _Part(value, sign.join(texts), binds)

  out = [
    made("+", a.value + b.value, 1, 1, 1),
    made("-", a.value - b.value, 1, 2, 1),
    made("*", a.value * b.value, 2, 2, 2),
  ]
  if b.value and a.value % b.value == 0:
    out.append(made("/", a.value // b.value, 2, 3, 2))
  return out


def _parts(numbers: Sequence[int]) -> list[_Part]:
  return [_Part(number, str(number), 3) for number in numbers]


def solve(entry: Entry) -> Attempt:
  """The first solution in a fixed order: pairs by place, then + - * /.

  Raises:
    ValueError: There is none in whole numbers that are not negative.
  """
  numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
  dead: set[tuple[int, ...]] = set()

  def search(hand: list[_Part], lines: tuple[str, ...]) -> Attempt | None:
    values = tuple(sorted(part.value for part in hand))
    if values in dead:
      return None
    if len(hand) == 1 and hand[0].value == target:
      return Attempt(lines, target, hand[0].text)
    for i, j in itertools.combinations(range(len(hand)), 2):
      others = [part for k, part in enumerate(hand) if k not in (i, j)]
      for line, part in _joined(hand[i], hand[j]):
        found = search([part, *others], (*lines, line))
        if found:
          return found
    dead.add(values)
    return None

  found = search(_parts(numbers), ())
  if found is None:
    raise ValueError(f"{target} cannot be made of {numbers}")
  return found


def _failure(entry: Entry, rng: random.Random) -> Attempt:
  """An attempt at random that does not reach the target."""
  numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
  for _ in range(_TRIES):
    hand, lines = _parts(numbers), []
    while len(hand) > 1:
      rng.shuffle(hand)
      made = _joined(hand.pop(), hand.pop())
      small = [m for m in made if m[1].value <= _LARGEST]
      line, part = rng.choice(small or made)
      lines.append(line)
      hand.append(part)
    if hand[0].value != target:
      return Attempt(tuple(lines), hand[0].value, hand[0].text)
  raise ValueError(f"every attempt makes {target} of {numbers}")


def detour(entry: Entry, rng: random.Random) -> tuple[list[str], str]:
  """One or two attempts that fail and are taken back, then the solution."""
  lines: list[str] = []
  for _ in range(rng.choice((1, 1, 2))):
    lines += _failure(entry, rng).lines
    lines[-1] += NO
  right = solve(entry)
  return [*lines, *right.lines], right.text


def sloppy(
  entry: Entry, rng: random.Random, *, wrong: bool
) -> tuple[list[str], str]:
  """One attempt, the solution in one line or an attempt that fails.

  An attempt that fails is written in one line or step by step. Its last line
  has the target as its result, or the answer is given although it has not.
  """
  target = entry["metadata"]["target"]
  if not wrong:
    right = solve(entry)
    return [f"{right.text}={target}"], right.text
  # The nearest of a few, as of someone who tries.
  failures = [_failure(entry, rng) for _ in range(4)]
  best = min(failures, key=lambda attempt: abs(attempt.value - target))
  lines = list(best.lines)
  if rng.random() < 0.5:
    lines = [f"{best.text}={best.value}"]
  if rng.random() < 0.5:
    lines[-1] = f"{lines[-1].rpartition('=')[0]}={target}"
  return lines, best.text
