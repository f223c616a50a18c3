"""heartbeat.json: what a run does now, for whoever watches it from outside.

The main thread writes it where one stage ends and the next begins, so that its
time stands still if the run hangs.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable

from brorl_jax.runs import events

NAME = "heartbeat.json"
# Within a stage of many parts; a small policy would write it 1,000 times a
# second.
_LEAST_S = 1.0


class Heartbeat:
  """The file of one run."""

  def __init__(self, workdir: pathlib.Path, warn: Callable[[str], None]):
    """Writes nothing.

    Args:
      workdir: Folder of the run.
      warn: Called with one line, once, if the file cannot be written.
    """
    self._path, self._warn = workdir / NAME, warn
    self._last: tuple[int, str] | None = None
    self._when, self._failed = 0.0, False

  def __call__(self, step: int, doing: str) -> None:
    """Replaces the file; never raises OSError.

    It is not forced to the disk: after a power loss nobody needs it, and a slow
    disk must not delay a step.

    Args:
      step: The step in progress.
      doing: What begins now, or goes on.
    """
    when = time.monotonic()
    if self._last == (step, doing) and when - self._when < _LEAST_S:
      return
    self._last, self._when = (step, doing), when
    beat = {"time": events.now(), "step": step, "doing": doing}
    part = self._path.with_name(f"{NAME}.part")
    try:
      part.write_text(json.dumps(beat | events.here()) + "\n")
      os.replace(part, self._path)
    except OSError as e:
      if not self._failed:
        self._failed = True
        self._warn(f"{self._path} cannot be written: {e.strerror or e}")
