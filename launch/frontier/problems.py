"""Problems whose right answers are all known, in four classes of difficulty.

A class is a range of p, the probability that the policy gives a right answer
before any training with rewards:

  hard        .001 to .03
  medium      .05 to .3
  easy        .3 to .6
  impossible  0: no answer is right

What is demonstrated decides p roughly. Then p is measured (`exact.py`), and
problems outside the range of their class are not used.

Each problem has a twin that is held out: the same in another form, or the same
rule on another input.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

CLASSES = {
  "hard": (1e-3, 3e-2),
  "medium": (0.05, 0.3),
  "easy": (0.3, 0.6),
  "impossible": (0.0, 0.0),
}
# Classes of a pool, in equal shares, and how many times the prompts it has.
POOLS = {
  "hard": (("hard",), 1),
  "easy": (("easy",), 1),
  "mixed": (tuple(CLASSES), 1),
  "large": (tuple(CLASSES), 2),
}


class Problem(NamedTuple):
  """A prompt, its right answers, and what is demonstrated.

  Attributes:
    question: The prompt.
    right: All right answers; none if it is impossible.
    said: Answers that are demonstrated.
    odds: How often each one is.
  """

  question: str
  right: Sequence[str]
  said: Sequence[str]
  odds: np.ndarray


class Pair(NamedTuple):
  """A problem to train on, its twin, and the class that is aimed at."""

  train: Problem
  heldout: Problem
  wanted: str


def share(wanted: str, rng: np.random.Generator) -> float:
  """Share of right demonstrations, uniform in its logarithm.

  Some way from the ends of the class, because the policy learns it roughly.
  """
  low, high = CLASSES[wanted]
  if not high:
    return 0.0
  return float(np.exp(rng.uniform(np.log(1.3 * low), np.log(high / 1.3))))


def example(problem: Problem) -> dict:
  """A line of a data file, which `match.py` judges."""
  return {
    "id": problem.question,
    "prompt": problem.question,
    "right": list(problem.right),
  }


def pool(
  some: Sequence[Pair],
  p: Sequence[float] | np.ndarray,
  classes: Iterable[str],
  *,
  count: int,
) -> list[Pair]:
  """`count` pairs, as many of each class, one class after the other.

  Args:
    some: In the order in which they are taken.
    p: Of the problem to train on, as measured.
    classes: Of the pool.
    count: Of pairs.

  Raises:
    ValueError: There are too few of a class.
  """
  classes = tuple(classes)
  each, out = count // len(classes), []
  for name in classes:
    low, high = CLASSES[name]
    fit = [
      one
      for one, measured in zip(some, p, strict=True)
      if low <= measured <= high and (one.wanted == "impossible") == (not high)
    ]
    if len(fit) < each:
      raise ValueError(
        f"{len(fit)} of {len(some)} problems are {name} ({low:g} <= p <= "
        f"{high:g}), fewer than the {each} of a pool; demonstrate more of them"
      )
    out += fit[:each]
  return out
