"""What a task gives: how it is solved, and how a line of it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from brorl_jax.tasks.gym.steps.pen import Pen

Entry = Mapping[str, Any]


class Judge(Protocol):
  """Reads the lines of one response, in their order."""

  def read(self, text: str, stands: bool) -> bool | None:
    """Judges a line.

    Args:
      text: Without the mark of a line that is taken back.
      stands: False for a line that is taken back; nothing is kept of it.

    Returns:
      Whether the step is right; None if the line is no step.
    """
    ...


class Task(NamedTuple):
  """A task with a writer.

  Attributes:
    solve: Writes the steps with a pen and returns the answer that they lead to.
      Raises ValueError if the puzzle has no steps.
    judge: Of the entry and the lines of the right solution.
    merge: One line for two, or None where these two have none.
    drop: Whether a line may be left out without another in its place.
  """

  solve: Callable[[Entry, Pen], str]
  judge: Callable[[Entry, list[str]], Judge]
  merge: Callable[[str, str], str | None] | None = None
  drop: bool = True
