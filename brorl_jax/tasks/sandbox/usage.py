"""What processes use: CPU, and time in which they want one and have none.

    clock = Clock(pid, limits)     # a zygote's, when it is given a job
    clock.wait_s                   # look again after so long
    clock.late()                   # whether the job has to be ended
    clock.tested()                 # a test has ended, the next one begins

So that a verdict does not depend on what else the machine does, a job has
seconds of CPU, not of the wall. It may sleep for as long as it may compute:
counted is the time in which its processes neither run nor wait for a CPU, which
the kernel's scheduler tells. Where it does not, all time counts as sleep.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from brorl_jax.tasks.sandbox.walls import Limits

# The wall's seconds that a job may take, in those of CPU that it may use: no
# job on a machine that gives it a tenth of a CPU is ended before its time.
PATIENCE = 10

_TICK_S = 0.1
_HERTZ = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
  """Seconds of a process, with those of the children that it waited for.

  Attributes:
    cpu_s: On a CPU.
    waited_s: Ready to run and not on a CPU, of its own threads alone.
  """

  cpu_s: float
  waited_s: float


def of_descendants(pid: int) -> dict[int, Usage]:
  """By pid, what the living descendants of a process have used."""
  found: dict[int, Usage] = {}
  todo = _children(pid)
  while todo:
    child = todo.pop()
    # It may have ended by now.
    with contextlib.suppress(OSError, IndexError):
      found[child] = _usage(child)
    todo += _children(child)
  return found


def _children(pid: int) -> list[int]:
  found = []
  with contextlib.suppress(OSError):
    for task in os.listdir(f"/proc/{pid}/task"):
      with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/task/{task}/children") as file:
          found += map(int, file.read().split())
  return found


def _usage(pid: int) -> Usage:
  with open(f"/proc/{pid}/stat") as file:
    fields = file.read().rpartition(")")[2].split()
  waited = 0
  for task in os.listdir(f"/proc/{pid}/task"):
    # It may have ended by now, and the others have not.
    with contextlib.suppress(OSError, IndexError):
      with open(f"/proc/{pid}/task/{task}/schedstat") as file:
        waited += int(file.read().split()[1])
  return Usage(sum(map(int, fields[11:15])) / _HERTZ, waited / 1e9)


class Clock:
  """Whether a job has used up its time; see the module.

  Its processes are looked at ten times a second and not before: most jobs end
  sooner.
  """

  def __init__(self, pid: int, limits: Limits):
    """Begins now.

    Args:
      pid: The zygote's, whose descendants are the job.
      limits: Of them `test_s` and `total_s`.
    """
    self._pid, self._limits = pid, limits
    self.wait_s = min(_TICK_S, limits.test_s / 4)
    self._begin = self._test = self._looked = time.monotonic()
    self._seen: dict[int, Usage] = {}
    self._before = 0.0  # CPU-seconds when the test began; < 0: not known yet
    self._slept = self._slept_before = self._cpu_s = 0.0

  def tested(self) -> None:
    """A test has ended."""
    self._test, self._before, self._slept_before = (
      time.monotonic(),
      -1.0,
      self._slept,
    )

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
    """The CPU-seconds so far; counts the sleep since it last looked."""
    seen, before = of_descendants(self._pid), self._seen
    if seen.keys() == before.keys():
      # What a thread waited is forgotten when it ends.
      busy = sum(
        max(0.0, after - then)
        for pid in seen
        for after, then in zip(seen[pid], before[pid], strict=True)
      )
      self._slept += max(0.0, now - self._looked - busy)
    self._seen, self._looked = seen, now
    # One that ended and was not waited for yet may be missing: never less.
    self._cpu_s = max(self._cpu_s, sum(one.cpu_s for one in seen.values()))
    return self._cpu_s
