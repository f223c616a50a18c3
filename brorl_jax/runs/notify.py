"""Tells somebody: calls the user's command with an event of the run.

  brorl ... --config.run.notify="./tell.sh ops"

The event is one JSON object on standard input. The command runs in the
background. Whatever it does, the run goes on.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

_LIMIT_S = 30.0
# A flood of other events becomes the newest of them.
_EACH = frozenset({"start", "resume", "end"})


class Notify:
  """Calls a command with one event after the other, at most one at a time."""

  def __init__(
    self,
    command: str,
    *,
    warn: Callable[[str], None] = print,
    limit_s: float = _LIMIT_S,
  ):
    """Starts nothing.

    Args:
      command: Program and arguments as in a shell, but without a shell; "":
        nobody is told.
      warn: Called with one line for each kind of failure; in any thread.
      limit_s: Longest call in seconds, and the longest wait of `close`.
    """
    self._argv = shlex.split(command)
    self._warn, self._limit_s = warn, limit_s
    self._warned: set[str] = set()
    # Guards the fields below; notified when one of them changes.
    self._changed = threading.Condition()
    self._waiting: list[dict[str, Any]] = []
    self._closed = False
    self._process: subprocess.Popen | None = None
    self._thread: threading.Thread | None = None

  def __call__(self, event: Mapping[str, Any]) -> None:
    """Returns at once.

    Of the events that wait, starts and ends are all told. Of the others only
    the newest is; its "folded" counts those that it replaced.

    Args:
      event: With its kind as "event".
    """
    if not self._argv:
      return
    new = dict(event)
    with self._changed:
      if new["event"] not in _EACH:
        old = [x for x in self._waiting if x["event"] not in _EACH]
        if old:
          self._waiting.remove(old[0])
          new["folded"] = old[0].get("folded", 0) + 1
      self._waiting.append(new)
      if self._thread is None:
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
      self._changed.notify_all()

  def close(self) -> None:
    """Waits until the last event is told, at most `limit_s`.

    If a call hangs it is ended after half of that time: the last event says
    why the run ended.
    """
    if self._thread is None:
      return
    end = time.monotonic() + self._limit_s
    with self._changed:
      self._closed = True
      self._changed.notify_all()
      self._changed.wait_for(lambda: not self._waiting, self._limit_s / 2)
      if self._waiting:
        del self._waiting[:-1]
        self._kill()
    self._thread.join(max(end - time.monotonic(), 0.0))
    if self._thread.is_alive():
      with self._changed:
        self._kill()
      self._thread.join(1.0)  # for its warning

  def _work(self) -> None:
    """The thread: tells what waits, until all is told and it is closed."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closed)
        if not self._waiting:
          return
        event = self._waiting.pop(0)
        self._changed.notify_all()
      self._tell(event)

  def _tell(self, event: Mapping[str, Any]) -> None:
    try:
      with self._changed:
        self._process = process = subprocess.Popen(
          self._argv,
          stdin=subprocess.PIPE,
          # It may leave processes that would hold the output of the run open.
          stdout=subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,
          # A signal of the terminal is for the run alone, and `_kill` ends the
          # command with all that it started.
          start_new_session=True,
        )
    except (OSError, ValueError) as e:
      self._fail(f"cannot be started: {e}")
      return
    try:
      process.communicate(json.dumps(event).encode() + b"\n", self._limit_s)
    except subprocess.TimeoutExpired:
      self._kill()
      process.wait()
    if process.returncode == -signal.SIGKILL:
      self._fail("hung and was ended")
    elif process.returncode:
      self._fail(f"ended with status {process.returncode}")

  def _kill(self) -> None:
    """Ends the command in progress."""
    if self._process is not None and self._process.poll() is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, signal.SIGKILL)

  def _fail(self, what: str) -> None:
    if what not in self._warned:
      self._warned.add(what)
      self._warn(f"warning: run.notify: {shlex.join(self._argv)} {what}")
