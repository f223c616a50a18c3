"""What one thread needs to judge untrusted text: its own jailed processes.

jail.mine().ask("symbolic", answer, gold)  # a library, on a text
jail.mine().run(job, limits=Limits())      # a program
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks.sandbox import levels, workers, zygote
from brorl_jax.tasks.sandbox.walls import Limits
from brorl_jax.tasks.sandbox.workers import Failed, walls
from brorl_jax.tasks.sandbox.zygote import Zygote

__all__ = ["Failed", "Jail", "mine", "walls"]


class Jail:
  """A worker and a warm interpreter of its own, started when first needed.

  One thread uses it; `stop` is for the others.
  """

  def __init__(self, judges: str = workers.JUDGES):
    """Starts nothing yet.

    Args:
      judges: Module with the table of judges that can be asked.
    """
    self._worker = workers.Worker(judges)
    self._zygote: Zygote | None = None

  @property
  def failures(self) -> int:
    """Processes that were late or died so far, and were replaced."""
    return self._worker.failures

  def ask(self, judge: str, *args: Any, timeout: float = 3.0) -> Any:
    """What a judge of judges.py says; see Worker.ask.

    Raises:
      Failed: If the judge has no answer: the caller's verdict is invalid.
    """
    return self._worker.ask(judge, *args, timeout=timeout)

  def run(
    self, job: Mapping[str, Any], *, limits: Limits, **more: Any
  ) -> zygote.Ended:
    """How a program ended; see Zygote.run.

    Raises:
      zygote.Failed: If there is no jail for programs here, or it failed.
    """
    if self._zygote is None:
      self._zygote = levels.require().zygote()
    return self._zygote.run(job, limits=limits, **more)

  def stop(self) -> None:
    """Ends what it is asked now and refuses the rest, from any thread.

    A program that runs has its own time and ends by itself.
    """
    self._worker.stop()

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
