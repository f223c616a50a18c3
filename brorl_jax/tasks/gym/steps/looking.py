"""Counts the steps of a response, and those that are wrong."""

from __future__ import annotations

from brorl_jax.tasks.base import Steps
from brorl_jax.tasks.gym.steps import countdown, writing
from brorl_jax.tasks.gym.steps.pen import NO
from brorl_jax.tasks.gym.steps.task import Entry, Judge


def look(response: str, entry: Entry) -> Steps:
  """Counts steps, judged by arithmetic and by the entry.

  Right steps may come in any order, be merged or left out. A step that is
  computed rightly from a wrong value is right. Lines that are no step of the
  task count as nothing. The time is linear in the length of the response.

  Args:
    response: Any text.
    entry: The puzzle, of a task that has a writer.

  Raises:
    ValueError: The task has no writer.
  """
  judge = _judge(entry)
  count = wrong = taken_back = 0
  for line in response.split("\n"):
    stands = not line.endswith(NO)
    right = judge.read(line.removesuffix(NO), stands)
    if right is None:
      continue
    count += 1
    taken_back += not stands
    wrong += stands and not right
  return Steps(count, wrong, taken_back)


def _judge(entry: Entry) -> Judge:
  name = writing.task_of(entry)
  if name == "countdown":
    return countdown.Judge(entry)
  return writing.SOLVED[name].judge(entry, writing.right_lines(entry))
