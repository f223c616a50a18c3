"""Dynamic sampling: prompts are drawn until enough groups have a gradient.

Candidates are drawn in a fixed order, never more than are still needed, and a
rejected one is replaced at once. The step keeps the first that pass and
generates none after the last of them. Both sets depend only on rewards, not on
the order in which rollouts finish or are scored.

A prompt may get its rollouts in rounds of chunks. As rollout n depends on
(seed, step, p, n) alone, N rollouts in rounds are those of a fixed N.
"""

import collections
import concurrent.futures as futures
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax.many import processes
from brorl_jax.types import Groups, Prompts, Rollouts, ScoredResponse, Scores

# Draws of this process, as many as of any other: a board for each.
_DRAWS = itertools.count()
# How often a process with idle devices looks for verdicts of others.
_LOOK_S = 0.05
# Maximum share of a step's responses whose verifier may fail (time-out, crash).
# These say nothing about the policy, but many of them mean a broken verifier.
MAX_INVALID = 0.01


class RoundPlan(NamedTuple):
  """Rounds of a prompt, and when it stops; a fixed n is one round."""

  after: tuple[int, ...]  # rollouts after each round, multiples of the first
  right: int = 0  # that suffice

  @property
  def chunk(self) -> int:
    """Rollouts of a prompt that are made in one place: the first round."""
    return self.after[0]

  @property
  def n(self) -> int:
    """N, of the arrays of a group; no prompt gets more."""
    return self.after[-1]

  def further(self, reward: Float[np.ndarray, " n"]) -> int:
    """Rollouts after the next round, or as many as there are if it stops. Below
    1 a reward counts as wrong, also where no verifier could judge.
    """
    n, right = len(reward), int((reward >= 1.0).sum())
    enough = right >= self.right or n == self.n
    return n if enough else self.after[self.after.index(n) + 1]


class Chunk(NamedTuple):
  """Rollouts first, first + 1, ... of prompt p."""

  p: int
  first: int


def with_first(prompts: Prompts, chunks: Sequence[Chunk]) -> Prompts:
  """The prompts of these chunks, and which of their rollouts to make."""
  first = np.array([chunk.first for chunk in chunks], np.int32)
  return dataclasses.replace(prompts, first=first)


def _whole(chunks: list[Groups], most: int) -> Groups:
  """One group of all its chunks, in the order of n; see `Rollouts.drawn`."""

  def joined(*parts) -> np.ndarray:
    x = np.concatenate(parts, axis=1)
    if x.shape[1] == most:
      return x
    # Zeros: no token, not valid. Of objects None.
    shape = (x.shape[0], most, *x.shape[2:])
    out = np.full(shape, None if x.dtype == object else 0, x.dtype)
    out[:, : x.shape[1]] = x
    return out

  # Slot-steps are of the prompt, all others of its rollouts.
  together = lambda *x: joined(*x) if x[0].ndim > 1 else np.sum(x, axis=0)
  return Groups(
    dataclasses.replace(chunks[0].prompts, first=None),
    jax.tree.map(together, *(x.rollouts for x in chunks)),
    Scores(*map(joined, *(x.scores for x in chunks))),
  )


