"""Runs programs in the jail, from the host's side.

    zygote = Zygote("/usr/bin/python3", bubblewrap="/usr/bin/bwrap")
    ended = zygote.run({"mode": "call", ...}, limits=Limits())
    zygote.close()

A zygote is an interpreter in the jail (jail_main.py). It starts in 0.1 s and
forks one process per job in a few milliseconds. Each thread has its own zygote.
The host kills a zygote, with all its processes, after a job that was late or
sent malformed results, and after 500 jobs. A crash leaves nothing behind, so
the next job uses the same zygote.
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

from brorl_jax.verdicts.sandbox import process, protocol, usage
from brorl_jax.verdicts.sandbox.process import Died, Failed
from brorl_jax.verdicts.sandbox.protocol import Limits

_JOBS = 500
_TIME_OUT = "time-out"
_FLOOD = "too much output"
_MALFORMED = "malformed results"
_FORBIDDEN = "forbidden system call"
# A zygote is not used again after one of these.
_UNCLEAN = (_TIME_OUT, _FLOOD, _MALFORMED, _FORBIDDEN)
_PIECE = 1 << 18  # bytes of one read


@dataclasses.dataclass(frozen=True)
class Frame:
  """One result; see protocol.py."""

  index: int  # number of the test, or -1 for a failure before the first
  status: int  # wait status of the test
  first: bool  # whether it was the first test of its process
  cpu_s: float  # CPU seconds; the program may have forged them
  payload: bytes  # the encoded value
  why: bytes  # reason of a failure; the program may have forged it


@dataclasses.dataclass(frozen=True)
class JobResult:
  """The end of a job."""

  frames: Sequence[Frame]  # its results up to then
  # "" if it completed, else "time-out", "too much output", "malformed results",
  # "forbidden system call", "killed: SIGSEGV" and the like. Such a job passed
  # no test.
  reason: str
  # CPU seconds of all its processes; 0.0 if the host ended it.
  cpu_s: float = 0.0


class Zygote:
  """One warm interpreter in the jail.

  `failures` counts how often the jail itself ended or failed, not a program.
  """

  def __init__(self, interpreter: str, *, bubblewrap: str | None):
    """Starts no process; see process.start_jail."""
    self._interpreter, self._bubblewrap = interpreter, bubblewrap
    self._process: process.Process | None = None
    self._jobs = self.failures = 0
    self._stopped = False

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> JobResult:
    """Runs one job.

    Args:
      job: "mode" and the fields of that mode; see jail_main.py.
      tests: For a check, the source of the tests.
      received: Limit on bytes of results; None: `limits.result_bytes`.

    Raises:
      Failed: There is no jail, or it fails for every program.
    """
    if received is None:
      received = limits.result_bytes
    # A jail that breaks is tried once more with a new zygote.
    for _ in range(2):
      if self._stopped:
        raise Failed("stopped")
      try:
        return self._run_once(job, limits, tests, received)
      except Broken:
        fault = "a process of the jail failed twice in a row"
      except Died:
        fault = ""
      self.failures += not self._stopped
      self.close()
    if fault or self._stopped:
      raise Failed(fault or "stopped")
    # Does the jail end with every program, or only with this one?
    self._check_works()
    return JobResult((), "killed: the jail")

  def stop(self) -> None:
    """Ends the job in progress and refuses further ones; any thread."""
    self._stopped = True
    jail = self._process
    if jail is not None:
      jail.stop()

  def close(self) -> None:
    """Kills the zygote; the next job starts a new one."""
    if self._process is not None:
      self._process.close()
    self._process = None

  def _run_once(
    self, job: Mapping[str, Any], limits: Limits, tests: bytes, received: int
  ) -> JobResult:
    if self._process is None or self._jobs >= _JOBS:
      self.close()
      self._jobs = 0
      self._process = process.start_jail(self._interpreter, self._bubblewrap)
    if self._stopped:  # checked after stop() can see the process
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
    raise Failed("the jail ends with every program; see jail.measure()")


class Broken(Exception):
  """A process of the jail failed, not the program."""


def _collect(
  jail: process.Process,
  results: int,
  limits: Limits,
  received: int,
  trusted: bool,
) -> JobResult:
  """Reads results until the job has ended, is late or sends too much.

  If `trusted`, the job's first process does not run the program itself, so that
  its exit status can be believed.
  """
  clock = usage.JobClock(jail.pid, limits)
  control = jail.control
  data, whole = bytearray(), len(protocol.BEGUN)
  status, cpu_s, reason = None, 0.0, ""
  poll = select.poll()
  poll.register(results, select.POLLIN)
  poll.register(control, select.POLLIN)
  waiting = {results, control.fileno()}
  while waiting and not reason:
    ready = dict(poll.poll(clock.wait_s * 1e3))
    if control.fileno() in ready:
      try:
        packet = control.recv(protocol.STATUS.size)
      except ConnectionError:
        packet = b""
      if len(packet) != protocol.STATUS.size:
        raise Died
      status, cpu_s = protocol.STATUS.unpack(packet)
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
  broken = trusted and status is not None and status == protocol.BROKEN << 8
  if broken or not data.startswith(protocol.BEGUN):
    raise Broken
  frames = []
  try:
    frames.extend(_frames(data[1:]))
  except ValueError:
    reason = reason or why(status) or _MALFORMED
  if cpu_s > limits.total_s or any(f.cpu_s > limits.test_s for f in frames):
    reason = reason or _TIME_OUT
  return JobResult(frames, reason or why(status), cpu_s)


def why(status: int | None) -> str:
  """A wait status in words, "" for success."""
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
  """End of the frame that begins at `at`; beyond the data if incomplete."""
  if len(data) - at < protocol.FRAME.size:
    return len(data) + 1
  *_, size, more = protocol.FRAME.unpack_from(data, at)
  return at + protocol.FRAME.size + size + more


def _frames(data: bytearray) -> Iterator[Frame]:
  """The frames; raises ValueError at a malformed or unexpected one."""
  view = memoryview(bytes(data))
  at = expected = 0
  while at < len(view):
    if len(view) - at < protocol.FRAME.size:
      raise ValueError
    index, status, first, cpu_s, size, more = protocol.FRAME.unpack_from(
      view, at
    )
    at += protocol.FRAME.size
    if index not in (protocol.BEFORE, expected):
      raise ValueError
    if len(view) - at < size + more:
      raise ValueError
    payload, why = view[at : at + size], view[at + size : at + size + more]
    at += size + more
    expected += 1
    yield Frame(index, status, first, cpu_s, bytes(payload), bytes(why))
