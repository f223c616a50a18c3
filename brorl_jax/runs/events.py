"""events.jsonl: what does not happen in every step.

Events of training follow from the steps: a phase, a reset of the reference, a
skipped update. A resume drops them with the lines of the steps that it computes
again, and writes them again. Events of a process (it started, warned, ended)
are not repeated, so none is dropped.
"""

import collections
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.runs import lines

OF_PROCESS = frozenset(
  {"start", "resume", "config", "data", "warning", "workers", "end"}
)
# With these `run.notify` is called.
NOTIFIED = frozenset({"start", "resume", "warning", "guard", "end"})
_NOTIFY_S = 30.0  # the longest call of that command
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


def notify(command: str, event: Mapping[str, Any]) -> None:
  """Calls the user's command with an event, as JSON on standard input.

  Whatever it does, the run continues; the terminal shows a failure. It is
  split into words as by a shell, but no shell runs it; "" is no command.
  """
  if not command:
    return
  try:
    subprocess.run(
      shlex.split(command),
      input=json.dumps(event).encode() + b"\n",
      # It may leave processes that would hold the output of the run open.
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      timeout=_NOTIFY_S,
      check=True,
    )
  except (OSError, ValueError, subprocess.SubprocessError) as e:
    print(f"warning: run.notify: {e}")


def last_word(path: pathlib.Path) -> str | None:
  """Why the last process of events.jsonl ended; None if none is named."""
  said = None
  for line in lines.each_line(path):
    if line.get("event") in ("start", "resume"):
      said = NO_WORD
    elif line.get("event") == "end":
      said = str(line.get("why"))
  return said


def most_frequent(reasons: Mapping[str, int], most: int = 3) -> str:
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
  counts = {"count": len(failed), "of": of}
  return {"event": "unjudged", **counts, "task": task, "why": why}


def left_out(places: Iterable[str]) -> dict[str, Any] | None:
  """The event of data lines that were refused; None if there are none.

  Args:
    places: "FILE, line NUMBER...: REASON" of each.
  """
  if not (every := [*places]):
    return None
  files = collections.Counter(
    re.split(r", (?:line|row) \d", x)[0] for x in every
  )
  count = ", ".join(f"{n} of {name}" for name, n in sorted(files.items()))
  why = f"lines left out: {count}; the first: {every[0]}"
  return {"event": "data", "count": len(every), "why": why}
