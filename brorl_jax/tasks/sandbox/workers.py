"""Processes that judge a model's text, and end when they take too long.

    worker = Worker()
    worker.ask("symbolic", r"\\frac{1}{2}", "0.5", timeout=3.0)   # True
    worker.close()

A worker is forked from a template that has the libraries loaded; there is one
template per process and table of judges, whatever the number of threads,
started when the first worker is wanted. A worker that was late, died, or said
what it should not is never asked again: the next question has a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from brorl_jax.tasks.sandbox import forks, template
from brorl_jax.tasks.sandbox.zygote import Failed

JUDGES = "brorl_jax.tasks.sandbox.judges"
PATIENCE = 10  # times the time-out, of the wall clock, on a crowded machine

_QUESTIONS = 5_000  # of one worker; sympy's caches grow
_RESIDENT = 1 << 20  # kilobytes a worker may have had, to be asked again


class Worker:
  """One process that answers one question at a time; see the module.

  One thread asks; `stop` is for the others.
  """

  def __init__(self, judges: str = JUDGES):
    """Starts nothing yet.

    Args:
      judges: Module with the table of judges; see template.main.
    """
    self.failures = 0  # questions without an answer; each cost a process
    self._judges = judges
    self._process: forks.Process | None = None
    self._stopped = False

  def ask(self, judge: str, *args: Any, timeout: float) -> Any:
    """What a judge says: any value that JSON can hold, to be checked.

    The time-out counts the time in which the worker runs or sleeps, not that
    in which it waits for a CPU: the kernel says how long that was, to within
    one turn of its scheduler. So a verdict does not depend on what else the
    machine does, unless that takes `PATIENCE` times as long. Where the kernel
    does not say, the wall clock decides.

    Args:
      judge: A name in the table.
      *args: Values that JSON can hold, at most 4 MiB of it.
      timeout: Seconds, > 0.

    Raises:
      Failed: In one line, if there is no answer.
    """
    if not timeout > 0:
      raise ValueError(f"timeout is {timeout}; use seconds > 0")
    request = json.dumps([judge, args]).encode()
    try:
      if len(request) > template.MAX_REQUEST:
        raise Failed(
          f"a question of {len(request)} bytes, at most {template.MAX_REQUEST}"
        )
      process = self._running()
      value, resident = _exchange(process, request, timeout)
    except Failed as error:
      self.failures += 1
      self.close()
      raise Failed(f"{judge}: {error}") from None
    except BaseException:  # an interrupt: the answer may still be on its way
      self.close()
      raise
    process.asked += 1
    if (
      judge in process.fresh
      or process.asked >= _QUESTIONS
      or resident > _RESIDENT
    ):
      self.close()
    return value

  def stop(self) -> None:
    """Ends a question in progress and refuses others, from any thread."""
    self._stopped = True
    process = self._process
    if process is not None:
      process.stop()

  def close(self) -> None:
    """Ends the process. A later question starts another."""
    process, self._process = self._process, None
    if process is not None:
      process.close()

  def _running(self) -> forks.Process:
    # After a fork of ours the process is still the parent's, who asks it too.
    if self._process is None or self._process.owner != os.getpid():
      self._process = forks.fork(self._judges)
    if self._stopped:  # looked at after the process is there for stop() to see
      raise Failed("stopped")
    return self._process


def walls(judges: str = JUDGES) -> str:
  """Why workers have no walls on this machine, "" if they have: for the record.

  Raises:
    Failed: If there can be no workers at all.
  """
  return forks.template(judges).walls


def _exchange(
  process: forks.Process, request: bytes, timeout: float
) -> tuple[Any, int]:
  """One question; its answer, and the kilobytes the worker has had."""
  link, data, left = process.link, b"", timeout
  start, waited = time.monotonic(), process.schedule.waited()
  try:
    link.settimeout(PATIENCE * timeout)
    link.sendall(template.LENGTH.pack(len(request)) + request)
    while True:
      link.settimeout(max(left, 0.01))  # not less than a turn of the scheduler
      with contextlib.suppress(TimeoutError):
        part = link.recv(template.MAX_REPLY + 1)
        if not part:
          raise Failed("the worker died")
        data += part
      if _whole(data):
        return _decoded(data[template.LENGTH.size :])
      wall = time.monotonic() - start
      left = timeout - wall + process.schedule.waited() - waited
      if left <= 0 or wall > PATIENCE * timeout:
        raise Failed(f"late, no answer in {timeout:g} s")
  except TimeoutError:
    raise Failed(f"late, not even read in {timeout:g} s") from None
  except OSError:
    raise Failed("the worker died") from None


def _whole(data: bytes) -> bool:
  """Whether all of a reply is there."""
  if len(data) < template.LENGTH.size:
    return False
  (size,) = template.LENGTH.unpack_from(data)
  if size > template.MAX_REPLY or len(data) > template.LENGTH.size + size:
    raise Failed(f"a malformed reply, of {max(size, len(data))} bytes")
  return len(data) == template.LENGTH.size + size


def _decoded(data: bytes) -> tuple[Any, int]:
  # What executed a model's text may say anything.
  try:
    reply = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise Failed(f"a malformed reply ({type(error).__name__})") from None
  match reply:
    case {"value": value, "rss": int(resident)}:
      return value, resident
    case {"error": str(text)}:
      raise Failed(" ".join(text.split())[:400])
  raise Failed("a malformed reply")
