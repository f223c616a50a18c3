"""What one thread needs to judge untrusted text: its own jailed processes.

jail.mine().ask("symbolic", answer, gold)
jail.mine().run({"mode": "call", ...}, limits=Limits())
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks.sandbox import levels, workers, zygote
from brorl_jax.tasks.sandbox.process import Failed
from brorl_jax.tasks.sandbox.walls import Limits
from brorl_jax.tasks.sandbox.workers import walls

__all__ = ["Failed", "Jail", "mine", "walls"]


class Jail:
  """A worker for the libraries' judges, a zygote for programs.

  Each starts when it is first used. One thread uses a jail; `stop` is for the
  others.
  """

  def __init__(
    self, judges: str = workers.JUDGES, *, allow_inner: bool = False
  ):
    """Starts nothing yet.

    Args:
      judges: Module with the table of judges that can be asked.
      allow_inner: Whether to run programs where the inner walls are all that
        stands around them; see levels.py for what these do not promise.
    """
    self._worker = workers.Worker(judges)
    self._allow_inner = allow_inner
    self._zygote: zygote.Zygote | None = None
    self._stopped = False

  @property
  def failures(self) -> int:
    """Questions so far that cost a worker its life."""
    return self._worker.failures

  def ask(self, judge: str, *args: Any, timeout: float = 3.0) -> Any:
    """What a judge of judges.py says; see Worker.ask.

    Raises:
      Failed: If the judge has no answer: the caller's verdict is invalid.
    """
    return self._worker.ask(judge, *args, timeout=timeout)

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> zygote.Ended:
    """How a program ended; see Zygote.run.

    Raises:
      Failed: If this machine has no jail for programs, or it fails.
    """
    if self._stopped:
      raise Failed("stopped")
    if self._zygote is None:
      self._zygote = levels.require(allow_inner=self._allow_inner).zygote()
    return self._zygote.run(job, limits=limits, tests=tests, received=received)

  def stop(self) -> None:
    """Ends what is in progress and refuses what follows, from any thread."""
    self._stopped = True
    self._worker.stop()
    if self._zygote is not None:
      self._zygote.stop()

  def close(self) -> None:
    """Ends its processes; they start again if they are wanted."""
    self._worker.close()
    if self._zygote is not None:
      self._zygote.close()


_local = threading.local()


def mine() -> Jail:
  """This thread's; its processes end with the thread, or the program."""
  if not hasattr(_local, "jail"):
    _local.jail = Jail()
  return _local.jail
