"""Writes responses of four qualities."""

from __future__ import annotations

import random
from collections.abc import Mapping

from launch.embedded.steps import (
  countdown,
  digits,
  divisors,
  letters,
  paths,
  sums,
)
from launch.embedded.steps.pen import Entry, Pen, Task

QUALITIES = ("careful", "detour", "sloppy", "direct")

# Countdown is searched, so it has its own functions.
_SOLVED: Mapping[str, Task] = {
  **sums.TASKS,
  **divisors.TASKS,
  **digits.TASKS,
  **letters.TASKS,
  **paths.TASKS,
}
TASKS = frozenset({*_SOLVED, "countdown"})

WRONG = 0.75  # share of sloppy responses with an error
SLIP = 0.6  # share of their steps that slip; at least one does
_TRIES = 50  # slips until one changes the answer


def write(entry: Entry, quality: str, rng: random.Random) -> str:
  """Writes a response, a pure function of its arguments.

  Args:
    entry: A reasoning-gym item: question, answer, metadata.
    quality: "careful": every step, right. "detour": as careful, but some steps
      are wrong, taken back with " no" and written again; in countdown attempts
      fail. "sloppy": steps are left out or merged, and three of four responses
      go on from an error. "direct": the answer alone.
    rng: Chooses the errors and what is left out.

  Returns:
    A line per step, then the answer between its tags.

  Raises:
    ValueError: The task has no writer, the quality is none, or the puzzle
      needs no steps or cannot be solved.
  """
  if quality not in QUALITIES:
    raise ValueError(f"quality = {quality!r}; use one of {QUALITIES}")
  name = entry["metadata"]["source_dataset"]
  if name not in TASKS:
    raise ValueError(f"task {name!r} has no steps; use one of {sorted(TASKS)}")
  if name == "countdown":
    lines, answer = _search(entry, quality, rng)
  else:
    lines, answer = _solve(_SOLVED[name], entry, quality, rng)
  return "\n".join([*lines, f"<answer>{answer}</answer>"])


def _search(
  entry: Entry, quality: str, rng: random.Random
) -> tuple[list[str], str]:
  if quality == "detour":
    return countdown.detour(entry, rng)
  if quality == "sloppy":
    return countdown.sloppy(entry, rng, wrong=rng.random() < WRONG)
  right = countdown.solve(entry)
  return list(right.lines) if quality == "careful" else [], right.text


def _solve(
  task: Task, entry: Entry, quality: str, rng: random.Random
) -> tuple[list[str], str]:
  pen = Pen()
  answer = task.solve(entry, pen)
  if quality == "direct":
    return [], answer
  if not pen.lines:
    raise ValueError(f"the puzzle needs no steps: {entry.get('question')!r}")
  if quality == "detour":
    some = rng.sample(range(len(pen.lines)), min(2, len(pen.lines)))
    pen = Pen(rng, some[: rng.choice((1, 1, 2))], corrects=True)
    answer = task.solve(entry, pen)
  elif quality == "sloppy" and rng.random() < WRONG:
    pen, answer = _wrong(task, entry, len(pen.lines), answer, rng)
    if rng.random() < 0.5:
      return _skipped(task, pen, rng), answer
  elif quality == "sloppy":
    return _skipped(task, pen, rng), answer
  return pen.lines, answer


def _wrong(
  task: Task, entry: Entry, steps: int, right: str, rng: random.Random
) -> tuple[Pen, str]:
  """Steps with some slips, which mostly change the answer."""
  pen, answer = Pen(), right
  for _ in range(_TRIES):
    some = [i for i in range(steps) if rng.random() < SLIP]
    pen = Pen(rng, some or [rng.randrange(steps)])
    answer = task.solve(entry, pen)
    if answer != right:
      break
  return pen, answer


def _skipped(task: Task, pen: Pen, rng: random.Random) -> list[str]:
  """Merges or leaves out some lines before the slip, or before the last."""
  lines = list(pen.lines)
  end = min([*pen.slips, len(lines) - 1])
  chosen = [i for i in range(end) if rng.random() < 0.5]
  if not chosen and end > 0:
    chosen = [rng.randrange(end)]
  for i in reversed(chosen):
    merged = task.merge(lines[i], lines[i + 1]) if task.merge else None
    if merged is not None:
      lines[i : i + 2] = [merged]
    elif task.drop:
      del lines[i]
  return lines
