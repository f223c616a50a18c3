"""events.jsonl: what does not happen in every step.

There are two kinds of events. Those of training follow from the steps of the
run: a phase, a reset of the reference, an update that was skipped. A resume
computes their steps again, so it drops them with the other lines of these steps
and writes them again. Those of a process tell what happened to it and to its
machine: it started, warned, ended. Nothing repeats them, so none is dropped.
"""

import collections
import datetime
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.runs import lines

OF_PROCESS = frozenset(
  {
    "start",
    "resume",
    "config",
    "data",
    "warning",
    "workers",
    "back",
    "end",
  }
)
# Those that `run.notify` is called with.
TOLD = frozenset({"start", "resume", "warning", "guard", "inversion", "end"})
# What a resume says of a process that wrote nothing when it ended.
NO_WORD = "nothing: it was killed, or its machine failed"


def of_process(line: Mapping[str, Any]) -> bool:
  """Whether a line tells of a process, and so stays whatever is computed."""
  kind = line.get("event")
  return isinstance(kind, str) and kind in OF_PROCESS


def now() -> str:
  """The time, as ISO 8601 in UTC with milliseconds."""
  at = datetime.datetime.now(datetime.UTC)
  return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def here() -> dict[str, Any]:
  """Which process of which machine this is."""
  return {"pid": os.getpid(), "host": platform.node()}


def last_word(path: pathlib.Path) -> str | None:
  """Why the last process of a run ended; None if no process is named.

  Args:
    path: events.jsonl, without unreadable lines.
  """
  said = None
  for line in lines.each_line(path):
    if line.get("event") in ("start", "resume"):
      said = NO_WORD
    elif line.get("event") == "end":
      said = str(line.get("why"))
  return said


def most_often(reasons: Mapping[str, int], most: int = 3) -> str:
  """The most frequent reasons with their counts, as one line."""
  ranked = sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
  more = [f"{len(ranked) - most} other reasons"] if len(ranked) > most else []
  return "; ".join([*(f"{n} x {why}" for why, n in ranked[:most]), *more])


def unjudged(
  failed: Sequence[tuple[str, str]], of: int
) -> dict[str, Any] | None:
  """The event of answers whose verifier failed; None if there are none.

  Args:
    failed: Task and reason of each.
    of: Number of all answers.
  """
  if not failed:
    return None
  (task, why), _ = collections.Counter(failed).most_common(1)[0]
  count = len(failed)
  return {
    "event": "unjudged", "count": count, "of": of, "task": task, "why": why,
  }  # fmt: skip


def left_out(places: Iterable[str]) -> dict[str, Any] | None:
  """The event of data lines that were refused; None if there are none.

  Args:
    places: "FILE, line NUMBER...: REASON" of each.
  """
  every = [*places]
  if not every:
    return None
  file = lambda place: re.split(r", (?:line|row) \d", place)[0]
  files = collections.Counter(map(file, every))
  count = ", ".join(f"{n} of {name}" for name, n in sorted(files.items()))
  why = f"lines left out: {count}; the first: {every[0]}"
  return {"event": "data", "count": len(every), "why": why}