class Candidates:
  """Candidates of one step: drawn, being scored, and decided."""

  def __init__(
    self,
    prompts: Callable[[Sequence[int]], Prompts],
    candidates: Sequence[int],
    target: int,
    plan: RoundPlan,
    meanwhile: Callable[[], None],
  ):
    self._prompts, self._candidates = prompts, candidates
    self._target, self._others, self._plan = target, [meanwhile], plan
    self._asked: dict[int, int] = {}  # p -> rollouts asked for so far
    self._here: dict[int, dict[int, Groups]] = {}  # p -> first -> its chunk
    # Chunks that wait for a place: of a new prompt, or of another round.
    self._queue: list[Chunk] = []
    self.spent = collections.defaultdict[str, float](float)  # seconds of parts
    self.judged: list[futures.Future] = []  # of what `collect` judges
    self.decided: dict[int, tuple[Groups, bool]] = {}  # by p, of one group each
    self.given = self.kept = 0

  @contextlib.contextmanager
  def clock(self, part: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      self.spent[part] += time.perf_counter() - start

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next chunks; waits for rewards if the devices are idle."""
    self._settle()
    while not (more := self._next(room)) and idle and self.judged:
      self.do_others()
      with self.clock("score_wait"):
        futures.wait(self.judged, return_when=futures.FIRST_COMPLETED)
      self._settle()
    return more

  def gathered(self, chunks: Groups) -> tuple[list[Groups], list[Chunk]]:
    """Called by the thread with scored chunks: whole groups, further chunks."""
    whole: list[Groups] = []
    more: list[Chunk] = []
    for i in range(len(chunks.prompts.index)):
      chunk = jax.tree.map(lambda x, i=i: x[i : i + 1], chunks)
      p, first = int(chunk.prompts.index[0]), chunk.prompts.first
      here, asked = self._here.setdefault(p, {}), self._asked[p]
      here[0 if first is None else int(first[0])] = chunk
      size = self._plan.chunk
      if len(here) * size < asked:  # others of the round are missing
        continue
      ordered = [here[n] for n in sorted(here)]
      reward = np.concatenate([x.scores.reward[0] for x in ordered])
      self._asked[p] = self._plan.further(reward)
      more += [Chunk(p, n) for n in range(asked, self._asked[p], size)]
      if self._asked[p] == asked:
        whole.append(_whole(ordered, self._plan.n))
        del self._here[p], self._asked[p]
    return whole, more

  def publish(self, p: int, good: bool) -> None:
    """Called by the thread with every verdict."""

  def end(self) -> None:
    """Called when sampling has ended."""

  def do_others(self) -> None:
    with self.clock("meanwhile"):
      while self._others:
        self._others.pop()()

  def _next(self, room: int) -> Prompts | None:
    """At most this many chunks; prompts that are open come first."""
    while len(self._queue) < room and (p := self._new()) is not None:
      self._asked[p] = self._plan.chunk
      self._queue.append(Chunk(p, 0))
    chunks, self._queue = self._queue[:room], self._queue[room:]
    if not chunks:
      return None
    return with_first(self._prompts([c.p for c in chunks]), chunks)

  def _new(self) -> int | None:
    """The next candidate, if it is needed."""
    undecided = self.given - len(self.decided)
    over = self.given == len(self._candidates)
    if over or self.kept + undecided >= self._target:
      return None
    self.given += 1
    return int(self._candidates[self.given - 1])

  def _settle(self) -> None:
    """Decides the candidates whose rewards have arrived."""
    for future in [x for x in self.judged if x.done()]:
      self.judged.remove(future)
      decided, more = future.result()
      self._queue += more
      self.kept += sum(good for _, good in decided.values())
      self.decided |= decided


class SharedCandidates(Candidates):
  """The same, where every process samples some of the candidates.

  Candidate i is needed if fewer than `target` of those before it passed or may
  still pass. Once true this stays true, so that it does not matter who learns
  of a verdict when: in the end the same candidates are claimed. If each process
  had its share and waited for the others, sampling would take 1.07 to 1.26
  times as long (simulated: 8 and 64 hosts, 128 groups of 512 with a mean of
  6,000 of 15,360 tokens, of which 30 to 90 % pass).
  """

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._board = processes.Board(f"draw/{next(_DRAWS)}")
    self._place = {int(p): i for i, p in enumerate(self._candidates)}
    self._good: dict[int, bool] = {}  # by place, those of all processes

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """Chunks of what it claims; waits if idle while more may be needed."""
    while True:
      self._learn()
      self._settle()
      if more := self._next(room):
        return more
      if not idle or self.given == len(self._good):
        return None
      self.do_others()
      with self.clock("score_wait" if self.judged else "process_wait"):
        time.sleep(_LOOK_S)

  def publish(self, p: int, good: bool) -> None:
    self._board.write(self._place[p], str(int(good)))

  def end(self) -> None:
    """Every process then knows all candidates."""
    self._settle()
    sent = {
      p: (_without_padding(x), good) for p, (x, good) in self.decided.items()
    }
    for other in processes.gather(sent):
      self.decided |= {p: (_padded(x), good) for p, (x, good) in other.items()}
    self.kept = sum(good for _, good in self.decided.values())
    self._board.clear()

  def _learn(self) -> None:
    notes = self._board.read()
    self._good = {i: note == "1" for i, note in notes.items()}
    # Others have claimed these, perhaps unseen.
    self.given = max(self.given, *(i + 1 for i in notes), 0)

  def _new(self) -> int | None:
    """The next candidate that no other process has."""
    may_pass = sum(self._good.get(i, True) for i in range(self.given))
    while may_pass < self._target and self.given < len(self._candidates):
      self.given, may_pass = self.given + 1, may_pass + 1
      if self._board.claim(self.given - 1):
        return int(self._candidates[self.given - 1])
    return None


def _without_padding(group: Groups) -> tuple[Any, ...]:
  """A group for other processes: tokens of all rollouts behind each other."""
  out = jax.tree.map(np.asarray, group.rollouts)
  length, T = out.mask.sum(axis=2), out.mask.shape[2]
  real = length, T, out.tokens[out.mask], out.logp[out.mask]
  return group.prompts, group.scores, real, (out.truncated, out.slot_steps)


def _padded(sent: tuple[Any, ...]) -> Groups:
  """The group of which `_without_padding` made this."""
  prompts, scores, (length, T, tokens, logp), others = sent
  mask = np.arange(T) < length[..., None]

  def padded(real: np.ndarray) -> np.ndarray:
    whole = np.zeros(mask.shape, real.dtype)
    whole[mask] = real
    return whole

  out = Rollouts(padded(tokens), padded(logp), mask, *others)
  return Groups(prompts, out, scores)


# (free places, whether nothing is decoding) -> at most that many prompts; None
# if there is none now. None while nothing is decoding ends the sampling.
Feed = Callable[[int, bool], Prompts | None]
Sample = Callable[[Feed], Iterator[tuple[Prompts, Rollouts]]]


class TooManyInvalid(RuntimeError):
  """Verifiers failed on too many responses."""


@dataclasses.dataclass(frozen=True)
class SampledGroups:
  """All groups that a step generated, in candidate order."""

  groups: Groups
  kept: Bool[np.ndarray, " P"]
  target: int  # groups that were wanted
  # Seconds. rollout: sampling, without waits. score: work of the thread.
  # score_wait: devices waited for rewards. rollout_wait: the thread waited for
  # rollouts. process_wait: this process waited for the others.
  spent: dict[str, float]
  rollout_s: list[float]  # of each process: the slowest keeps all waiting

  def kept_groups(self, least: int = 1) -> Groups:
    """The groups that are kept; if too few, a multiple of `least` of them."""
    count = int(self.kept.sum())
    spare = count % least if count < self.target else 0
    first = np.flatnonzero(self.kept)[: count - spare]
    return jax.tree.map(lambda x: x[first], self.groups)

  def shortage(self) -> str | None:
    """Why there are fewer groups than were wanted; None if there are not."""
    if (kept := int(self.kept.sum())) >= self.target:
      return None
    scores, rest = self.groups.scores, ~self.kept
    values = np.unique(scores.reward[rest][scores.valid[rest]])
    cause, prompts = "config.filter.keep rejects the others", "easier or harder"
    if len(values) == 1:
      cause = f"all {'other ' if kept else ''}rewards are {values[0]:g}"
      cause += " (samples.jsonl shows responses)"
      prompts = "easier" if values[0] < 1.0 else "harder"
    return (
      f"only {kept} of {len(self.kept)} prompts are kept, {self.target} are "
      f"needed: {cause}; use {prompts} prompts, or raise "
      "config.filter.max_oversampling"
    )


def collect(
  sample: Sample,
  score: Callable[[Prompts, Rollouts], Scores],
  informative: Callable[[Groups], Bool[np.ndarray, " P"]],
  prompts: Callable[[Sequence[int]], Prompts],
  candidates: Sequence[int],
  *,
  target: int,
  plan: RoundPlan,
  meanwhile: Callable[[], None] = lambda: None,
) -> SampledGroups:
  """Draws candidates until `target` groups are kept, or there are no more.

  `meanwhile` is other work for the devices. It is called once: when sampling
  first waits for rewards, or at the end. Raises TooManyInvalid if verifiers
  failed on more than `MAX_INVALID` of responses. Yu et al. 2025 (DAPO),
  arXiv:2503.14476, section 3.2.
  """
  make = Candidates if processes.alone() else SharedCandidates
  pending = make(prompts, candidates, target, plan, meanwhile)

  def judge(prompts: Prompts, rollouts: Rollouts):
    """The groups that are whole now, whether each is kept; further chunks."""
    with pending.clock("score"):
      groups = Groups(prompts, rollouts, score(prompts, rollouts))
      whole, more = pending.gathered(groups)
      decided = {}
      for group in whole:
        p, good = int(group.prompts.index[0]), bool(informative(group)[0])
        decided[p] = group, good
        pending.publish(p, good)
      return decided, more

  begin = time.perf_counter()
  with futures.ThreadPoolExecutor(1) as thread:
    for done, rollouts in sample(pending.feed):
      pending.judged.append(thread.submit(judge, done, rollouts))
  pending.do_others()
  pending.end()
  took, spent = time.perf_counter() - begin, pending.spent
  # First, since groups without a verdict are not kept.
  check_invalid(
    one
    for group, _ in pending.decided.values()
    for one in group.scores.responses[group.rollouts.drawn]
  )
  ordered = [pending.decided[p] for p in candidates[: pending.given]]
  waits = "meanwhile", "score_wait", "process_wait"
  rollout = took - sum(spent[part] for part in waits)
  return SampledGroups(
    jax.tree.map(lambda *x: np.concatenate(x), *(x for x, _ in ordered)),
    np.array([good for _, good in ordered], bool),
    target,
    {
      "rollout": rollout,
      "score": spent["score"],
      "score_wait": spent["score_wait"],
      "rollout_wait": max(took - spent["score"], 0.0),
      "process_wait": spent["process_wait"],
    },
    processes.gather(rollout),
  )


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
