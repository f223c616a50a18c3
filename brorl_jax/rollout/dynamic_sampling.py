"""Dynamic sampling: prompts are drawn until enough groups have a gradient.

Candidate prompts are drawn in a fixed order. Never more are in progress than
are still needed. A rejected one is replaced at once by the next candidate while
the others continue. The step keeps the first candidates that pass, and
generates none after the last of them. Both sets depend only on rewards, not on
the order in which rollouts finish or are scored.

A thread computes rewards while the devices sample.

Several processes draw from one list: each takes every so manieth of the
candidates that are still needed, tells the others when all of its own are
judged, and so again. Both sets are those of one process.
"""

import collections
import concurrent.futures as futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax import processes
from brorl_jax.rl import filtering
from brorl_jax.types import Groups, Prompts, Rollouts, ScoredResponse, Scores

# As in stream.py, which asks a feed for prompts and yields the finished ones.
Feed = Callable[[int, bool], Prompts | None]
Sample = Callable[[Feed], Iterator[tuple[Prompts, Rollouts]]]


# Maximum share of a step's responses whose verifier may fail (time-out, crash).
# These say nothing about the policy, but many of them mean a broken verifier.
MAX_INVALID = 0.01


class NotEnoughPrompts(RuntimeError):
  """Dynamic sampling found too few prompts that carry a gradient."""


class TooManyInvalid(RuntimeError):
  """Verifiers failed on too many responses."""


