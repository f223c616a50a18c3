"""A user's reward functions: worker processes that call them, and their sum.

with Rewards(["mine.py:score"], timeout_s=60.0) as rewards:
  [[scored, ...]] = rewards.score([Group(responses, example)], step=3)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import queue
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, NoReturn

from brorl_jax.verdicts import pool
from brorl_jax.verdicts.base import Domain, Example, Verdict
from brorl_jax.verdicts.own import functions
from brorl_jax.verdicts.pool import TimedVerdict
from brorl_jax.verdicts.sandbox import worker
from brorl_jax.verdicts.sandbox.process import Failed
from brorl_jax.verdicts.sandbox.usage import Deadline

_CHUNK = 16  # responses per question; few, so that all workers have work
_IN_A_ROW = 8  # give up after this many questions without an answer
_WHAT = "config.reward.verifier"
_LOAD_S = 600.0  # a module may load a model
_MAX_REPLY = 1 << 30  # bytes
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # the trainer owns the devices
  "PYTHONDONTWRITEBYTECODE": "1",  # run the file that the digest is of
  "PYTHONHASHSEED": "0",  # the same response gets the same reward
}


def _by_workers(response: str, entry: Mapping[str, Any], jail: Any) -> Verdict:
  raise RuntimeError("Rewards.score calls the functions of a user")


# The domain of every data line if the user brings the reward.
DOMAIN = Domain(
  name="own",
  verify=_by_workers,
  fields={},
  check_reference=dict,
)


class Group(NamedTuple):
  """Responses to one prompt, in the order of the rollouts."""

  responses: Sequence[str]
  example: Example


class Rewards:
  """Reward functions and the processes that call them.

  Several threads may call `score` at once.

  Attributes:
    digests: Hashes of the files that define the functions, by name.
  """

  def __init__(
    self,
    names: Sequence[str],
    *,
    timeout_s: float = 60.0,
    workers: int | None = None,
  ):
    """Imports the functions in one process; others start when needed.

    Args:
      names: "file.py:function" or "package.module:function".
      timeout_s: Longest call in seconds, > 0.
      workers: Number of processes; None: as many as `pool.Pool` has threads.

    Raises:
      ValueError: A function cannot be imported or has another signature.
    """
    _check(names, timeout_s)
    workers = workers or pool.size()
    self._idle: queue.LifoQueue[FunctionWorker] = queue.LifoQueue()
    self._workers = [FunctionWorker(names, timeout_s) for _ in range(workers)]
    for each in self._workers:
      self._idle.put(each)
    self._replaced = collections.Counter[str]()  # by reason
    self._in_a_row = 0
    try:
      hello = self._workers[-1].load()
    except Failed as error:
      self._workers[-1].close()
      raise ValueError(str(error)) from None
    self.digests: dict[str, str] = hello["digests"]
    self._whole: list[bool] = hello["whole"]
    for each in self._workers:
      each.digests = self.digests
    self._threads = futures.ThreadPoolExecutor(workers, "reward")

  def __enter__(self) -> Rewards:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def score(
    self, groups: Sequence[Group], *, step: int | None
  ) -> list[list[TimedVerdict]]:
    """Waits for the verdicts on all responses of each group.

    A function of one response is called once for equal responses.

    Args:
      step: The training step; None in an evaluation.
    """
    pending = [
      [self._ask(i, group, step) for i in range(len(self._whole))]
      for group in groups
    ]
    return [
      [*map(self._combined, zip(*(wait() for wait in waits), strict=True))]
      for waits in pending
    ]

  def replaced(self) -> collections.Counter[str]:
    """Processes that were late or ended since the last call, by reason."""
    replaced, self._replaced = self._replaced, collections.Counter()
    return replaced

  def close(self) -> None:
    """Ends the processes; responses in progress become invalid."""
    for each in self._workers:
      each.stop()
    self._threads.shutdown()
    for each in self._workers:
      each.close()

  def _ask(
    self, which: int, group: Group, step: int | None
  ) -> Callable[[], list[TimedVerdict]]:
    """Submits a group to one function; the result waits for its verdicts."""
    whole, example = self._whole[which], _example(group.example)
    texts = group.responses if whole else [*dict.fromkeys(group.responses)]
    size = max(len(texts), 1) if whole else _CHUNK
    pieces = [
      self._threads.submit(
        self._scored, which, texts[i : i + size], example, step
      )
      for i in range(0, len(texts), size)
    ]

    def wait() -> list[TimedVerdict]:
      found = [verdict for piece in pieces for verdict in piece.result()]
      if whole:
        return found
      by_text = dict(zip(texts, found, strict=True))
      return [by_text[response] for response in group.responses]

    return wait

  def _scored(
    self, which: int, responses: Sequence[str], example: str, step: int | None
  ) -> list[TimedVerdict]:
    process = self._idle.get()
    try:
      begin, out = time.monotonic(), []
      while len(out) < len(responses):
        rest = responses[len(out) :]
        out += self._some(process, which, rest, example, step)
    finally:
      self._idle.put(process)
    each = (time.monotonic() - begin) / len(out)
    return [TimedVerdict(verdict, each) for verdict in out]

  def _some(
    self,
    process: FunctionWorker,
    which: int,
    responses: Sequence[str],
    example: str,
    step: int | None,
  ) -> list[Verdict]:
    """Verdicts on the first responses, up to one without an answer."""
    out = []
    try:
      if self._in_a_row >= _IN_A_ROW:
        raise Failed(f"no answer {_IN_A_ROW} times in a row; not called again")
      for verdict in process.ask(which, responses, example, step):
        out.append(verdict)
        self._in_a_row = 0
    except Failed as error:
      process.close()
      self._replaced[str(error)] += 1
      self._in_a_row += 1
      lost = len(responses) - len(out) if self._whole[which] else 1
      out += [functions.invalid(str(error))] * lost
    return out

  def _combined(self, scored: Sequence[TimedVerdict]) -> TimedVerdict:
    verdicts = [each.verdict for each in scored]
    seconds = sum(each.seconds for each in scored)
    for verdict in verdicts:
      if verdict.status == "invalid":
        return TimedVerdict(verdict, seconds)
    score = math.fsum(verdict.score for verdict in verdicts)
    first = verdicts[0]
    verdict = Verdict(first.status, score, first.reason, first.answer)
    return TimedVerdict(verdict, seconds)


def _example(example: Example) -> str:
  """The `example` argument of a function, as JSON."""
  known = {
    "id": example.id,
    "source": example.task,
    "prompt": example.question,
    "messages": [dict(message) for message in example.messages],
  }
  return json.dumps({**known, **example.columns})


def _check(names: Sequence[str], timeout_s: float) -> None:
  what = _WHAT
  if not names or len({*names}) < len(names):
    raise ValueError(f"{what} = {[*names]}: name each function once")
  if not 0 < timeout_s < math.inf:
    raise ValueError(f"config.reward.timeout_s = {timeout_s}; use seconds > 0")


class FunctionWorker(worker.Worker):
  """A process that calls a user's functions; one thread asks at a time.

  Attributes:
    digests: Hashes that the files of the functions must have; None: any.
  """

  def __init__(self, names: Sequence[str], timeout_s: float):
    super().__init__(reply_bytes=_MAX_REPLY)
    self.digests: Mapping[str, str] | None = None
    self._names, self._timeout_s = names, timeout_s

  def load(self) -> dict[str, Any]:
    """Starts the process and returns its first message; raises Failed."""
    with self._question(f"{_WHAT} = {[*self._names]}"):
      self._begin(_LOAD_S)
      hello = self._receive(Deadline(_LOAD_S))
    if "error" in hello:
      raise Failed(hello["error"])
    for name, digest in (self.digests or {}).items():
      if hello["digests"][name] != digest:
        raise Failed(f"the file of {name} changed during the run")
    return hello

  def ask(
    self, which: int, responses: Sequence[str], example: str, step: int | None
  ) -> Iterator[Verdict]:
    """Yields the verdicts on the responses; raises Failed."""
    if not self._running():
      self.load()
    question = json.dumps([which, [*responses], example, step]).encode()
    with self._question(self._names[which]):
      self._send(question, self._timeout_s)
      for _ in responses:
        yield Verdict(*self._receive(Deadline(self._timeout_s)))

  def _start(
    self, life: socket.socket, link: socket.socket
  ) -> subprocess.Popen:
    return worker.python(
      __name__,
      [life, link],
      *self._names,
      flag="-u",
      stdout=2,  # prints of a function go to standard error
      env={**os.environ, **_ENVIRONMENT},
    )


def main(descriptors: Sequence[int], *names: str) -> NoReturn:
  """Becomes a guard whose worker calls the functions of these names."""
  life, link = descriptors
  worker.guard(life, link, functools.partial(_work, names=names))


def _work(link: int, names: Sequence[str]) -> None:
  loaded: list[functions.Function] = []
  try:
    loaded = [functions.load(name, what=_WHAT) for name in names]
    hello = {
      "digests": {f.name: f.digest for f in loaded},
      "whole": [f.whole for f in loaded],
    }
  except BaseException as error:  # a module may raise SystemExit
    text = " ".join(str(error).split())
    field = "" if isinstance(error, ValueError) else f"{_WHAT}: "
    hello = {"error": f"{field}{text or type(error).__name__}"}

  def answers(question: Any) -> Iterator[Any]:
    which, responses, example, step = question
    for verdict in functions.verdicts(loaded[which], responses, example, step):
      yield dataclasses.astuple(verdict)

  worker.serve(link, hello, answers, reply_bytes=_MAX_REPLY)
