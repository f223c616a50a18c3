"""Time limits that do not depend on the load of the machine.

    clock = JobClock(pid, limits)     # when a zygote receives a job
    clock.wait_s                   # seconds until the next look
    clock.late()                   # whether the job has to be ended
    clock.tested()                 # a test has ended, the next one begins

A job has seconds of CPU time, not of wall time. It may sleep for equally long.
Sleep is the time in which its processes neither run nor wait for a CPU,
according to the kernel's scheduler. Without such data all time that is not CPU
time counts as sleep.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from brorl_jax.verdicts.sandbox.protocol import Limits

# Wall seconds per CPU second that a job may take: a job that gets a tenth of a
# CPU can still use all its CPU seconds.
PATIENCE = 10
# Longest time limit, in CPU seconds per test, that an example may set.
MAX_TEST_S = 60.0

_TICK_S = 0.1
_HERTZ = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
  """Seconds of a process and of the children that it waited for."""

  cpu_s: float
  # Time ready to run but without a CPU, of its own threads alone.
  waited_s: float


def descendants(pid: int) -> dict[int, Usage]:
  """Usage of the living descendants of a process, by pid."""
  by_pid: dict[int, Usage] = {}
  todo = _children(pid)
  while todo:
    child = todo.pop()
    # It may have ended by now.
    with contextlib.suppress(OSError, IndexError):
      by_pid[child] = _usage(child)
    todo += _children(child)
  return by_pid


def _children(pid: int) -> list[int]:
  children = []
  with contextlib.suppress(OSError):
    for task in os.listdir(f"/proc/{pid}/task"):
      with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/task/{task}/children") as file:
          children += map(int, file.read().split())
  return children


def _usage(pid: int) -> Usage:
  with open(f"/proc/{pid}/stat") as file:
    fields = file.read().rpartition(")")[2].split()
  waited = 0
  for task in os.listdir(f"/proc/{pid}/task"):
    # This thread may have ended while the others have not.
    with contextlib.suppress(OSError, IndexError):
      with open(f"/proc/{pid}/task/{task}/schedstat") as file:
        waited += int(file.read().split()[1])
  return Usage(sum(map(int, fields[11:15])) / _HERTZ, waited / 1e9)


class JobClock:
  """Whether a job has used up its time.

  It looks at the processes ten times a second. Most jobs end before the first
  look.
  """

  def __init__(self, pid: int, limits: Limits):
    """Starts the clock.

    Args:
      pid: Process id of the zygote; its descendants are the job.
      limits: Only `test_s` and `total_s` are used.
    """
    self._pid, self._limits, self.seconds = pid, limits, limits.test_s
    self.wait_s = min(_TICK_S, limits.test_s / 4)
    self._begin = self._test = self._looked = time.monotonic()
    self._seen: dict[int, Usage] = {}
    self._before = 0.0  # CPU seconds at the start of the test; < 0: unknown
    self._slept = self._slept_before = self._cpu_s = 0.0

  def tested(self) -> None:
    """A test has ended."""
    self._test, self._before = time.monotonic(), -1.0
    self._slept_before = self._slept

  def late(self) -> bool:
    """Whether its time is up."""
    now = time.monotonic()
    if now - self._looked < self.wait_s:
      return False
    cpu_s = self._look(now)
    if self._before < 0:
      self._before = cpu_s
    test_s, total_s = self._limits.test_s, self._limits.total_s
    return (
      max(cpu_s - self._before, self._slept - self._slept_before) > test_s
      or max(cpu_s, self._slept) > total_s
      or now - self._test > PATIENCE * test_s
      or now - self._begin > PATIENCE * total_s
    )

  def _look(self, now: float) -> float:
    """The CPU seconds so far; adds the sleep since the last look."""
    seen, before = descendants(self._pid), self._seen
    if seen.keys() == before.keys():
      # The kernel drops a thread's waiting time when it ends.
      busy = sum(
        max(0.0, after - then)
        for pid in seen
        for after, then in zip(seen[pid], before[pid], strict=True)
      )
      self._slept += max(0.0, now - self._looked - busy)
    self._seen, self._looked = seen, now
    # A process that ended and was not reaped may be missing: never go down.
    self._cpu_s = max(self._cpu_s, sum(used.cpu_s for used in seen.values()))
    return self._cpu_s


class Deadline:
  """A clock of wall time, for work that may wait for a network."""

  def __init__(self, seconds: float):
    self.seconds, self._end = seconds, time.monotonic() + seconds

  @property
  def wait_s(self) -> float:
    return max(self._end - time.monotonic(), 1e-3)

  def late(self) -> bool:
    return time.monotonic() >= self._end
