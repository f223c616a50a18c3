"""Ends a run whose storage does not answer, such as a dead network mount.

A system call into it does not return, so nothing is raised in the thread that
made it, and that thread cannot be ended. Whoever writes therefore says that it
is `waiting`, and while `limit` is active another thread ends the process when
that takes too long.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator

from brorl_jax import errors, processes

_TICK_S = 1.0
# The output may lie on the same mount: until the process ends without a word.
_SAY_S = 20.0


@dataclasses.dataclass(eq=False)
class _Wait:
  """Something that a thread waits for."""

  what: str
  since: float  # time.monotonic()


_waits: set[_Wait] = set()


@contextlib.contextmanager
def waiting(what: object) -> Iterator[None]:
  """Says that this thread waits for storage, and for what."""
  _waits.add(wait := _Wait(str(what), time.monotonic()))
  try:
    yield
  finally:
    _waits.discard(wait)


@contextlib.contextmanager
def limit(seconds: float, good: Callable[[], int | None]) -> Iterator[None]:
  """Ends this process, and the others of its run, when a wait takes longer.

  The status is `errors.STORAGE`.

  Args:
    seconds: Of one wait.
    good: Returns the newest step on disk, for the message.
  """
  over = threading.Event()
  tick = min(_TICK_S, seconds / 4)

  def watch() -> None:
    last = time.monotonic()
    while not over.wait(tick):
      now, waits = time.monotonic(), [*_waits]
      if now - last > 5 * tick:  # this process itself was stopped
        for wait in waits:
          wait.since += now - last
      last = now
      for wait in waits:
        if now - wait.since > seconds:
          return _end(wait.what, seconds, good())

  guard = threading.Thread(target=watch, daemon=True)
  guard.start()
  try:
    yield
  finally:
    over.set()
    guard.join()


def _end(what: str, seconds: float, good: int | None) -> None:
  mute = threading.Timer(_SAY_S, os._exit, [errors.STORAGE])
  mute.daemon = True
  mute.start()
  left = "none" if good is None else good
  line = (
    f"{what}: no end after {seconds:g} s (run.save_timeout_s); the last good "
    f"step is {left}; mend the storage, or raise the limit if it is only slow, "
    "and run the same command again"
  )
  os.write(2, f"error: {line}\n".encode())
  processes.fail(line, errors.STORAGE)
