"""One rule for all prompts: write four digits in ascending order.

  c4927 -> 2479

The demonstrations mostly write them backwards (7294). How often they are right
depends on the letter alone, so that all prompts gain from the same change of
the policy: their gradients are aligned. Twins have the same letter and other
digits.
"""

import itertools

import numpy as np

from launch.frontier.problems import Pair, Problem, share

_LETTERS = {
  "hard": "abcdefgh",
  "medium": "ijkl",
  "easy": "mnop",
  "impossible": "qrst",
}


def problems(*, count: int, seed: int) -> list[Pair]:
  """Distinct prompts, as many of each class."""
  rng = np.random.default_rng(seed)
  codes = [
    code
    for code in map("".join, itertools.product("0123456789", repeat=4))
    if "".join(sorted(code)) != code[::-1]
  ]
  each, out = count // len(_LETTERS), []
  for wanted, letters in _LETTERS.items():
    shares = [share(wanted, rng) for _ in letters]
    drawn = [codes[k] for k in rng.permutation(len(codes))[: 2 * each]]
    for i, (one, other) in enumerate(zip(drawn[::2], drawn[1::2], strict=True)):
      of = letters[i % len(letters)], shares[i % len(letters)]
      out.append(Pair(_problem(one, *of), _problem(other, *of), wanted))
  return [out[k] for k in rng.permutation(len(out))]


def _problem(code: str, letter: str, right: float) -> Problem:
  said = ["".join(sorted(code)), code[::-1]]
  return Problem(
    letter + code, said[:1] if right else [], said, np.array([right, 1 - right])
  )
