"""Numbers and a target: problems with many right answers, all of them known.

  a 3 4 5 7 -> 24        3*4+5+7

An answer is an expression that uses each number once. There are 24 orders of
four numbers and 27 choices of three operators from + - *, so that all 648
expressions without brackets can be listed, and the 16 to 48 right ones among
them. Where no expression reaches the target, the problem is impossible.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from launch.frontier.problems import CLASSES, Pair, Problem, share

_FEWEST, _MOST = 16, 48  # right answers
_TARGETS = range(5, 61)
_LETTERS = {
  "hard": "abcdefgh",
  "medium": "ijkl",
  "easy": "mnop",
  "impossible": "q",
}


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


def problems(*, count: int, seed: int) -> list[Pair]:
  """Distinct problems, as many of each class."""
  rng = np.random.default_rng(seed)
  possible, not_possible = [], []
  for numbers in itertools.combinations(range(1, 10), 4):
    by_value = defaultdict(list)
    for text, value in expressions(numbers):
      by_value[value].append(text)
    for target in _TARGETS:
      one = (numbers, target, by_value)
      if target not in by_value:
        not_possible.append(one)
      elif _FEWEST <= len(by_value[target]) <= _MOST:
        possible.append(one)
  per_class = count // len(CLASSES)
  some = iter([possible[k] for k in rng.permutation(len(possible))])
  none = iter([not_possible[k] for k in rng.permutation(len(not_possible))])
  out = []
  for wanted, letters in _LETTERS.items():
    shares = [share(wanted, rng) for _ in letters]
    for i in range(per_class):
      numbers, target, by_value = next(some if CLASSES[wanted][1] else none)
      k = i % len(letters)
      right, said, odds = _answers(target, by_value, shares[k], rng)
      one, other = (
        Problem(
          f"{letters[k]} {' '.join(map(str, order))} -> {target}",
          right, said, odds,
        )
        for order in _orders(numbers, rng)
      )  # fmt: skip
      out.append(Pair(one, other, wanted))
  return [out[k] for k in rng.permutation(len(out))]


def _orders(
  numbers: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, ...]]:
  """Two of the orders of the numbers."""
  every = [*itertools.permutations(numbers)]
  return [every[k] for k in rng.permutation(len(every))[:2]]


def _answers(
  target: int,
  by_value: Mapping[int, Sequence[str]],
  share_of_right: float,
  rng: np.random.Generator,
) -> tuple[list[str], list[str], np.ndarray]:
  """Right answers, those that are demonstrated, and how often each is.

  That is uneven, lognormal with sigma 1.5. A few right ones are thus known well
  and many hardly.
  """
  right = [*by_value.get(target, [])]
  wrong = [
    text for value, some in by_value.items() if value != target for text in some
  ]
  parts = []
  for some, part in ((right, share_of_right), (wrong, 1.0 - share_of_right)):
    weights = rng.lognormal(sigma=1.5, size=len(some))
    parts.append(weights / max(weights.sum(), 1e-30) * part)
  return right, [*right, *wrong], np.concatenate(parts)
