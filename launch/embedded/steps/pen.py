"""Writes the lines of a solution, and slips where it is told to.

And what a task gives: how it is solved with that pen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

Entry = Mapping[str, Any]  # a puzzle of reasoning-gym
T = TypeVar("T")

NO = " no"  # ends a line that is taken back
HABIT = 0.6  # share of slips that are the first of the plausible ones


class Pen:
  """Writes one line per step.

  A solver asks the pen for every value it needs, and continues with what the
  pen returns. So one solver writes right steps, corrected ones, and steps that
  follow from a slip.

  Attributes:
    lines: What was written.
    slips: Places in `lines` of the slips that stand.
  """

  def __init__(
    self,
    rng: random.Random | None = None,
    at: Iterable[int] = (),
    *,
    corrects: bool = False,
  ):
    """Starts with no line.

    Args:
      rng: Chooses the slips; None where there are none.
      at: Numbers of the steps that slip.
      corrects: Whether a slip is taken back at once.
    """
    self.lines: list[str] = []
    self.slips: list[int] = []
    self._rng, self._at, self._corrects = rng, frozenset(at), corrects
    self._steps = 0

  def step(
    self, value: T, line: Callable[[T], str], slips: Iterable[T] = ()
  ) -> T:
    """Writes a step.

    Args:
      value: The right value.
      line: The text for a value.
      slips: Wrong values that are plausible.

    Returns:
      The value that was written, and stands.
    """
    wrong = [slip for slip in slips if slip != value]
    slips_here = self._steps in self._at and wrong
    self._steps += 1
    if not slips_here or self._rng is None:
      self.lines.append(line(value))
      return value
    # A habit: were slips spread evenly, sampling at a low temperature would
    # leave them all out, and there would be nothing to learn.
    slip = wrong[0] if self._rng.random() < HABIT else self._rng.choice(wrong)
    if self._corrects:
      self.lines += [line(slip) + NO, line(value)]
      return value
    self.slips.append(len(self.lines))
    self.lines.append(line(slip))
    return slip

  def equals(self, left: str, value: int, *slips: int) -> int:
    """Writes `left=value`; may slip to a number near by, or to `slips`."""
    return self.step(value, lambda v: f"{left}={v}", [*near(value), *slips])


def near(value: int) -> list[int]:
  """Numbers with the sign of `value` of which one digit is off by one.

  Off by ten is a forgotten carry.
  """
  steps = [p for p in (1, 10, 100) if p == 1 or abs(value) >= p]
  found = [value + sign * step for step in steps for sign in (-1, 1)]
  return [n for n in found if (n < 0) == (value < 0)]


def parts(number: int) -> list[int]:
  """The digits at their places: 407 is 400 and 7; 0 is 0."""
  text = str(abs(number))
  digits = [int(d) * 10 ** (len(text) - 1 - i) for i, d in enumerate(text)]
  return [part for part in digits if part] or [0]


class Task(NamedTuple):
  """How the puzzles of a task are solved.

  Attributes:
    solve: Writes the steps with a pen and returns the answer that they lead to.
      Raises ValueError if the puzzle has no steps.
    merge: One line for two, or None where these two have none.
    drop: Whether a line may be left out without another in its place.
  """

  solve: Callable[[Entry, Pen], str]
  merge: Callable[[str, str], str | None] | None = None
  drop: bool = True
