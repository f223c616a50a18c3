"""The sandboxed processes of one thread.

jail.mine().ask("symbolic", answer, reference)
jail.mine().run({"mode": "call", ...}, limits=Limits())
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks.sandbox import probe, workers, zygote
from brorl_jax.tasks.sandbox.process import Failed
from brorl_jax.tasks.sandbox.seccomp_landlock import Limits
from brorl_jax.tasks.sandbox.workers import isolation_error

__all__ = ["Failed", "Jail", "isolation_error", "mine"]

_LIMITS = Limits()


class Jail:
  """A worker for library calls and a zygote for programs.

  Each starts when it is first used. One thread uses a jail; any thread may call
  `stop`.

  Attributes:
    limits: Default limits of programs.
  """

  def __init__(
    self,
    calls: str = workers.LIBRARY_CALLS,
    *,
    allow_inner: bool = False,
    limits: Limits = _LIMITS,
  ):
    """Starts no process.

    Args:
      calls: Module with the table of library calls.
      allow_inner: Whether to run programs under process restrictions alone,
        without namespaces; probe.py lists what these do not prevent.
      limits: Default limits of programs.
    """
    self.limits = limits
    self._worker = workers.Worker(calls)
    self._allow_inner = allow_inner
    self._zygote: zygote.Zygote | None = None
    self._stopped = False

  @property
  def failures(self) -> int:
    """How many processes, of either kind, ended that should not have."""
    return self._worker.failures + (
      self._zygote.failures if self._zygote else 0
    )

  def ask(self, call: str, *args: Any, timeout: float = 3.0) -> Any:
    """The result of a call in library_calls.py; see Worker.ask.

    Raises:
      Failed: There is no answer; the caller's verdict becomes invalid.
    """
    return self._worker.ask(call, *args, timeout=timeout)

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> zygote.Ended:
    """Runs a program; see Zygote.run.

    Raises:
      Failed: This machine has no jail for programs, or the jail failed.
    """
    if self._stopped:
      raise Failed("stopped")
    if self._zygote is None:
      self._zygote = probe.require(allow_inner=self._allow_inner).zygote()
    return self._zygote.run(job, limits=limits, tests=tests, received=received)

  def stop(self) -> None:
    """Ends the work in progress and refuses more; callable from any thread."""
    self._stopped = True
    self._worker.stop()
    if self._zygote is not None:
      self._zygote.stop()

  def close(self) -> None:
    """Ends the processes; the next use starts new ones."""
    self._worker.close()
    if self._zygote is not None:
      self._zygote.close()


_local = threading.local()


def mine() -> Jail:
  """The jail of this thread; its processes end with the thread."""
  if not hasattr(_local, "jail"):
    _local.jail = Jail()
  return _local.jail
