"""What processes use, on some that compute, sleep, fork and wait for a CPU."""

import os
import subprocess
import sys
import time

import pytest
import tiers

from brorl_jax.verdicts.sandbox import usage
from brorl_jax.verdicts.sandbox.protocol import Limits

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(600)"
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
    wait_for(lambda: usage.of_descendants(parent.pid))
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
  return sum(one.cpu_s for one in usage.of_descendants(pid).values())


def wait_until_late(clock):
  wait_for(clock.late)


def test_nobody_has_no_descendants():
  assert usage.of_descendants(2**30) == {}


def test_what_spins_uses_cpu_and_what_sleeps_does_not(start):
  spins, sleeps = start(SPIN), start(SLEEP)
  wait_for(lambda: cpu_s(spins) > 0.5)
  assert cpu_s(sleeps) < 0.3


def test_descendants_of_descendants_count(start):
  pid = start(FORK)
  wait_for(lambda: len(usage.of_descendants(pid)) == 2)
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
  wait_for(lambda: len(usage.of_descendants(pid)) == 2)
  wait_for(lambda: len(usage.of_descendants(pid)) == 1)
  # Counted in ticks of 10 ms, cut off for user and system.
  assert cpu_s(pid) >= 0.38


@pytest.mark.ci
def test_the_wait_for_a_cpu_is_told(start):
  """Two that spin on one CPU wait half of the time."""
  pid = start(FORK)
  wait_for(lambda: len(usage.of_descendants(pid)) == 2)
  cpu = min(os.sched_getaffinity(0))
  for child in usage.of_descendants(pid):
    os.sched_setaffinity(child, {cpu})
  before = usage.of_descendants(pid)
  time.sleep(1.0)
  after = usage.of_descendants(pid)
  for child in before:
    assert after[child].waited_s - before[child].waited_s > 0.3


@pytest.mark.parametrize(
  "limits",
  tiers.some(
    [Limits(test_s=0.4, total_s=600.0), Limits(test_s=600.0, total_s=0.4)], 1
  ),
)
@pytest.mark.parametrize("code", [SPIN, SLEEP])
def test_a_clock_ends_what_computes_or_sleeps_too_long(start, code, limits):
  pid = start(code)
  used, begin = cpu_s(pid), time.monotonic()
  clock = usage.Clock(pid, limits)
  wait_until_late(clock)
  if code == SPIN:
    assert cpu_s(pid) > 0.4
  else:
    assert time.monotonic() - begin >= 0.4
    assert cpu_s(pid) - used < 0.4


@pytest.mark.ci
def test_the_next_test_begins_with_nothing_used(start):
  pid = start(SPIN)
  wait_for(lambda: cpu_s(pid) > 1.0)
  clock = usage.Clock(pid, Limits(test_s=0.5, total_s=600.0))
  clock.tested()
  time.sleep(0.2)
  assert not clock.late()  # it begins to count here
  begun = cpu_s(pid)
  wait_until_late(clock)
  assert cpu_s(pid) - begun > 0.4  # it tells hundredths of a second


@pytest.mark.ci
def test_sleep_before_a_test_is_not_its_own(start):
  pid = start(SLEEP)
  clock = usage.Clock(pid, Limits(test_s=0.8, total_s=600.0))
  for _ in range(8):  # 1.2 s
    time.sleep(0.15)
    assert not clock.late()
    clock.tested()


def test_waiting_for_a_cpu_is_not_sleep(monkeypatch):
  """By hand: a process that ran for a tenth of the time and waited else."""
  now, found = [0.0], [{1: usage.Usage(0.0, 0.0)}]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(usage, "of_descendants", lambda pid: found[0])
  clock = usage.Clock(0, Limits(test_s=1.0, total_s=2.0))

  def after(wall, cpu, waited):
    now[0], found[0] = wall, {1: usage.Usage(cpu, waited)}
    return clock.late()

  assert not after(1.0, 0.1, 0.9)  # another set of processes than before
  assert not after(5.0, 0.5, 4.5)
  assert not after(9.0, 0.9, 8.1)
  assert after(10.1, 0.91, 9.19)  # ten times the limit, and no more patience
  clock.tested()
  assert not after(12.0, 1.1, 10.9)
  clock.tested()
  assert not after(13.0, 1.2, 10.9)  # .9 s of sleep
  assert after(13.2, 1.2, 10.9)  # 1.1 s


@pytest.mark.ci
def test_a_process_whose_threads_end_is_seen_all_the_time(start):
  code = (
    "import threading\n"
    "while True:\n"
    "  some = [threading.Thread(target=int) for _ in range(8)]\n"
    "  for one in some: one.start()\n"
    "  for one in some: one.join()"
  )
  pid = start(code)
  last = 0.0
  for _ in range(2000):
    seen = usage.of_descendants(pid)
    assert len(seen) == 1
    assert cpu_s(pid) >= last
    last = cpu_s(pid)


def test_cpu_never_grows_less(monkeypatch):
  """A look that missed a process does not begin a test at nothing."""
  now, found = [0.0], [{}]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(usage, "of_descendants", lambda pid: found[0])
  clock = usage.Clock(0, Limits(test_s=5.0, total_s=60.0))
  for now[0], cpu in ((1.0, 1.0), (4.0, 4.0)):
    found[0] = {1: usage.Usage(cpu, 0.0)}
    assert not clock.late()
  clock.tested()
  now[0], found[0] = 4.2, {}
  assert not clock.late()
  now[0], found[0] = 6.0, {1: usage.Usage(6.0, 0.0)}
  assert not clock.late()  # two seconds of five


def test_waits_of_threads_that_ended_are_no_sleep(monkeypatch):
  now, found = [0.0], [{1: usage.Usage(0.0, 5.0)}]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(usage, "of_descendants", lambda pid: found[0])
  clock = usage.Clock(0, Limits(test_s=2.5, total_s=60.0))
  now[0] = 0.1
  assert not clock.late()
  now[0], found[0] = 2.1, {1: usage.Usage(2.0, 0.0)}
  assert not clock.late()


def test_what_ended_in_between_is_not_sleep(monkeypatch):
  """Another process than before: how long it waited cannot be told."""
  now, pids = [0.0], iter(range(1, 99))
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(
    usage, "of_descendants", lambda pid: {next(pids): usage.Usage(0.0, 0.0)}
  )
  clock = usage.Clock(0, Limits(test_s=1.0, total_s=2.0))
  for now[0] in (1.5, 3.0, 4.5):
    assert not clock.late()


def test_all_tests_together_end_when_patience_does(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(
    usage, "of_descendants", lambda pid: {1: usage.Usage(0.0, now[0])}
  )
  clock = usage.Clock(0, Limits(test_s=1.0, total_s=2.0))
  for now[0] in (6.0, 12.0, 18.0):
    clock.tested()
    assert not clock.late()
  now[0] = 20.1
  assert clock.late()


def test_what_the_kernel_does_not_tell_is_sleep(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(usage, "of_descendants", lambda pid: {})
  clock = usage.Clock(0, Limits(test_s=1.0, total_s=2.0))
  now[0] = 0.9
  assert not clock.late()
  now[0] = 1.1
  assert clock.late()
