"""Draws the family of each training prompt, by weight.

Both functions are pure functions of (step, position), so a resumed run sees the
same prompts on any platform.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence

POSITIONS = 2**20  # candidates in one step; dynamic sampling stays far below
# 2**64 times the golden ratio's fraction: of all numbers the one of which the
# multiples lie most evenly in [0, 1), however many (Knuth, TAOCP 3, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


def check(weights: Sequence[float]) -> None:
  """Refuses weights that do not define a distribution.

  Raises:
    ValueError: A weight is negative or not finite, or the sum is not positive
      and finite.
  """
  for i, weight in enumerate(weights):
    real = isinstance(weight, numbers.Real)
    if not (real and math.isfinite(weight) and weight >= 0):
      raise ValueError(f"weights[{i}] = {weight!r}; use a finite number >= 0")
  # fsum overflows with an exception where sum would give inf.
  total = sum(weights)
  if not (total > 0 and math.isfinite(total)):
    raise ValueError(
      f"weights = {list(weights)} add up to {total}; make at least one positive"
      " and the sum finite"
    )


def pick(seed: int, step: int, position: int, weights: Sequence[float]) -> int:
  """The family of one candidate prompt, drawn by weight.

    P(pick = i) = weights[i] / sum(weights), independent over steps

  Within a step the draws are as even as a lattice makes them: at the first n
  positions they differ from n weights[i] / sum(weights) by about 1, where
  independent draws of 8 prompts from 12 families would leave one family with
  half as many prompts as another after 20 steps.

  Args:
    position: Place among the step's candidates, in [0, 2**20).

  Returns:
    An index into `weights`, never of a zero weight.

  Raises:
    ValueError: An argument is out of range.
  """
  check(weights)
  _refuse_out_of_range(step, position)
  if seed < 0:
    raise ValueError(f"seed = {seed}; use a number >= 0")
  # A hash, not a random generator: numpy and the standard library may change
  # their streams between versions; BLAKE2 (RFC 7693) cannot.
  digest = hashlib.blake2b(
    f"{seed}/{step}".encode(), digest_size=8, person=b"mixture"
  ).digest()
  shift = int.from_bytes(digest, "little")
  # In integers: a product of 2**20 positions would lose digits of the fraction.
  uniform = ((shift + position * _GOLDEN) % 2**64 >> 11) * 2.0**-53
  threshold = uniform * sum(weights)
  cumulative = 0.0
  chosen = 0
  for i, weight in enumerate(weights):
    if weight > 0:
      # If rounding puts the threshold at the total, take the last.
      chosen = i
      cumulative += weight
      if threshold < cumulative:
        break
  return chosen


def index(step: int, position: int) -> int:
  """The puzzle index of one candidate: step * 2**20 + position.

  Distinct (step, position) have distinct indexes in every family.

  Raises:
    ValueError: The step is negative, or the position not in [0, 2**20).
  """
  _refuse_out_of_range(step, position)
  return step * POSITIONS + position


def _refuse_out_of_range(step: int, position: int) -> None:
  if step < 0:
    raise ValueError(f"step = {step}; use a number >= 0")
  if not 0 <= position < POSITIONS:
    raise ValueError(f"position = {position}; use 0 to {POSITIONS - 1}")
