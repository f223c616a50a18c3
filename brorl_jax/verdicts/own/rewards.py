"""A user's reward functions on the host: worker processes and their sum.

with Rewards(["mine.py:score"], timeout_s=60.0) as rewards:
  [[scored, ...]] = rewards.score([Group(responses, example)], step=3)
"""

from __future__ import annotations

import collections
import json
import math
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from brorl_jax.verdicts import pool
from brorl_jax.verdicts.base import Domain, Example, Verdict
from brorl_jax.verdicts.own import functions, worker
from brorl_jax.verdicts.own.process import Failed, Worker
from brorl_jax.verdicts.pool import TimedVerdict

_CHUNK = 16  # responses per question; few, so that all workers have work
_IN_A_ROW = 8  # give up after this many questions without an answer


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
    self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
    self._workers = [Worker(names, timeout_s) for _ in range(workers)]
    for each in self._workers:
      self._idle.put(each)
    self._replaced = collections.Counter[str]()  # by reason
    self._in_a_row = 0
    try:
      hello = self._workers[-1].hello()
    except Failed as error:
      self._workers[-1].stop()
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
      [
        self._combined([results(response, n) for results in by_function])
        for n, response in enumerate(group.responses)
      ]
      for group, by_function in zip(groups, pending, strict=True)
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

  def _ask(self, which: int, group: Group, step: int | None) -> _Results:
    """Submits the responses of a group to one function."""
    whole, example = self._whole[which], _example(group.example)
    every = group.responses if whole else [*dict.fromkeys(group.responses)]
    size = max(len(every), 1) if whole else _CHUNK
    pieces = [every[i : i + size] for i in range(0, len(every), size)]
    ask = lambda piece: self._threads.submit(
      self._scored, which, piece, example, step
    )
    return _Results(every, [ask(piece) for piece in pieces], whole)

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
    process: Worker,
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


class _Results:
  """Results of a function on a group, by response or by its number."""

  def __init__(
    self,
    responses: Sequence[str],
    pieces: Sequence[futures.Future[list[TimedVerdict]]],
    whole: bool,
  ):
    self._responses, self._pieces, self._whole = responses, pieces, whole
    self._by_key: dict[str | int, TimedVerdict] | None = None

  def __call__(self, response: str, number: int) -> TimedVerdict:
    if self._by_key is None:
      every = [one for piece in self._pieces for one in piece.result()]
      keys = range(len(every)) if self._whole else self._responses
      self._by_key = dict(zip(keys, every, strict=True))
    return self._by_key[number if self._whole else response]


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
  what = worker.WHAT
  if not names or len({*names}) < len(names):
    raise ValueError(f"{what} = {[*names]}: name each function once")
  if not 0 < timeout_s < math.inf:
    raise ValueError(f"config.reward.timeout_s = {timeout_s}; use seconds > 0")
