"""What one thread needs to judge untrusted text: its own jailed processes.

jail.mine().ask("symbolic", answer, gold)
"""

from __future__ import annotations

import threading
from typing import Any

from brorl_jax.tasks.sandbox import workers
from brorl_jax.tasks.sandbox.workers import Failed, walls

__all__ = ["Failed", "Jail", "mine", "walls"]


class Jail:
  """A worker process of its own, started when it is first asked.

  One thread uses it; `stop` is for the others.
  """

  def __init__(self, judges: str = workers.JUDGES):
    """Starts nothing yet.

    Args:
      judges: Module with the table of judges that can be asked.
    """
    self._worker = workers.Worker(judges)

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

  def stop(self) -> None:
    """Ends what it is asked now and refuses the rest, from any thread."""
    self._worker.stop()

  def close(self) -> None:
    """Ends its processes; they start again if they are wanted."""
    self._worker.close()


_local = threading.local()


def mine() -> Jail:
  """This thread's; its processes end with the thread, or the program."""
  if not hasattr(_local, "jail"):
    _local.jail = Jail()
  return _local.jail
