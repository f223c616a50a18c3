"""The host's side of a worker process and its guard."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.own import worker
from brorl_jax.verdicts.sandbox import process

_LOAD_S = 600.0  # a module may load a model
_BOOT = """
import sys
sys.path[:] = {path!r}
from brorl_jax.verdicts.own import worker
worker.main(int(sys.argv[1]), sys.argv[2:])
"""
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # the trainer owns the devices
  "PYTHONDONTWRITEBYTECODE": "1",  # run the file that the digest is of
  "PYTHONHASHSEED": "0",  # the same response gets the same reward
}


class Failed(Exception):
  """A worker has no answer; the message has the reason."""


class Worker:
  """A worker process with its guard; one thread asks at a time.

  Attributes:
    digests: Hashes that the files of the functions must have; None: any.
  """

  def __init__(self, names: Sequence[str], timeout_s: float):
    self.digests: Mapping[str, str] | None = None
    self._names, self._timeout_s = names, timeout_s
    self._stopped = False
    self._end: weakref.finalize | None = None

  def hello(self) -> dict[str, Any]:
    """Starts the process and returns its first message; raises Failed."""
    self._start()
    hello = self._receive(_LOAD_S, f"{worker.WHAT} = {[*self._names]}")
    if "error" in hello:
      raise Failed(hello["error"])
    for name, digest in (self.digests or {}).items():
      if hello["digests"][name] != digest:
        raise Failed(f"the file of {name} changed during the run")
    return hello

  def ask(
    self, which: int, responses: Sequence[str], example: str, step: int | None
  ) -> Iterator[Verdict]:
    """Yields the verdicts on the responses; raises Failed."""
    if self._end is None or not self._end.alive:
      self.hello()
    name = self._names[which]
    question = worker.message([which, [*responses], example, step])
    try:
      self._link.settimeout(self._timeout_s)
      self._link.sendall(question)
    except OSError:
      raise Failed(f"{name}: the worker process ended") from None
    for _ in responses:
      yield Verdict(*self._receive(self._timeout_s, name))

  def stop(self) -> None:
    """Ends the process for good; callable from any thread."""
    self._stopped = True
    self.close()

  def close(self) -> None:
    """Ends the process and its descendants; the next question starts one."""
    if self._end is not None:
      self._end()

  def _start(self) -> None:
    if self._stopped:
      raise Failed("stopped")
    path = [os.path.abspath(entry) for entry in sys.path]
    self._link, theirs = socket.socketpair()
    with theirs:
      code = ["-u", "-c", _BOOT.format(path=path), str(theirs.fileno())]
      try:
        popen = subprocess.Popen(
          [sys.executable, *code, *self._names],
          stdin=subprocess.PIPE,
          stdout=2,  # prints of a function go to standard error
          pass_fds=[theirs.fileno()],
          env={**os.environ, **_ENVIRONMENT},
          # A new session: only the trainer handles an interrupt.
          start_new_session=True,
        )
      except OSError as error:
        self._link.close()
        raise Failed(f"cannot start {sys.executable}: {error}") from None
    self._end = weakref.finalize(self, _end, os.getpid(), popen, self._link)
    if self._stopped:  # checked after stop() can see the process
      self.close()

  def _receive(self, seconds: float, who: str) -> Any:
    deadline = time.monotonic() + seconds
    data, size = b"", worker.LENGTH.size
    try:
      while len(data) < size:
        self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = self._link.recv(size - len(data))
        if not part:
          raise Failed(f"{who}: the worker process ended")
        data += part
        if size == len(data) == worker.LENGTH.size:
          size += worker.LENGTH.unpack(data)[0]
    except TimeoutError:
      raise Failed(f"{who}: no answer in {seconds:g} s") from None
    except OSError:
      raise Failed(f"{who}: the worker process ended") from None
    return json.loads(data[worker.LENGTH.size :])


def _end(owner: int, popen: subprocess.Popen, link: socket.socket) -> None:
  assert popen.stdin
  if os.getpid() != owner:  # a fork of ours must not end it
    return
  # The guard then kills the worker and ends, which wakes a waiting thread.
  popen.stdin.close()
  process.reap(popen)
  link.close()
