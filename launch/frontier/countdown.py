"""Numbers and a target: problems with many right answers, all of them known.

  3 4 5 7 -> 24        3*4+5+7

An answer is an expression that uses each number once. There are 24 orders of
four numbers and 27 choices of three operators from + - *, so that all 648
expressions without brackets can be listed, and the 4 to 19 right ones among
them. The demonstrations are any of the 648, so that p is the share of right
ones: all problems are hard. A twin has the numbers in another order, and the
same answers.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from launch.frontier.problems import Pair, Problem

_FEWEST, _MOST = 4, 19  # right answers: p of .006 to .029
_TARGETS = range(5, 61)


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
  """Distinct problems."""
  rng = np.random.default_rng(seed)
  every = []
  for numbers in itertools.combinations(range(1, 10), 4):
    by_value = defaultdict(list)
    for text, value in expressions(numbers):
      by_value[value].append(text)
    every += [
      (numbers, target, by_value)
      for target in _TARGETS
      if _FEWEST <= len(by_value.get(target, ())) <= _MOST
    ]
  out = []
  for k in rng.permutation(len(every))[:count]:
    numbers, target, by_value = every[k]
    said = [text for some in by_value.values() for text in some]
    orders = [*itertools.permutations(numbers)]
    one, other = (
      f"{' '.join(map(str, orders[i]))} -> {target}"
      for i in rng.permutation(len(orders))[:2]
    )
    problem = Problem(one, by_value[target], said, np.ones(len(said)))
    out.append(Pair(problem, problem._replace(question=other), "hard"))
  return out
