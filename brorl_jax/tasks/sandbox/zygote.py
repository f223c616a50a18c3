"""The host's side of the code jail: hands it jobs, and kills it.

    zygote = Zygote("/usr/bin/python3", bubblewrap="/usr/bin/bwrap")
    ended = zygote.run({"mode": "call", ...}, limits=Limits())
    zygote.close()

A zygote is an interpreter in the jail, see inside.py, which forks a process per
job in a few milliseconds; starting it, process.py, takes 0.1 s. One thread uses
a zygote; each wants its own. It is killed from here, with all that it holds,
after the first job that was late or said what it should not, and after 500.
What crashes has left nothing behind: the next job has the same zygote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.tasks.sandbox import inside, process, programs, running, usage
from brorl_jax.tasks.sandbox.process import Died, Failed
from brorl_jax.tasks.sandbox.walls import Limits

_JOBS = 500
_TIME_OUT = "time-out"
_FLOOD = "too much output"
_MALFORMED = "malformed results"
_FORBIDDEN = "forbidden system call"
# The zygote and its jail are not used again after such an end.
_UNCLEAN = (_TIME_OUT, _FLOOD, _MALFORMED, _FORBIDDEN)
_PIECE = 1 << 18  # bytes of one read


@dataclasses.dataclass(frozen=True)
class Frame:
  """One result; see running.py.

  Attributes:
    index: Which test, or -1 for what failed before the first.
    status: Wait status of the test, as of a process of its own.
    first: Whether no test ran in its process before.
    cpu_s: CPU-seconds it took, as the program may have forged them.
    payload: What came back.
    why: What went wrong, in the words of the jail or of a program that forged
      them.
  """

  index: int
  status: int
  first: bool
  cpu_s: float
  payload: bytes
  why: bytes


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a job ended.

  Attributes:
    frames: What it said until then.
    reason: "" if it came to its end, else "time-out", "too much output",
      "malformed results", "forbidden system call", "killed: SIGSEGV" and the
      like: such a job passed nothing.
    cpu_s: CPU-seconds of all its processes; 0.0 if it did not end by itself.
  """

  frames: Sequence[Frame]
  reason: str
  cpu_s: float = 0.0


class Zygote:
  """One warm interpreter in the jail; see the module."""

  def __init__(self, interpreter: str, *, bubblewrap: str | None):
    """Starts nothing yet.

    Args:
      interpreter: Path of the Python that runs the programs, which whoever runs
        the jail can read: nobody if we are root, else we.
      bubblewrap: Path of bwrap, or None for the inner walls alone.
    """
    self._interpreter = interpreter
    self._bubblewrap = bubblewrap
    self._process: process.Process | None = None
    self._jobs = 0
    self._stopped = False

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> Ended:
    """Runs one job.

    Args:
      job: "mode" and what it needs; see inside.py.
      limits: What it may use.
      tests: For a check, the source of the tests.
      received: Bytes of results that are read, `limits.result_bytes` if None.

    Raises:
      Failed: If there is no jail, or it fails and not for this program alone.
    """
    if received is None:
      received = limits.result_bytes
    # What breaks on its own is tried once again with a new zygote.
    for _ in range(2):
      if self._stopped:
        raise Failed("stopped")
      try:
        return self._run_once(job, limits, tests, received)
      except Broken:
        fault = "the jail's own process failed twice in a row"
      except Died:
        fault = ""
      self.close()
    if fault or self._stopped:
      raise Failed(fault or "stopped")
    # Is it the program, or do we end with every program?
    self._check_works()
    return Ended((), "killed: the jail")

  def stop(self) -> None:
    """Ends a job in progress and refuses others, from any thread."""
    self._stopped = True
    jail = self._process
    if jail is not None:
      jail.stop()

  def close(self) -> None:
    """Kills what runs; the next job starts anew."""
    if self._process is not None:
      self._process.close()
    self._process = None

  def _run_once(
    self, job: Mapping[str, Any], limits: Limits, tests: bytes, received: int
  ) -> Ended:
    if self._process is None or self._jobs >= _JOBS:
      self.close()
      self._jobs = 0
      self._process = programs.start(self._interpreter, self._bubblewrap)
    if self._stopped:  # looked at after the process is there for stop() to see
      raise Failed("stopped")
    self._jobs += 1
    texts = [json.dumps({**job, "limits": dataclasses.asdict(limits)}).encode()]
    if job["mode"] == "check":
      texts.append(tests)
    clean = False
    results, theirs = os.pipe()
    try:
      self._process.begin(texts, theirs)
      ended = _collect(
        self._process, results, limits, received, job["mode"] != "call"
      )
      clean = ended.reason not in _UNCLEAN
      return ended
    finally:
      os.close(results)
      if not clean:  # also after an interrupt
        self.close()

  def _check_works(self) -> None:
    honest = {"program": "def f(): return 1", "function": "f", "calls": [["l"]]}
    with contextlib.suppress(Died, Broken):
      ended = self._run_once({"mode": "call", **honest}, Limits(), b"", 1 << 10)
      if not ended.reason and [f.payload for f in ended.frames] == [b"1"]:
        return
    raise Failed("the jail ends with every program; see levels.probe()")


