"""Judges many responses at once, and survives the judges.

    verifiers = {"math": lambda response, entry, jail: math.verify(...)}
    with Pool(verifiers) as pool:
      judged = pool.judge([Job("math", response, entry), ...])
      judged[0].verdict.reward, judged[0].seconds

Each thread of the pool has a jail of its own, so that as many processes work as
there are threads. Whatever goes wrong with a verifier makes its response
invalid, never right or wrong: the loss leaves it out and the run counts it.

The verifiers are passed in: the pool knows no domain.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.sandbox.jail import Failed, Jail

Verifier = Callable[[str, Mapping[str, Any], Jail], Verdict]


class Job(NamedTuple):
  """A response to judge.

  Attributes:
    domain: Which verifier judges it.
    response: What the policy wrote.
    entry: The example's; the same object for all responses to one prompt, which
      is how equal jobs are found.
  """

  domain: str
  response: str
  entry: Mapping[str, Any]


class Judged(NamedTuple):
  """A verdict and the seconds it took; equal jobs share both."""

  verdict: Verdict
  seconds: float


class Pool:
  """Threads with jails, and the batches they work on.

  Several threads may ask it at once; each waits for its own batch, so that
  nobody is ahead of the judges by more than what they were asked.

  Responses wait for as long as others are judged; only one that is being judged
  has a deadline, for a verifier that hangs, since all that runs in a jail has
  limits of its own. What hangs in Python code of this process cannot be ended:
  its thread is left behind, with the CPU it takes, and another takes its place.
  Verifiers must bound what they do outside a jail.
  """

  def __init__(
    self,
    verifiers: Mapping[str, Verifier],
    *,
    workers: int | None = None,
    deadline_s: float = 600.0,
    jail: Callable[[], Jail] = Jail,
  ):
    """Starts the threads; their jails start when they are first needed.

    Args:
      verifiers: By domain. Called in any of the threads.
      workers: Threads, >= 1. None is one for each CPU, of more than four one
        less for the trainer, and at least two.
      deadline_s: Seconds that a response may be judged, > 0; more than what
        is done to it in a jail may take.
      jail: Makes a thread's jail.
    """
    if workers is None:
      workers = _cpus()
      workers = max(2, workers - 1 if workers > 4 else workers)
    if workers < 1:
      raise ValueError(f"workers is {workers}; use a number >= 1")
    if not deadline_s > 0:
      raise ValueError(f"deadline_s is {deadline_s}; use seconds > 0")
    self._verifiers = dict(verifiers)
    self._deadline_s = deadline_s
    self._jail = jail
    self._closed = False
    # Guards everything below, and says when there is work or a batch is done.
    self._changed = threading.Condition()
    self._batches: list[_Batch] = []  # not done, the oldest first
    self._replaced = 0
    self._threads = [_Thread(self, slot) for slot in range(workers)]
    for thread in self._threads:
      thread.start()

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def judge(self, jobs: Sequence[Job]) -> list[Judged]:
    """Verdicts in the order of the jobs; waits for them.

    Jobs of one domain, response and entry are judged once. Invalid is what is
    judged for longer than the deadline ("late") or raises ("verifier failed").

    Args:
      jobs: In any order and of any domains.

    Raises:
      ValueError: If a domain has no verifier, or the pool is closed.
    """
    for job in jobs:
      if job.domain not in self._verifiers:
        raise ValueError(
          f"domain {job.domain!r} has no verifier; there are"
          f" {', '.join(sorted(self._verifiers)) or 'none'}"
        )
    keys = [(job.domain, job.response, id(job.entry)) for job in jobs]
    distinct = dict(zip(keys, jobs, strict=True))
    batch = _Batch(list(distinct.values()))
    with self._changed:
      if self._closed:
        raise ValueError("the pool is closed; make another")
      if batch.jobs:
        self._batches.append(batch)
        self._changed.notify_all()
      try:
        while batch.left:
          self._changed.wait(self._end_late(batch))
      finally:
        self._withdraw(batch)
    found = dict(zip(distinct, batch.judged(self._deadline_s), strict=True))
    return [found[key] for key in keys]

  def replaced(self) -> int:
    """Processes that were late or died, and threads that hung: since asked."""
    with self._changed:
      replaced, self._replaced = self._replaced, 0
    return replaced

  def close(self) -> None:
    """Ends the threads and their jails. What is being judged becomes late."""
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

  def _end_late(self, batch: _Batch) -> float:
    """Gives up on what took too long; seconds until more may have."""
    now, left = time.monotonic(), self._deadline_s
    for thread in tuple(self._threads):
      if thread.batch is batch and not thread.abandoned:
        if now - thread.since >= self._deadline_s:
          self._abandon(thread)
          batch.left -= 1
        else:
          left = min(left, thread.since + self._deadline_s - now)
    return left if batch.left else 0.0

  def _withdraw(self, batch: _Batch) -> None:
    """Takes back what is not done of it. The lock is held."""
    batch.left = 0
    self._changed.notify_all()
    if batch in self._batches:
      self._batches.remove(batch)
    for thread in tuple(self._threads):
      if thread.batch is batch and not thread.abandoned:
        self._abandon(thread)

  def _abandon(self, thread: _Thread) -> None:
    """Leaves it with what it judges; another takes its place."""
    assert thread.batch is not None
    thread.batch.seconds[thread.index] = time.monotonic() - thread.since
    thread.abandoned = True
    thread.jail.stop()
    self._replaced += 1
    if not self._closed:
      self._threads[thread.slot] = _Thread(self, thread.slot)
      self._threads[thread.slot].start()

  def _next(self, thread: _Thread) -> Job | None:
    """Something to judge, when there is; None if the thread is to end."""
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

  def _done(self, thread: _Thread, verdict: Verdict) -> None:
    with self._changed:
      batch, seconds = thread.batch, time.monotonic() - thread.since
      thread.batch = None
      if batch is None or thread.abandoned:  # it is late; nobody waits
        return
      self._replaced += thread.jail.failures - thread.failures
      thread.failures = thread.jail.failures
      batch.verdicts[thread.index] = verdict
      batch.seconds[thread.index] = seconds
      batch.left -= 1
      if batch.left == 0:
        self._changed.notify_all()

  def _verdict(self, job: Job, jail: Jail) -> Verdict:
    try:
      verdict = self._verifiers[job.domain](job.response, job.entry, jail)
    except Failed as error:
      return _failed(str(error))
    # A verifier is others' code on a model's text: it may raise anything.
    except BaseException as error:
      return _failed(f"{type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
      return _failed(f"it gave a {type(verdict).__name__}, not a Verdict")
    return verdict


class _Batch:
  """Jobs of one call and what is known of them."""

  def __init__(self, jobs: Sequence[Job]):
    self.jobs = jobs
    self.taken = 0
    self.left = len(jobs)
    self.verdicts: list[Verdict | None] = [None] * len(jobs)
    self.seconds = [0.0] * len(jobs)

  def judged(self, deadline_s: float) -> list[Judged]:
    late = Verdict("invalid", 0.0, f"late: no verdict in {deadline_s:g} s", "")
    return [
      Judged(verdict or late, seconds)
      for verdict, seconds in zip(self.verdicts, self.seconds, strict=True)
    ]


class _Thread(threading.Thread):
  """Judges one job after the other until it is abandoned."""

  def __init__(self, pool: Pool, slot: int):
    super().__init__(name=f"scoring-{slot}", daemon=True)
    self.slot = slot
    self.jail = pool._jail()
    self.batch: _Batch | None = None  # in progress, and which of it, since when
    self.index = 0
    self.since = 0.0
    self.failures = 0
    self.abandoned = False
    self._pool = pool

  def run(self) -> None:
    while (job := self._pool._next(self)) is not None:
      self._pool._done(self, self._pool._verdict(job, self.jail))
    self.jail.close()


def _failed(what: str) -> Verdict:
  line = " ".join(what.split())[:400]
  return Verdict("invalid", 0.0, f"verifier failed: {line}", "")


def _cpus() -> int:
  """Those this process may use."""
  ours = getattr(os, "sched_getaffinity", None)  # Linux alone has it
  return len(ours(0)) if ours else os.cpu_count() or 1