class Clock:
  """Seconds spent in the parts of one step."""

  def __init__(self):
    self.spent = collections.defaultdict[str, float](float)

  @contextlib.contextmanager
  def __call__(self, part: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      self.spent[part] += time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class SampledGroups:
  """All groups that a step generated, in candidate order."""

  groups: Groups
  kept: Bool[np.ndarray, " P"]
  # Seconds. rollout: sampling, without waits. score: work of the thread.
  # score_wait: devices waited for rewards. rollout_wait: the thread waited for
  # rollouts. process_wait: this process waited for the others.
  spent: dict[str, float]
  rollout_s: list[float]  # of each process: the slowest keeps all waiting

  def kept_groups(self) -> Groups:
    """The groups that are kept."""
    return jax.tree.map(lambda x: x[self.kept], self.groups)


def collect(
  sample: Sample,
  score: Callable[[Prompts, Rollouts], Scores],
  informative: Callable[[Groups], Bool[np.ndarray, " P"]],
  prompts: Callable[[Sequence[int]], Prompts],
  candidates: Sequence[int],
  *,
  target: int,
  meanwhile: Callable[[], None] = lambda: None,
) -> SampledGroups:
  """Draws candidates until `target` groups are kept.

  Args:
    sample: Makes rollouts of the prompts that a feed gives.
    score: Computes their rewards.
    informative: Whether each group is kept.
    prompts: Builds the prompts of candidates.
    candidates: Their numbers p, in the order of drawing.
    target: Groups to keep.
    meanwhile: Other work for the devices. Called once: when sampling first
      waits for rewards, or at the end.

  Raises:
    NotEnoughPrompts: There were not enough candidates.
    TooManyInvalid: Verifiers failed on more than `MAX_INVALID` of responses.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  make = _Candidates if processes.alone() else _Shared
  pending = make(prompts, candidates, target, meanwhile)

  def judge(prompts: Prompts, rollouts: Rollouts):
    with pending.clock("score"):
      groups = Groups(prompts, rollouts, score(prompts, rollouts))
      return groups, informative(groups)

  begin = time.perf_counter()
  with futures.ThreadPoolExecutor(1) as thread:
    for done, rollouts in sample(pending.feed):
      pending.judged.append(thread.submit(judge, done, rollouts))
  pending.do_others()
  took, spent = time.perf_counter() - begin, pending.clock.spent
  # First, since groups that nobody could judge are not kept.
  check_invalid(
    one
    for group, _ in pending.decided.values()
    for one in group.scores.responses.flat
  )
  if pending.kept < target:
    raise NotEnoughPrompts(
      f"only {pending.kept} of {pending.given} prompts are kept, {target} are "
      "needed: all rewards of the other groups are equal; raise "
      "config.filter.max_oversampling or config.data.distinct_prompts, or use "
      "easier or harder prompts"
    )
  ordered = [pending.decided[p] for p in candidates[: pending.given]]
  waits = "meanwhile", "score_wait", "process_wait"
  rollout = took - sum(spent[part] for part in waits)
  return SampledGroups(
    jax.tree.map(
      lambda *x: np.concatenate(x), *[group for group, _ in ordered]
    ),
    np.array([good for _, good in ordered], bool),
    {
      "rollout": rollout,
      "score": spent["score"],
      "score_wait": spent["score_wait"],
      "rollout_wait": max(took - spent["score"], 0.0),
      "process_wait": spent["process_wait"],
    },
    processes.gather(rollout),
  )


class _Candidates:
  """Candidates of one step: drawn, being scored, and decided."""

  def __init__(
    self,
    prompts: Callable[[Sequence[int]], Prompts],
    candidates: Sequence[int],
    target: int,
    meanwhile: Callable[[], None],
  ):
    self._prompts, self._candidates = prompts, candidates
    self._target, self._others = target, [meanwhile]
    self.clock = Clock()
    self.judged: list[futures.Future] = []  # of (groups, which are kept)
    self.decided: dict[int, tuple[Groups, bool]] = {}  # by p, of one group each
    self.given = self.kept = 0

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next candidates; waits for rewards if the devices are idle."""
    self._settle()
    while not (more := self._wanted(room)) and idle and self.judged:
      self.do_others()
      with self.clock("score_wait"):
        futures.wait(self.judged, return_when=futures.FIRST_COMPLETED)
      self._settle()
    if not more:
      return None
    self.given += len(more)
    return self._prompts(more)

  def do_others(self) -> None:
    with self.clock("meanwhile"):
      while self._others:
        self._others.pop()()

  def _wanted(self, room: int) -> Sequence[int]:
    undecided = self.given - len(self.decided)
    count = min(room, self._target - self.kept - undecided)
    return self._candidates[self.given : self.given + count]

  def _settle(self) -> None:
    """Decides the candidates whose rewards have arrived."""
    for future in [x for x in self.judged if x.done()]:
      self.judged.remove(future)
      groups, good = future.result()
      self.kept += int(good.sum())
      for i, p in enumerate(groups.prompts.index):
        group = jax.tree.map(lambda x, i=i: x[i : i + 1], groups)
        self.decided[int(p)] = group, bool(good[i])


class _Shared(_Candidates):
  """The same, where every process samples some of the candidates.

  A round has as many as are still needed, so that all of them would also have
  been given by one process. Who has sampled its own waits for the others.
  """

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._begin()

  def _begin(self) -> None:
    needed = self._target - self.kept
    chosen = self._candidates[self.given : self.given + needed]
    self._last = not chosen
    self.given += len(chosen)
    self._own = list(chosen[jax.process_index() :: jax.process_count()])
    self._told: set[int] = set(self.decided)

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next of its own candidates; waits for others if devices are idle."""
    self._settle()
    while idle and not self._own and not self._last:
      self.do_others()
      with self.clock("score_wait"):
        futures.wait(self.judged)
        self._settle()
      with self.clock("process_wait"):
        self._exchange()
    more, self._own = self._own[:room], self._own[room:]
    return self._prompts(more) if more else None

  def _exchange(self) -> None:
    """Ends a round: every process then knows all candidates."""
    news = {p: x for p, x in self.decided.items() if p not in self._told}
    for other in processes.gather(news):
      self.decided |= other
    self.kept = sum(good for _, good in self.decided.values())
    self._begin()


def check_invalid(responses: Iterable[ScoredResponse]) -> None:
  """Raises TooManyInvalid if more than `MAX_INVALID` of them failed."""
  every = [*responses]
  failed = [(one.task, one.verdict.reason) for one in every if not one.valid]
  if len(failed) <= MAX_INVALID * len(every):
    return
  (task, reason), count = collections.Counter(failed).most_common(1)[0]
  raise TooManyInvalid(
    f"verifiers failed on {len(failed)} of {len(every)} responses, and at most "
    f"{MAX_INVALID:.0%} may fail; most often ({count}) on {task}: {reason}"
  )


def expected_pass_rates(
  reward: Float[np.ndarray, "P N"],
) -> dict[str, float | None]:
  """The share of prompts that binary rewards are expected to keep.

  `pass_rate_predicted` uses the share of right rollouts in these groups, which
  is too low on average (see `filtering.expected_pass_rate`). `pass_rate_at_16`
  is unbiased, for groups of 16; null if a group has fewer rollouts.
  """
  right = (reward >= 1.0).sum(axis=1)
  predicted, at_16 = _pass_rates(reward.shape[1])
  return {
    "sampling/pass_rate_predicted": float(predicted[right].mean()),
    "sampling/pass_rate_at_16": None
    if at_16 is None
    else float(at_16[right].mean()),
  }


@functools.lru_cache
def _pass_rates(N: int) -> tuple[np.ndarray, np.ndarray | None]:
  """Both rates of a prompt with 0 to N right rollouts."""
  # A table of N + 1 entries: its shape does not change with the number of
  # prompts. An array per step compiled a program per step (.4 s and 30 MB).
  right = jnp.arange(N + 1)[:, None]
  predicted = lambda c: filtering.expected_pass_rate(c / N, N)
  at_16 = lambda c: filtering.pass_rate_at(16, c, N)
  of_all = lambda rate: np.asarray(jax.vmap(rate)(right))
  return of_all(predicted), of_all(at_16) if N >= 16 else None
