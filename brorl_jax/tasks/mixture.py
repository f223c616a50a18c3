"""Which family each training prompt comes from, by weight.

Both functions are pure and take (step, position), so a run that resumes at any
step, on any platform, sees the prompts it would have seen.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence

POSITIONS = 2**20  # candidates in one step; dynamic sampling stays far below


def check(weights: Sequence[float]) -> None:
  """Refuses weights that do not define a distribution.

  Args:
    weights: One relative weight per family; they need not add up to 1.

  Raises:
    ValueError: If a weight is negative or not finite, or their sum is not a
      positive finite number.
  """
  for i, weight in enumerate(weights):
    real = isinstance(weight, numbers.Real)
    if not (real and math.isfinite(weight) and weight >= 0):
      raise ValueError(f"weights[{i}] is {weight!r}; use a finite number >= 0")
  # fsum overflows with an exception where sum would give inf.
  total = sum(weights)
  if not (total > 0 and math.isfinite(total)):
    raise ValueError(
      f"weights {list(weights)} add up to {total}; at least one must be"
      " positive and their sum finite"
    )


def pick(seed: int, step: int, position: int, weights: Sequence[float]) -> int:
  """The family of one candidate prompt, drawn by weight.

    P(pick = i) = weights[i] / sum(weights), independent over (step, position)

  Args:
    seed: The run's data seed, >= 0.
    step: Training step, >= 0.
    position: Place among the step's candidates, in [0, 2**20).
    weights: One relative weight per family.

  Returns:
    An index into `weights`, never that of a zero weight.

  Raises:
    ValueError: If an argument is out of range.
  """
  check(weights)
  _refuse_out_of_range(step, position)
  if seed < 0:
    raise ValueError(f"seed is {seed}; use a number >= 0")
  # A hash instead of a random generator: numpy and the standard library may
  # change their streams between versions, BLAKE2 (RFC 7693) may not.
  digest = hashlib.blake2b(
    f"{seed}/{step}/{position}".encode(), digest_size=8, person=b"mixture"
  ).digest()
  uniform = (int.from_bytes(digest, "little") >> 11) * 2.0**-53
  threshold = uniform * sum(weights)
  cumulative = 0.0
  chosen = 0
  for i, weight in enumerate(weights):
    if weight > 0:
      # Rounding may leave the threshold at the total: then the last one.
      chosen = i
      cumulative += weight
      if threshold < cumulative:
        break
  return chosen


def index(step: int, position: int) -> int:
  """The puzzle index of one candidate: step * 2**20 + position.

  Distinct (step, position) have distinct indexes, whichever families they
  fall into.

  Args:
    step: Training step, >= 0.
    position: Place among the step's candidates, in [0, 2**20).

  Raises:
    ValueError: If an argument is out of range.
  """
  _refuse_out_of_range(step, position)
  return step * POSITIONS + position


def _refuse_out_of_range(step: int, position: int) -> None:
  if step < 0:
    raise ValueError(f"step is {step}; use a number >= 0")
  if not 0 <= position < POSITIONS:
    raise ValueError(f"position is {position}; use 0 to {POSITIONS - 1}")
