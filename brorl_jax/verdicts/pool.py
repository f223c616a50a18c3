"""Scores many responses in parallel.

    verifiers = {"math": lambda response, entry, jail: math.verify(...)}
    with Pool(verifiers) as pool:
      scored = pool.score([Job("math", response, entry), ...])
      scored[0].verdict.reward, scored[0].seconds

Each thread has its own jail and so its own processes. If a verifier fails, the
response becomes invalid, never right or wrong: the loss leaves it out and a
metric counts it.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.sandbox.jail import Failed, Jail

Verifier = Callable[[str, Mapping[str, Any], Jail], Verdict]
Part = Callable[[str, Mapping[str, Any]], Any]


class Job(NamedTuple):
  domain: str  # name of the verifier
  response: str
  # The example's; responses to a prompt share the object: it finds equal jobs.
  entry: Mapping[str, Any]


class TimedVerdict(NamedTuple):
  """A verdict and the seconds that it took; equal jobs share both."""

  verdict: Verdict
  seconds: float


class Pool(contextlib.AbstractContextManager["Pool"]):
  """Threads with jails, and the batches they work on.

  Several threads may call `score` at once. A response may wait in the queue
  without limit. A deadline applies only while it is scored, in case a verifier
  hangs; work in a jail has its own limits. Python code of this process that
  hangs cannot be ended: the thread is abandoned, with the CPU it takes, and a
  new one replaces it. Verifiers must bound the work they do outside a jail.
  """

  def __init__(
    self,
    verifiers: Mapping[str, Verifier],
    *,
    parts: Mapping[str, Part | None] = {},
    workers: int | None = None,
    deadline_s: float = 600.0,
    jail: Callable[[], Jail] = Jail,
  ):
    """Starts the threads; a jail starts when it is first needed.

    `verifiers` and `parts` are by domain; see Domain.part. `deadline_s` is for
    one response: use more than the limits of the jail add up to.
    """
    self._verifiers, self._jail = dict(verifiers), jail
    self._parts = parts
    self._deadline_s, self._closed = deadline_s, False
    self._late = f"late: no verdict in {deadline_s:g} s"
    # Guards all fields below; notified of new work and finished batches.
    self._changed = threading.Condition()
    self._batches: list[_Batch] = []  # unfinished, oldest first
    self._replaced = collections.Counter[str]()  # by reason
    self._threads = [_Thread(self) for _ in range(workers or size())]
    for thread in self._threads:
      thread.start()

  def __exit__(self, *_: object) -> None:
    self.close()

  def score(self, jobs: Sequence[Job]) -> list[TimedVerdict]:
    """Waits for all verdicts and returns them in the order of the jobs.

    Jobs with the same domain, part of the response and entry are scored once.
    A response becomes invalid if its verifier misses the deadline ("late") or
    raises ("verifier failed"). Raises ValueError if the pool is closed.
    """
    keys = []
    for job in jobs:
      part = self._parts.get(job.domain)
      of = part(job.response, job.entry) if part else job.response
      keys.append((job.domain, of, id(job.entry)))
    distinct = dict(zip(keys, jobs, strict=True))
    batch = _Batch(list(distinct.values()))
    with self._changed:
      if self._closed:
        raise ValueError("the pool is closed; make a new one")
      if batch.jobs:
        self._batches.append(batch)
        self._changed.notify_all()
      try:
        while batch.left:
          self._changed.wait(self._end_late(batch))
      finally:
        self._withdraw(batch)
    late = Verdict("invalid", 0.0, self._late, "")
    judged = [verdict or late for verdict in batch.verdicts]
    scored = map(TimedVerdict, judged, batch.seconds)
    by_key = dict(zip(distinct, scored, strict=True))
    return [by_key[key] for key in keys]

  def replaced(self) -> collections.Counter[str]:
    """Processes and threads replaced since the last call, by reason."""
    with self._changed:
      replaced, self._replaced = self._replaced, collections.Counter()
    return replaced

  def close(self) -> None:
    """Ends the threads and jails; responses in progress become late."""
    with self._changed:
      self._closed = True
      for batch in tuple(self._batches):
        self._withdraw(batch)
      for thread in self._threads:
        thread.abandoned = True
        thread.jail.stop()
      self._changed.notify_all()
    for thread in self._threads:
      thread.join(5.0)  # longer only if a verifier is stuck

  def _end_late(self, batch: "_Batch") -> float:
    """Abandons late threads; seconds until the next deadline."""
    now, left = time.monotonic(), self._deadline_s
    for thread in tuple(self._threads):
      if thread.batch is batch and not thread.abandoned:
        if now - thread.since >= self._deadline_s:
          self._abandon(thread, self._late)
          batch.left -= 1
        else:
          left = min(left, thread.since + self._deadline_s - now)
    return left if batch.left else 0.0

  def _withdraw(self, batch: "_Batch") -> None:
    """Drops the unfinished jobs of a batch. The lock is held."""
    batch.left = 0
    self._changed.notify_all()
    if batch in self._batches:
      self._batches.remove(batch)
    for thread in tuple(self._threads):
      if thread.batch is batch and not thread.abandoned:
        self._abandon(thread, "no caller waits for its verdict")

  def _abandon(self, thread: "_Thread", why: str) -> None:
    assert thread.batch is not None
    thread.batch.seconds[thread.index] = time.monotonic() - thread.since
    thread.abandoned = True
    thread.jail.stop()
    self._replaced[why] += 1
    if not self._closed:
      new = self._threads[self._threads.index(thread)] = _Thread(self)
      new.start()

  def _next(self, thread: "_Thread") -> Job | None:
    """Waits for the next job; None if the thread should end."""
    with self._changed:
      while not (self._closed or thread.abandoned):
        batch = next((b for b in self._batches if b.taken < len(b.jobs)), None)
        if batch is not None:
          thread.batch, thread.index = batch, batch.taken
          thread.since = time.monotonic()
          batch.taken += 1
          return batch.jobs[thread.index]
        self._changed.wait()
      return None

  def _done(self, thread: "_Thread", verdict: Verdict) -> None:
    with self._changed:
      batch, seconds = thread.batch, time.monotonic() - thread.since
      thread.batch = None
      if batch is None or thread.abandoned:  # too late; no one waits
        return
      if ended := thread.jail.failures - thread.failures:
        judged = verdict.status != "invalid"  # a new process could do it
        why = "its process ended" if judged else verdict.reason
        self._replaced[why] += ended
      thread.failures = thread.jail.failures
      batch.verdicts[thread.index] = verdict
      batch.seconds[thread.index] = seconds
      batch.left -= 1
      if batch.left == 0:
        self._changed.notify_all()

  def _verdict(self, job: Job, jail: Jail) -> Verdict:
    try:
      verdict = self._verifiers[job.domain](job.response, job.entry, jail)
      if isinstance(verdict, Verdict):
        return verdict
      text = f"it returned a {type(verdict).__name__}, not a Verdict"
    except Failed as error:
      text = str(error)
    # A verifier runs library code on model text and may raise anything.
    except BaseException as error:
      text = f"{type(error).__name__}: {error}"
    line = " ".join(text.split())[:400]
    return Verdict("invalid", 0.0, f"verifier failed: {line}", "")


class _Batch:
  def __init__(self, jobs: Sequence[Job]):
    self.jobs = jobs
    self.taken = 0
    self.left = len(jobs)
    self.verdicts: list[Verdict | None] = [None] * len(jobs)
    self.seconds = [0.0] * len(jobs)


class _Thread(threading.Thread):
  """Scores one job after the other until it is abandoned."""

  def __init__(self, pool: Pool):
    super().__init__(name="scoring", daemon=True)
    self.jail = pool._jail()
    # The current job: batch, index, start time.
    self.batch: _Batch | None = None
    self.index, self.since = 0, 0.0
    self.failures, self.abandoned = 0, False
    self._pool = pool

  def run(self) -> None:
    while (job := self._pool._next(self)) is not None:
      self._pool._done(self, self._pool._verdict(job, self.jail))
    self.jail.close()


def size() -> int:
  """CPUs of this process, at least two; above four, one is the trainer's."""
  ours = getattr(os, "sched_getaffinity", None)  # only on Linux
  cpus = len(ours(0)) if ours else os.cpu_count() or 1
  return max(2, cpus - 1 if cpus > 4 else cpus)
