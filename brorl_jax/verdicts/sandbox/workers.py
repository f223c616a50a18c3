"""Worker processes that run verifier libraries on a model's text.

    worker = Worker()
    worker.ask("symbolic", r"\\frac{1}{2}", "0.5", timeout=3.0)   # True
    worker.close()

The first worker starts a zygote that imports the libraries (library_zygote.py).
Each worker clones that zygote, and the clone forks the process that answers. A
process that was late, died or sent a malformed reply is never used again: the
next question starts a new one.
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

from brorl_jax.verdicts.sandbox import process, protocol, usage
from brorl_jax.verdicts.sandbox.process import Died, Failed
from brorl_jax.verdicts.sandbox.protocol import Limits

LIBRARY_CALLS = "brorl_jax.verdicts.sandbox.library_calls"

_QUESTIONS = 5_000  # per process, because the caches of libraries grow

_LOAD_S = 120.0  # imports take 3 s, 20 s on a busy machine
_KEPT = ("HOME", "LD_LIBRARY_PATH", "NLTK_DATA", "PATH")
# No threads: a fork does not copy them.
_ENVIRONMENT = {
  "MPLBACKEND": "agg",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
}
_BOOT = """
import sys
sys.path[:] = {path!r}
from brorl_jax.verdicts.sandbox import library_zygote
library_zygote.main(int(sys.argv[2]), calls=sys.argv[1])
"""


class Worker:
  """A process that answers one question at a time.

  One thread asks; any thread may call `stop`.
  """

  def __init__(self, calls: str = LIBRARY_CALLS):
    """Starts no process.

    Args:
      calls: Module with the table of library calls; see library_zygote.main.
    """
    self.failures = 0  # questions without an answer; each ended a process
    self._calls = calls
    self._process: process.Process | None = None
    self._link: socket.socket | None = None
    self._asked = 0
    self._stopped = False

  def ask(self, call: str, *args: Any, timeout: float) -> Any:
    """The result of a library call, any JSON value. The caller checks it.

    Args:
      call: A name in the table.
      *args: JSON values, at most 4 MiB together.
      timeout: Seconds of CPU time, or of sleep, > 0; see usage.py.

    Raises:
      Failed: There is no answer; the message is one line.
    """
    if not timeout > 0:
      raise ValueError(f"timeout is {timeout}; use seconds > 0")
    request = json.dumps([call, args]).encode()
    try:
      if len(request) > protocol.MAX_REQUEST:
        raise Failed(
          f"a question of {len(request)} bytes; the limit is"
          f" {protocol.MAX_REQUEST}"
        )
      zygote = self._running()
      value = self._exchange(zygote, request, timeout)
    except Failed as error:
      self.failures += 1
      self.close()
      raise Failed(f"{call}: {error}") from None
    except BaseException:  # an interrupt: the answer may still come
      self.close()
      raise
    self._asked += 1
    if call in zygote.hello["fresh"] or self._asked >= _QUESTIONS:
      self.close()
    return value

  def stop(self) -> None:
    """Ends the question in progress and refuses further ones; any thread."""
    self._stopped = True
    zygote = self._process
    if zygote is not None:
      zygote.stop()

  def close(self) -> None:
    """Ends the process. A later question starts a new one."""
    zygote, self._process = self._process, None
    if zygote is not None:
      zygote.close()
    if self._link is not None:
      self._link.close()
      self._link = None

  def _running(self) -> process.Process:
    if self._link is not None and select.select([self._link], [], [], 0)[0]:
      self.close()  # readable without a question: the process was killed
    # After a fork of ours, the process belongs to the parent.
    if self._process is None or self._process.owner != os.getpid():
      zygote = self._clone()
      self._link, theirs = socket.socketpair()
      with contextlib.suppress(Died):  # then the link is closed
        zygote.begin([b'{"mode": "ask"}'], theirs.detach())
      weakref.finalize(zygote, self._link.close)
      self._process, self._asked = zygote, 0
    if self._stopped:  # checked after stop() can see the process
      raise Failed("stopped")
    return self._process

  def _clone(self) -> process.Process:
    try:
      return libraries(self._calls).clone()
    except Failed:
      # The zygote was killed a moment ago, before it read any model text.
      return libraries(self._calls).clone()

  def _exchange(
    self, zygote: process.Process, request: bytes, timeout: float
  ) -> Any:
    link, data = self._link, b""
    assert link is not None
    clock = usage.Clock(zygote.pid, Limits(test_s=timeout, total_s=math.inf))
    clock.tested()  # earlier questions do not count
    try:
      link.settimeout(usage.PATIENCE * timeout)
      link.sendall(protocol.LENGTH.pack(len(request)) + request)
      link.settimeout(clock.wait_s)
      while True:
        with contextlib.suppress(TimeoutError):
          part = link.recv(protocol.MAX_REPLY + 1)
          if not part:
            raise Failed("the worker process died")
          data += part
        if _whole(data):
          return _decoded(data[protocol.LENGTH.size :])
        if clock.late():
          raise Failed(f"late: no answer in {timeout:g} s")
    except TimeoutError:
      raise Failed(f"late: question not read in {timeout:g} s") from None
    except OSError:
      raise Failed("the worker process died") from None


def isolation_error(calls: str = LIBRARY_CALLS) -> str:
  """Why this machine cannot isolate workers, "" if it can.

  Raises:
    Failed: Workers cannot start.
  """
  return libraries(calls).hello["isolation_error"]


_loaded: dict[str, process.Process] = {}
_loading = threading.Lock()


def libraries(calls: str) -> process.Process:
  """This process's zygote for a table of library calls; starts it if needed.

  Args:
    calls: Module with the table; see library_zygote.main.

  Raises:
    Failed: The zygote did not start.
  """
  with _loading:
    zygote = _loaded.get(calls)
    # In a fork of ours it is not a child of the fork, and so not alive.
    if zygote is None or not zygote.alive():
      path = [os.path.abspath(entry) for entry in sys.path]
      kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
      zygote = process.start(
        [sys.executable, "-s", "-c", _BOOT.format(path=path), calls],
        env={**kept, **process.ENVIRONMENT, **_ENVIRONMENT},
        patience_s=_LOAD_S,
      )
      if "error" in zygote.hello:
        zygote.close()
        error = zygote.hello["error"]
        raise Failed(f"the verifier libraries do not load: {error}")
      _loaded[calls] = zygote
    return zygote


def _whole(data: bytes) -> bool:
  """Whether the reply is complete."""
  if len(data) < protocol.LENGTH.size:
    return False
  (size,) = protocol.LENGTH.unpack_from(data)
  if size > protocol.MAX_REPLY or len(data) > protocol.LENGTH.size + size:
    raise Failed(f"a malformed reply of {max(size, len(data))} bytes")
  return len(data) == protocol.LENGTH.size + size


def _decoded(data: bytes) -> Any:
  # A process that executed model text may send anything.
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
