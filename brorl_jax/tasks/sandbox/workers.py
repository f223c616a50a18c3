"""Processes that judge a model's text, and end when they take too long.

    worker = Worker()
    worker.ask("symbolic", r"\\frac{1}{2}", "0.5", timeout=3.0)   # True
    worker.close()

A worker has a zygote with the libraries, see asking.py, cloned from the one
that this process starts when the first worker is wanted, and a process of it
that answers. One that was late, died, or said what it should not is never asked
again: the next question has a new one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import sys
import threading
import weakref
from typing import Any

from brorl_jax.tasks.sandbox import asking, process, usage
from brorl_jax.tasks.sandbox.process import Died, Failed
from brorl_jax.tasks.sandbox.walls import Limits

JUDGES = "brorl_jax.tasks.sandbox.judges"

_QUESTIONS = 5_000  # of one process: libraries' caches grow

_LOAD_S = 120.0  # it imports for 3 s, on a crowded machine for 20
_KEPT = ("HOME", "LD_LIBRARY_PATH", "NLTK_DATA", "PATH")
# Threads would not survive a fork.
_ENVIRONMENT = {
  "MPLBACKEND": "agg",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
}
_BOOT = """
import sys
sys.path[:] = {path!r}
from brorl_jax.tasks.sandbox import asking
asking.main(int(sys.argv[2]), judges=sys.argv[1])
"""


class Worker:
  """One process that answers one question at a time; see the module.

  One thread asks; `stop` is for the others.
  """

  def __init__(self, judges: str = JUDGES):
    """Starts nothing yet.

    Args:
      judges: Module with the table of judges; see asking.main.
    """
    self.failures = 0  # questions without an answer; each cost a process
    self._judges = judges
    self._process: process.Process | None = None
    self._link: socket.socket | None = None
    self._asked = 0
    self._stopped = False

  def ask(self, judge: str, *args: Any, timeout: float) -> Any:
    """What a judge says: any value that JSON can hold, to be checked.

    Args:
      judge: A name in the table.
      *args: Values that JSON can hold, at most 4 MiB of it.
      timeout: Seconds of CPU, or of sleep, > 0; see usage.py.

    Raises:
      Failed: In one line, if there is no answer.
    """
    if not timeout > 0:
      raise ValueError(f"timeout is {timeout}; use seconds > 0")
    request = json.dumps([judge, args]).encode()
    try:
      if len(request) > asking.MAX_REQUEST:
        raise Failed(
          f"a question of {len(request)} bytes, at most {asking.MAX_REQUEST}"
        )
      zygote = self._running()
      value = self._exchange(zygote, request, timeout)
    except Failed as error:
      self.failures += 1
      self.close()
      raise Failed(f"{judge}: {error}") from None
    except BaseException:  # an interrupt: the answer may still be on its way
      self.close()
      raise
    self._asked += 1
    if judge in zygote.hello["fresh"] or self._asked >= _QUESTIONS:
      self.close()
    return value

  def stop(self) -> None:
    """Ends a question in progress and refuses others, from any thread."""
    self._stopped = True
    zygote = self._process
    if zygote is not None:
      zygote.stop()

  def close(self) -> None:
    """Ends the process. A later question starts another."""
    zygote, self._process = self._process, None
    if zygote is not None:
      zygote.close()
    if self._link is not None:
      self._link.close()
      self._link = None

  def _running(self) -> process.Process:
    if self._link is not None and select.select([self._link], [], [], 0)[0]:
      self.close()  # nothing was asked: it was killed from outside
    # After a fork of ours the process is still the parent's, who asks it too.
    if self._process is None or self._process.owner != os.getpid():
      zygote = self._clone()
      self._link, theirs = socket.socketpair()
      with contextlib.suppress(Died):  # the link says so
        zygote.begin([b'{"mode": "ask"}'], theirs.detach())
      weakref.finalize(zygote, self._link.close)
      self._process, self._asked = zygote, 0
    if self._stopped:  # looked at after the process is there for stop() to see
      raise Failed("stopped")
    return self._process

  def _clone(self) -> process.Process:
    try:
      return libraries(self._judges).clone()
    except Failed:
      # It was killed a moment ago, and no text of a model's was involved.
      return libraries(self._judges).clone()

  def _exchange(
    self, zygote: process.Process, request: bytes, timeout: float
  ) -> Any:
    link, data = self._link, b""
    assert link is not None
    clock = usage.Clock(zygote.pid, Limits(test_s=timeout, total_s=math.inf))
    clock.tested()  # what it used before does not count
    try:
      link.settimeout(usage.PATIENCE * timeout)
      link.sendall(asking.LENGTH.pack(len(request)) + request)
      link.settimeout(clock.wait_s)
      while True:
        with contextlib.suppress(TimeoutError):
          part = link.recv(asking.MAX_REPLY + 1)
          if not part:
            raise Failed("the worker died")
          data += part
        if _whole(data):
          return _decoded(data[asking.LENGTH.size :])
        if clock.late():
          raise Failed(f"late, no answer in {timeout:g} s")
    except TimeoutError:
      raise Failed(f"late, not even read in {timeout:g} s") from None
    except OSError:
      raise Failed("the worker died") from None


def walls(judges: str = JUDGES) -> str:
  """Why workers have no walls on this machine, "" if they have: for the record.

  Raises:
    Failed: If there can be no workers at all.
  """
  return libraries(judges).hello["walls"]


_loaded: dict[str, process.Process] = {}
_loading = threading.Lock()


def libraries(judges: str) -> process.Process:
  """The zygote of this process for a table of judges, started if need be.

  Args:
    judges: Module with the table; see asking.main.

  Raises:
    Failed: If it does not start.
  """
  with _loading:
    found = _loaded.get(judges)
    # In a fork of ours it is not alive: it is no child of the fork.
    if found is None or not found.alive():
      path = [os.path.abspath(entry) for entry in sys.path]
      kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
      found = process.start(
        [sys.executable, "-s", "-c", _BOOT.format(path=path), judges],
        env={**kept, **process.ENVIRONMENT, **_ENVIRONMENT},
        patience_s=_LOAD_S,
      )
      if "error" in found.hello:
        found.close()
        raise Failed(f"the judges do not load: {found.hello['error']}")
      _loaded[judges] = found
    return found


def _whole(data: bytes) -> bool:
  """Whether all of a reply is there."""
  if len(data) < asking.LENGTH.size:
    return False
  (size,) = asking.LENGTH.unpack_from(data)
  if size > asking.MAX_REPLY or len(data) > asking.LENGTH.size + size:
    raise Failed(f"a malformed reply, of {max(size, len(data))} bytes")
  return len(data) == asking.LENGTH.size + size


def _decoded(data: bytes) -> Any:
  # What executed a model's text may say anything.
  try:
    reply = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise Failed(f"a malformed reply ({type(error).__name__})") from None
  match reply:
    case {"value": value}:
      return value
    case {"error": str(text)}:
      raise Failed(" ".join(text.split())[:400])
  raise Failed("a malformed reply")
