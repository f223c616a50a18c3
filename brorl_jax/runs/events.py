"""events.jsonl: what does not happen in every step.

Events of training follow from the steps: a phase, a reset of the reference, a
skipped update. A resume drops them with the lines of the steps that it computes
again, and writes them again. Events of a process (it started, warned, ended)
are not repeated, so none is dropped.
"""

import datetime
import json
import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

from brorl_jax.runs import lines

OF_PROCESS = ("start", "resume", "config", "data", "warning", "workers", "end")
# With these `run.notify` is called.
NOTIFIED = ("start", "resume", "warning", "guard", "end")
_NOTIFY_S = 30.0  # the longest call of that command
# What a resume says of a process that wrote nothing when it ended.
NO_WORD = "nothing: it was killed, or its machine failed"


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
