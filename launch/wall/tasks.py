"""Prompts whose right answers are all known, so that p can be computed.

p is the probability that a policy gives a right answer. A hard prompt begins
with p between .001 and .03: rare demonstrations were right. Each has a twin
that is held out: the same problem in another form.

  own         a4927.3 -> 305      a number that no rule gives
  steps       a4927.3 -> l1r2r3   ten turns that no rule gives, to l or r
  countdown   3 4 5 7 -> 24       3*4+5+7, one of some right answers
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# p before any training with rewards. All classes are demonstrated, hard prompts
# are trained on: a policy that saw these alone would be another.
CLASSES = {
  "hard": (1e-3, 3e-2),
  "medium": (0.05, 0.3),
  "easy": (0.3, 0.6),
  "impossible": (0.0, 0.0),
}
# How often each digit of a number is said, or each turn of ten: for each letter
# of a prompt they are in another order.
_FALLING = 1.6 ** -np.arange(10.0)
_ODDS = {
  "own": {
    "hard": (_FALLING, _FALLING, _FALLING),
    "medium": (_FALLING, [1], [1]),
    "easy": ([0.55, 0.4, 0.05], [1], [1]),
    "impossible": (_FALLING, _FALLING, _FALLING),
  },
  "steps": {
    "hard": 10 * ([0.68, 0.32],),
    "medium": 10 * ([0.87, 0.13],),
    "easy": 10 * ([0.95, 0.05],),
    "impossible": 10 * ([0.68, 0.32],),
  },
}
_ANSWERS = {
  "own": [f"{k:03d}" for k in range(1000)],
  "steps": [
    "".join(f"{turn}{i}" for i, turn in enumerate(turns))
    for turns in itertools.product("lr", repeat=10)
  ],
}
_LETTERS = {
  "hard": "abcdefghijklmnop",
  "medium": "qrst",
  "easy": "uvwx",
  "impossible": "yz",
}
_FEWEST, _MOST = 4, 19  # right answers to countdown: p of .006 to .029
_TARGETS = range(5, 61)


class Problem(NamedTuple):
  """A prompt, its right answers, and what is demonstrated how often."""

  question: str
  right: Sequence[str]  # none if it is impossible
  said: Sequence[str]
  odds: np.ndarray


class Pair(NamedTuple):
  """A problem to train on, its twin, and the class that is aimed at."""

  train: Problem
  heldout: Problem
  wanted: str


def example(problem: Problem) -> dict[str, Any]:
  """A line of a data file."""
  question, right, *_ = problem
  return {"id": question, "prompt": question, "right": [*right]}


def hard(
  some: Sequence[Pair], p: Sequence[float] | np.ndarray, *, count: int
) -> list[Pair]:
  """The first `count` pairs that are hard; `p` is of their first, as measured.

  Raises ValueError if there are fewer.
  """
  low, high = CLASSES["hard"]
  fit = [
    pair
    for pair, measured in zip(some, p, strict=True)
    if low <= measured <= high and pair.wanted != "impossible"
  ]
  if len(fit) < count:
    raise ValueError(
      f"{len(fit)} of {len(some)} problems have p of {low:g} to {high:g}, "
      f"and {count} are needed; demonstrate more of them"
    )
  return fit[:count]


def _odds(task: str, wanted: str, rng: np.random.Generator) -> np.ndarray:
  """Of every answer, for one letter."""
  digits, each = [], {"own": 10, "steps": 2}[task]
  for some in _ODDS[task][wanted]:
    one = np.zeros(each)
    one[: len(some)] = some
    digits.append(rng.permutation(one / one.sum()))
  return functools.reduce(np.multiply.outer, digits).reshape(-1)


def _share(wanted: str, rng: np.random.Generator) -> float:
  """Share of right demonstrations, uniform in its logarithm: some way from the
  ends of the class, because the policy learns it roughly.
  """
  low, high = CLASSES[wanted]
  return float(np.exp(rng.uniform(np.log(1.3 * low), np.log(high / 1.3))))


def own(*, count: int, seed: int, task: str = "own") -> list[Pair]:
  """Prompts of which each has an answer of its own.

  Demonstrations say answers that have nothing to do with the digits of the
  prompt, some often and most rarely; its letter decides which. The right one is
  drawn for each prompt. So what is learned on one is of no use on another. The
  digit behind the point means nothing, and a twin has another.
  """
  rng, answers = np.random.default_rng(seed), _ANSWERS[task]
  every = {
    letter: _odds(task, wanted, rng)
    for wanted, letters in _LETTERS.items()
    for letter in letters
  }
  taken = {letter: np.zeros(len(answers)) for letter in every}
  out = []
  for i, code in enumerate(rng.permutation(10_000)[:count]):
    wanted = [*CLASSES][i % len(CLASSES)]
    letter = str(rng.choice([*_LETTERS[wanted]]))
    said, right = every[letter], []
    if wanted != "impossible":
      low, high = CLASSES[wanted]
      fit = np.flatnonzero((said >= low) & (said <= high))
      # Seldom that of another prompt with this letter, or one answer
      # would serve many.
      apart = np.abs(np.log(said[fit] / _share(wanted, rng)))
      best = fit[np.argmin(apart + 2.0 * taken[letter][fit])]
      taken[letter][best] += 1
      right = [answers[best]]
    problem = Problem(f"{letter}{code:04d}.", right, answers, said)
    one, other = (
      problem._replace(question=f"{problem.question}{k}")
      for k in rng.permutation(10)[:2]
    )
    out.append(Pair(one, other, wanted))
  return out


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
  """Every expression in + - * that uses each once, without brackets, and its
  value: 24 orders of four numbers and 27 choices of three operators.
  """
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


def countdown(*, count: int, seed: int) -> list[Pair]:
  """Four numbers and a target. Any of the 648 expressions is demonstrated, so
  that p is the share of right ones; a twin has the numbers in another order.
  """
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


TASKS: Mapping[str, Any] = {
  "own": own,
  "steps": functools.partial(own, task="steps"),
  "countdown": countdown,
}
