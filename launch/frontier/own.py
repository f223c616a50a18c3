"""Another answer for each prompt: a number that no rule gives.

  a4927.3 -> 305

The demonstrations say numbers that have nothing to do with the digits of the
prompt, some of them often and most of them rarely; its letter decides which.
Which of these numbers is right is drawn for each prompt. So the policy has to
learn every prompt by itself, and what it learns on one is of no use on another:
their gradients are nearly orthogonal.

What stands behind the point is without meaning. It is another digit in the
twin, whose answer is the same.
"""

import numpy as np

from launch.frontier.problems import CLASSES, Pair, Problem, share

# How often each digit of a number is said, by class: for each letter the digits
# are in another order.
_FALLING = 1.6 ** -np.arange(10.0)
_ODDS = {
  "hard": (_FALLING, _FALLING, _FALLING),
  "medium": (_FALLING, [1], [1]),
  "easy": ([0.55, 0.4, 0.05], [1], [1]),
  "impossible": (_FALLING, _FALLING, _FALLING),
}
_LETTERS = {
  "hard": "abcdefghijklmnop",
  "medium": "qrst",
  "easy": "uvwx",
  "impossible": "yz",
}
_NUMBERS = [f"{k:03d}" for k in range(1000)]


def odds(wanted: str, rng: np.random.Generator) -> np.ndarray:
  """Of the numbers 000 to 999, for one letter."""
  digits = []
  for some in _ODDS[wanted]:
    one = np.zeros(10)
    one[: len(some)] = some
    digits.append(rng.permutation(one / one.sum()))
  return np.einsum("i,j,k->ijk", *digits).reshape(-1)


def problems(*, count: int, seed: int) -> list[Pair]:
  """Distinct prompts, as many of each class."""
  rng = np.random.default_rng(seed)
  every = {
    letter: odds(wanted, rng)
    for wanted, letters in _LETTERS.items()
    for letter in letters
  }
  taken = {letter: np.zeros(len(_NUMBERS)) for letter in every}
  out = []
  for i, code in enumerate(rng.permutation(10_000)[:count]):
    wanted = [*CLASSES][i % len(CLASSES)]
    letter = str(rng.choice([*_LETTERS[wanted]]))
    own, right = every[letter], []
    if wanted != "impossible":
      low, high = CLASSES[wanted]
      fit = np.flatnonzero((own >= low) & (own <= high))
      # Uniform in the logarithm of p, and seldom the number of another prompt
      # with this letter, or one answer would serve many.
      apart = np.abs(np.log(own[fit] / share(wanted, rng)))
      best = fit[np.argmin(apart + 2.0 * taken[letter][fit])]
      taken[letter][best] += 1
      right = [_NUMBERS[best]]
    problem = Problem(f"{letter}{code:04d}.", right, _NUMBERS, own)
    one, other = (
      problem._replace(question=f"{problem.question}{k}")
      for k in rng.permutation(10)[:2]
    )
    out.append(Pair(one, other, wanted))
  return out