class Broken(Exception):
  """A job's process failed before the program began, or beside it."""


def _collect(
  jail: process.Process,
  results: int,
  limits: Limits,
  received: int,
  trusted: bool,
) -> Ended:
  """Reads results until the job ended, is late or says too much.

  Args:
    trusted: Whether the job's own process does not run the program, so that it
      has failed if it says so.
  """
  clock = usage.Clock(jail.pid, limits)
  control = jail.control
  data, whole = bytearray(), len(running.BEGUN)
  status, cpu_s, reason = None, 0.0, ""
  poll = select.poll()
  poll.register(results, select.POLLIN)
  poll.register(control, select.POLLIN)
  waiting = {results, control.fileno()}
  while waiting and not reason:
    ready = dict(poll.poll(clock.wait_s * 1e3))
    if control.fileno() in ready:
      try:
        packet = control.recv(inside.STATUS.size)
      except ConnectionError:
        packet = b""
      if len(packet) != inside.STATUS.size:
        raise Died
      status, cpu_s = inside.STATUS.unpack(packet)
      poll.unregister(control)
      waiting.remove(control.fileno())
    if results in ready:
      piece = os.read(results, _PIECE)
      data += piece
      while (end := _next_frame(data, whole)) <= len(data):
        whole = end
        clock.tested()
      if not piece:
        poll.unregister(results)
        waiting.remove(results)
      if len(data) > received:
        reason = _FLOOD
    if waiting and not reason and clock.late():
      reason = _TIME_OUT
  broken = trusted and status is not None and status == inside.BROKEN << 8
  if broken or not data.startswith(running.BEGUN):
    raise Broken
  frames = []
  try:
    frames.extend(_frames(data[1:]))
  except ValueError:
    reason = reason or why(status) or _MALFORMED
  if cpu_s > limits.total_s or any(f.cpu_s > limits.test_s for f in frames):
    reason = reason or _TIME_OUT
  return Ended(frames, reason or why(status), cpu_s)


def why(status: int | None) -> str:
  """What a wait status says, "" if all went well."""
  if status is None or status == 0:
    return ""
  if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number == signal.SIGSYS:
      return "forbidden system call"
    if number == signal.SIGXCPU:
      return "time-out"
    try:
      return f"killed: {signal.Signals(number).name}"
    except ValueError:
      return f"killed: signal {number}"
  return f"exit status: {os.WEXITSTATUS(status)}"


def _next_frame(data: bytearray, at: int) -> int:
  """Where the frame ends that begins there: beyond the data if it is cut."""
  if len(data) - at < running.FRAME.size:
    return len(data) + 1
  *_, size, more = running.FRAME.unpack_from(data, at)
  return at + running.FRAME.size + size + more


def _frames(data: bytearray) -> Iterator[Frame]:
  """The frames; a ValueError where there is none, or not the next one."""
  view = memoryview(bytes(data))
  at = expected = 0
  while at < len(view):
    if len(view) - at < running.FRAME.size:
      raise ValueError
    index, status, first, cpu_s, size, more = running.FRAME.unpack_from(
      view, at
    )
    at += running.FRAME.size
    if index not in (running.BEFORE, expected):
      raise ValueError
    if len(view) - at < size + more:
      raise ValueError
    payload, why = view[at : at + size], view[at + size : at + size + more]
    at += size + more
    expected += 1
    yield Frame(index, status, first, cpu_s, bytes(payload), bytes(why))
