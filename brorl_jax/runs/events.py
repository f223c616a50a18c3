"""events.jsonl: what does not happen in every step.

Events of training follow from the steps: a phase, a reset of the reference, a
skipped update. A resume drops them with the lines of the steps that it computes
again, and writes them again. Events of a process (it started, warned, ended)
are not repeated, so none is dropped.
"""

import datetime
import os
import pathlib
import platform
from typing import Any

from brorl_jax.runs import lines

OF_PROCESS = ("start", "resume", "config", "data", "warning", "workers", "end")
# What a resume says of a process that wrote nothing when it ended.
NO_WORD = "nothing: it was killed, or its machine failed"


def now() -> str:
  """The time, as ISO 8601 in UTC with milliseconds."""
  at = datetime.datetime.now(datetime.UTC)
  return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def here() -> dict[str, Any]:
  """Which process of which machine this is."""
  return {"pid": os.getpid(), "host": platform.node()}


def last_word(path: pathlib.Path) -> str | None:
  """Why the last process of events.jsonl ended; None if none is named."""
  said = None
  for line in lines.each_line(path):
    if line.get("event") in ("start", "resume"):
      said = NO_WORD
    elif line.get("event") == "end":
      said = str(line.get("why"))
  return said
