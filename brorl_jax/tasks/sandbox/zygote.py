"""The host's side of the code jail: hands it jobs, and kills it.

    zygote = Zygote("/usr/bin/python3", bubblewrap="/usr/bin/bwrap")
    ended = zygote.run({"mode": "call", ...}, limits=Limits())
    zygote.close()

A zygote is an interpreter in the jail, see inside.py, which forks a process per
job in a few milliseconds; starting it, process.py, takes 0.1 s. One thread uses
a zygote; each wants its own. It is killed from here, with all that it holds,
after the first job that was late, was killed or said what it should not, and
after 500.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.tasks.sandbox import inside, running
from brorl_jax.tasks.sandbox.process import Died, Failed, Process
from brorl_jax.tasks.sandbox.walls import Limits

_JOBS = 500
_PIECE = 1 << 18  # bytes of one read


@dataclasses.dataclass(frozen=True)
class Frame:
  """One result; see running.py.

  Attributes:
    index: Which test, or -1 for what failed before the first.
    status: Wait status of the test, as of a process of its own.
    first: Whether no test ran in its process before.
    payload: What came back.
    why: What went wrong, in the words of the jail or of a program that forged
      them.
  """

  index: int
  status: int
  first: bool
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
  """

  frames: Sequence[Frame]
  reason: str


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
    self._process: Process | None = None
    self._jobs = 0

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
    received = limits.result_bytes if received is None else received
    job = {**job, "limits": dataclasses.asdict(limits)}
    texts = [json.dumps(job).encode(), tests][: 1 + (job["mode"] == "check")]
    for _ in range(2):
      try:
        return self._run_once(texts, limits, received)
      except Died:
        self.close()
    # Twice in a row with a new zygote: is it the program, or are we broken?
    self._check_works()
    return Ended((), "killed: the jail")

  def close(self) -> None:
    """Kills what runs; the next job starts anew."""
    if self._process is not None:
      self._process.close()
    self._process = None

  def _run_once(
    self, texts: Sequence[bytes], limits: Limits, received: int
  ) -> Ended:
    if self._process is None or self._jobs >= _JOBS:
      self.close()
      self._jobs = 0
      self._process = Process(self._interpreter, self._bubblewrap)
    self._jobs += 1
    process = self._process
    clean = False
    try:
      results = process.send(texts)
      try:
        ended = _collect(process.control, results, limits.wall_s, received)
      finally:
        os.close(results)
      clean = not ended.reason
      return ended
    finally:
      if not clean:  # also after an interrupt
        self.close()

  def _check_works(self) -> None:
    honest = {"program": "def f(): return 1", "function": "f", "calls": [["l"]]}
    job = {"mode": "call", **honest, "limits": dataclasses.asdict(Limits())}
    with contextlib.suppress(Died):
      ended = self._run_once([json.dumps(job).encode()], Limits(), 1 << 10)
      if not ended.reason and [f.payload for f in ended.frames] == [b"1"]:
        return
    raise Failed("the jail ends with every program; see levels.probe()")


def _collect(
  control: socket.socket, results: int, wall_s: float, received: int
) -> Ended:
  """Reads results until the job ended, is late or says too much."""
  deadline = time.monotonic() + wall_s
  data = bytearray()
  status = None
  poll = select.poll()
  poll.register(results, select.POLLIN)
  poll.register(control, select.POLLIN)
  waiting = {results, control.fileno()}
  reason = ""
  while waiting and not reason:
    left = deadline - time.monotonic()
    ready = dict(poll.poll(left * 1e3)) if left > 0 else {}
    if not ready:
      reason = "time-out"
    if control.fileno() in ready:
      try:
        packet = control.recv(inside.STATUS.size)
      except ConnectionError:
        packet = b""
      if len(packet) != inside.STATUS.size:
        raise Died
      (status,) = inside.STATUS.unpack(packet)
      poll.unregister(control)
      waiting.remove(control.fileno())
    if results in ready:
      piece = os.read(results, _PIECE)
      data += piece
      if not piece:
        poll.unregister(results)
        waiting.remove(results)
      if len(data) > received:
        reason = "too much output"
  frames = []
  try:
    frames.extend(_frames(data))
  except ValueError:
    reason = reason or why(status) or "malformed results"
  return Ended(frames, reason or why(status))


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


def _frames(data: bytearray) -> Iterator[Frame]:
  """The frames; a ValueError where there is none, or not the next one."""
  view = memoryview(bytes(data))
  at = expected = 0
  while at < len(view):
    if len(view) - at < running.FRAME.size:
      raise ValueError
    index, status, first, size, more = running.FRAME.unpack_from(view, at)
    at += running.FRAME.size
    if index != running.BEFORE and index != expected:
      raise ValueError
    if len(view) - at < size + more:
      raise ValueError
    payload, why = view[at : at + size], view[at + size : at + size + more]
    at += size + more
    expected += 1
    yield Frame(index, status, first, bytes(payload), bytes(why))
