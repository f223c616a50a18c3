"""Tests of many/processes.py: alone, and two real ones on this machine."""

import ctypes
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading

import jax
import launchers
import pytest
import tiers

from brorl_jax.errors import UserError
from brorl_jax.many import processes

ROOT = pathlib.Path(__file__).parents[2]
# Each prints what it found; times are short, so that a test need not wait.
PROGRAM = """
import os, sys, time
import jax
from brorl_jax.many import processes

me, port, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
processes._MOST, processes._COUNT_S = 2**12, 0.2
processes._SILENT_S = 30 if what == "talk" else 4
processes.start(f"127.0.0.1:{port}", 2, me)
say = lambda *x: print(*x, file=sys.stderr, flush=True)
if what == "talk":
  long = "ab" * (me + 1) * 5000  # more than one message
  every = processes.gather((me, long))
  assert every == [(0, "ab" * 5000), (1, "ab" * 10000)]
  assert processes.gather([]) == [[], []]
  assert processes.first(f"of {me}") == "of 0"
  assert processes.leads() == (me == 0) and not processes.alone()
  board = processes.Board("some")
  assert board.read() == {}
  processes.gather(None)
  claims = [board.claim(2), board.claim(2)]
  assert processes.gather(claims) in (
    [[True, False], [False, False]], [[False, False], [True, False]]
  )
  every = processes.gather([board.claim(i) for i in range(20, 40)])
  assert all(a != b for a, b in zip(*every))  # by one of them
  board.write(me, f"by {me}")
  processes.gather(None)
  assert board.read() == {0: "by 0", 1: "by 1"}
  assert processes.Board("some/other").read() == {}
  processes.gather(None)
  board.clear()
  processes.gather(None)
  assert board.read() == {}
  assert processes.gather(board.claim(2)).count(True) == 1
  processes.require_same({"lr": 1, "n": 2})
  try:
    processes.require_same({"lr": 1, "n": 2 + me})
  except Exception as e:
    say(f"{type(e).__name__}: {e}")
  sys.exit()
processes.gather(None)
if me == int(what[-1]):
  if what.startswith("fails"):
    processes.fail("--config.optim.lr is wrong", 2)
  os.kill(os.getpid(), {"dies": 9, "stops": 19, "aborts": 6}[what[:-1]])
processes.gather(None)  # in vain
"""


def two(what: str) -> tuple[list[int], list[str]]:
  port = launchers.free_port()
  started = [
    subprocess.Popen(
      [sys.executable, "-c", PROGRAM, str(me), str(port), what], cwd=ROOT,
      stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )
    for me in (0, 1)
  ]  # fmt: skip
  try:
    if what[-1] not in "01":
      said = [one.communicate(timeout=60)[1] for one in started]
    else:  # the other one ends by itself
      which = int(what[-1])
      said = ["", ""]
      said[1 - which] = started[1 - which].communicate(timeout=60)[1]
  finally:
    for one in started:
      one.kill()
      one.wait()
      one.stderr.close()
  return [one.returncode for one in started], said


class Store:
  """The key-value store, where it cannot be reached."""

  def key_value_set(self, key, value):
    raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")


def test_a_claim_that_fails_is_not_one_of_another(monkeypatch):
  monkeypatch.setattr(processes, "_store", Store)
  with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
    processes.Board("some").claim(1)


@pytest.mark.parametrize("coordinator, index, line", [
  ("localhost", 0, "--coordinator=localhost is not HOST:PORT"),
  ("a:b", 0, "is not HOST:PORT"), (":1234", 0, "is not HOST:PORT"),
  ("a:70000", 0, "is not HOST:PORT"),
  ("a:1234", 2, "--process_id=2 is not one of 0 to 1, of --processes=2"),
  ("a:1234", -1, "--process_id=-1 is not one of"),
])  # fmt: skip
def test_wrong_flags_are_refused_before_connecting(coordinator, index, line):
  with pytest.raises(UserError, match=line):
    processes.start(coordinator, 2, index)


