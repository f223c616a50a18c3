"""What processes use, on some that compute, sleep, fork and wait for a CPU."""

import os
import subprocess
import sys
import time

import pytest

from brorl_jax.verdicts.sandbox import usage
from brorl_jax.verdicts.sandbox.protocol import Limits

SPIN = "while True: pass"
# A child and a grandchild that spin.
FORK = "import os\nos.fork()\n" + SPIN


@pytest.fixture
def start():
  """Starts a program as the grandchild of ours, whose parent's pid it gives."""
  parents = []

  def begin(code):
    parent = subprocess.Popen(
      [
        sys.executable,
        "-c",
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "sys.stdin.read()\n"
        "import os, signal\n"
        "os.killpg(0, signal.SIGKILL)",
        code,
      ],
      stdin=subprocess.PIPE,
      start_new_session=True,
    )
    parents.append(parent)
    wait_for(lambda: usage.descendants(parent.pid))
    return parent.pid

  yield begin
  for parent in parents:
    parent.communicate(b"")


def wait_for(happens, seconds=60.0):
  end = time.monotonic() + seconds
  while not happens():
    assert time.monotonic() < end
    time.sleep(0.01)


def cpu_s(pid):
  return sum(one.cpu_s for one in usage.descendants(pid).values())


# Clocks, by hand: the time of the wall, and what the processes have used.


@pytest.fixture
def clock(monkeypatch):
  """clock(limits) -> late(wall, {pid: (cpu_s, waited_s)}), and the clock."""
  now, found = [0.0], [{}]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(usage, "descendants", lambda pid: found[0])

  def make(**limits):
    clock = usage.JobClock(0, Limits(**limits))

    def late(wall, used):
      now[0] = wall
      found[0] = {pid: usage.Usage(*both) for pid, both in used.items()}
      return clock.late()

    return late, clock

  return make


@pytest.mark.parametrize("limits", [(0.4, 600.0), (600.0, 0.4)])
def test_what_computes_or_sleeps_too_long_is_late(clock, limits):
  test_s, total_s = limits
  late, _ = clock(test_s=test_s, total_s=total_s)
  assert not late(0.4, {1: (0.39, 0.0)}) and late(0.6, {1: (0.41, 0.0)})
  late, _ = clock(test_s=test_s, total_s=total_s)
  late(1.0, {1: (0.0, 0.0)})
  assert not late(1.39, {1: (0.0, 0.0)}) and late(1.6, {1: (0.0, 0.0)})


def test_waiting_for_a_cpu_is_not_sleep(clock):
  """A process that ran for a tenth of the time and waited else."""
  late, it = clock(test_s=1.0, total_s=2.0)
  assert not late(1.0, {1: (0.1, 0.9)})  # another set of processes than before
  assert not late(5.0, {1: (0.5, 4.5)})
  assert not late(9.0, {1: (0.9, 8.1)})
  assert late(10.1, {1: (0.91, 9.19)})  # ten times the limit: no more patience
  it.tested()
  assert not late(12.0, {1: (1.1, 10.9)})
  it.tested()
  assert not late(13.0, {1: (1.2, 10.9)})  # .9 s of sleep
  assert late(13.2, {1: (1.2, 10.9)})  # 1.1 s


def test_the_next_test_begins_with_nothing_used(clock):
  late, it = clock(test_s=0.5, total_s=600.0)
  it.tested()
  assert not late(1.0, {1: (9.0, 0.0)})  # it begins to count here
  assert not late(1.4, {1: (9.4, 0.0)})
  assert late(1.6, {1: (9.6, 0.0)})
  it.tested()
  assert not late(2.0, {1: (9.6, 0.0)})  # .4 s of sleep
  it.tested()
  assert not late(2.4, {1: (9.6, 0.0)})  # before it, sleep is another test's
  assert late(2.6, {1: (9.6, 0.0)})


def test_cpu_never_grows_less(clock):
  """A look that missed a process does not begin a test at nothing."""
  late, it = clock(test_s=5.0, total_s=60.0)
  assert not late(1.0, {1: (1.0, 0.0)}) and not late(4.0, {1: (4.0, 0.0)})
  it.tested()
  assert not late(4.2, {})
  assert not late(6.0, {1: (6.0, 0.0)})  # two seconds of five


def test_waits_of_threads_and_processes_that_ended_are_no_sleep(clock):
  late, _ = clock(test_s=2.5, total_s=60.0)
  assert not late(0.1, {1: (0.0, 5.0)}) and not late(2.1, {1: (2.0, 0.0)})
  late, _ = clock(test_s=1.0, total_s=2.0)
  for wall in (3.5, 5.0, 6.5):  # how long others waited cannot be known
    assert not late(wall, {wall: (0.0, 0.0)})


def test_all_tests_together_end_when_patience_does(clock):
  late, it = clock(test_s=1.0, total_s=2.0)
  for wall in (6.0, 12.0, 18.0):
    it.tested()
    assert not late(wall, {1: (0.0, wall)})
  assert late(20.1, {1: (0.0, 20.1)})


def test_what_the_kernel_does_not_list_is_sleep(clock):
  late, _ = clock(test_s=1.0, total_s=2.0)
  assert not late(0.9, {}) and late(1.1, {})


def test_a_deadline_is_of_the_wall(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  deadline = usage.Deadline(2.0)
  assert (deadline.seconds, deadline.wait_s) == (2.0, 2.0)
  now[0] = 1.5
  assert deadline.wait_s == 0.5 and not deadline.late()
  now[0] = 2.0
  assert deadline.wait_s > 0 and deadline.late()


# What real processes use.


def test_nobody_has_no_descendants():
  assert usage.descendants(2**30) == {}


def test_descendants_of_descendants_count(start):
  pid = start(FORK)
  wait_for(lambda: len(usage.descendants(pid)) == 2)
  wait_for(lambda: cpu_s(pid) > 0.4)


def test_children_that_were_waited_for_count(start):
  code = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "  while time.process_time() < 0.4: pass\n"
    "  os._exit(0)\n"
    "os.wait()\n"
    "time.sleep(600)"
  )
  pid = start(code)
  wait_for(lambda: len(usage.descendants(pid)) == 2)
  wait_for(lambda: len(usage.descendants(pid)) == 1)
  # Counted in ticks of 10 ms, cut off for user and system.
  assert cpu_s(pid) >= 0.38


@pytest.mark.ci
def test_the_wait_for_a_cpu_is_told(start):
  """Two that spin on one CPU wait half of the time."""
  pid = start(FORK)
  wait_for(lambda: len(usage.descendants(pid)) == 2)
  cpu = min(os.sched_getaffinity(0))
  for child in usage.descendants(pid):
    os.sched_setaffinity(child, {cpu})
  before = usage.descendants(pid)
  time.sleep(1.0)
  after = usage.descendants(pid)
  for child in before:
    assert after[child].waited_s - before[child].waited_s > 0.3