def test_one_process_gets_back_what_it_gives():
  assert processes.alone() and processes.leads()
  value = object()
  assert processes.gather(value) == [value] and processes.first(value) is value
  processes.require_same({"lr": 1})


def test_messages_of_all_processes_together_are_small():
  sizes = (5, 2), (1025, 2), (2**40, 4), (2**40, 5), (2**22, 64), (2**40, 64)
  bits = [processes._message(*of).bit_length() - 1 for of in sizes]
  assert bits == [10, 11, 26, 25, 22, 22]


def test_the_last_word_is_said_once_and_not_waited_for(monkeypatch):
  said, hold = [], threading.Event()

  def say(*word):
    said.append(word)
    hold.wait(60)  # as where the storage hangs

  monkeypatch.setattr(processes, "_WORD_S", 0.1)
  with processes.last_word(say):
    processes.leave_word("interrupted", 130)
    processes.leave_word("interrupted", 130)
  hold.set()
  assert said == [("interrupted", 130)]
  with processes.last_word(say):
    pass
  processes.leave_word("after the run", 0)
  assert len(said) == 1


def test_a_difference_is_refused_by_process_and_name(monkeypatch):
  every = [{"a": 1, "n": 2}, {"a": 1, "n": 2}, {"a": 1, "n": 3}]
  monkeypatch.setattr(processes, "gather", lambda value: every)
  with pytest.raises(UserError) as e:
    processes.require_same(every[0])
  assert str(e.value) == (
    "process 2 has n = 3, but process 0 has 2; start all with the same"
  )
  every[2] = {"a": 1}
  with pytest.raises(UserError, match="process 2 has n = None"):
    processes.require_same(every[0])


@pytest.mark.ci
def test_two_processes_tell_each_other():
  statuses, said = two("talk")
  assert statuses == [0, 0], said
  for text in said:
    assert "UserError: process 1 has n = 3, but process 0 has 2" in text


@pytest.mark.ci
def test_the_other_process_ends_with_the_line_of_one_that_fails():
  (status, _), (said, _) = two("fails1")
  assert status == 2
  assert "error: process 1 stopped: --config.optim.lr is wrong\n" in said


@pytest.mark.ci
@pytest.mark.parametrize(
  "what", tiers.some(["dies0", "dies1", "stops1", "stops0"], 0, 2)
)
def test_a_process_that_is_lost_is_named(what):
  gone = int(what[-1])
  statuses, said = two(what)
  assert statuses[1 - gone] == processes.LOST
  # Process 0 is known by the address that all were given. Its connections
  # close when it dies; one that is stopped is only silent.
  host = socket.gethostname() if gone else "127.0.0.1"
  how = "ended" if what == "dies0" else "said nothing for 4 s"
  *_, last = said[1 - gone].splitlines()
  assert last == (
    f"error: process {gone} of 2 ({host}) has {how}; this one ends; the same "
    "command resumes"
  )


@pytest.mark.slow
def test_an_abort_for_another_reason_stays_one():
  statuses, said = two("aborts1")
  assert statuses[1] == -signal.SIGABRT
  assert "has ended" not in said[1]


def test_freed_memory_of_a_large_process_goes_back():
  c, statm = ctypes.CDLL(None), pathlib.Path("/proc/self/statm")
  if not hasattr(c, "malloc_trim"):
    pytest.skip("not of glibc")
  c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
  size = 2**16  # below the mmap threshold
  blocks = [ctypes.memset(c.malloc(size), 1, size) for _ in range(4000)]
  for block in blocks[:-1]:  # the last holds the heap's end
    c.free(block)
  pages = lambda: int(statm.read_text().split()[1])
  kept, least = pages(), 2**27 // resource.getpagesize()
  for large, gone in ((2**40, False), (0, True)):
    processes.trim(large)
    assert (kept - pages() > least) == gone
  c.free(blocks[-1])
