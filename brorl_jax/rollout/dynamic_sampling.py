"""Dynamic sampling: prompts are drawn until enough groups have a gradient.

Candidates are drawn in a fixed order, as many as are still needed, or probably
will be, and a rejected one is replaced at once. The step keeps the first that
pass and ends when these are known: what was begun behind the last of them is a
surplus, which is counted and dropped. What is kept depends only on rewards, not
on the order in which rollouts finish or are scored.

With a `max_age` candidates follow each other as fast as there is room. What has
tokens when the step ends, and none too old, is what the next one goes on with.

A prompt gets its rollouts in chunks, which may be on several devices, and maybe
in rounds. As rollout n depends on (seed, step, p, n) alone, all of these are
the rollouts of a fixed N.
"""

import collections
import concurrent.futures as futures
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax import types
from brorl_jax.many import processes
from brorl_jax.types import Chunk, Finished, Groups, Prompts, Rollouts, Scores

# Draws of this process, as many as of any other: a board for each.
_DRAWS = itertools.count()
# Of the seconds of a step, see `SampledGroups.spent`.
_PARTS = "rollout score score_wait rollout_wait process_wait".split()
_STOP = -1  # in place of a candidate: one of the processes is to stop
# How often a process with idle devices looks for verdicts of others.
_LOOK_S = 0.05
# Verdicts that the pass rate of the step before counts for: the first few of a
# step move the number of candidates in progress by 3 % each.
_USUAL = 32
# Of a step's candidates at least this share is expected to pass.
_LEAST = 1 / 8
# Steps of candidates that are begun, if they may cross it; by simulation of 64
# H100 (plan/step_time.py) 186 rollouts/s, 183 with 1.3, 171 with 2, 142 if none
# may. What crosses, read in one pass and not decoded again, would bring 188.
_AHEAD = 1.5
# Maximum share of a step's responses whose verifier may fail (time-out, crash).
# These say nothing about the policy, but many of them mean a broken verifier.
MAX_INVALID = 0.01


Made = tuple[Prompts, Rollouts]  # chunks that were sampled


class RoundPlan(NamedTuple):
  """Rounds of a prompt, and when it stops; a fixed n is one round."""

  after: tuple[int, ...]  # rollouts after each round, multiples of a chunk
  right: int = 0  # that suffice
  together: int = 0  # rollouts of a chunk; 0: those of the first round

  @property
  def chunk(self) -> int:
    """Rollouts of a prompt that are made in one place."""
    return self.together or self.after[0]

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


def with_first(prompts: Prompts, chunks: Sequence[Chunk]) -> Prompts:
  """The prompts of these chunks, and which of their rollouts to make."""
  first = np.array([chunk.first for chunk in chunks], np.int32)
  return dataclasses.replace(prompts, first=first)


def going_on(prompts: Prompts, made: Sequence[Rollouts]) -> Prompts:
  """Prompts whose rollouts go on from these, of one chunk each."""
  old = types.behind(made)
  both = np.stack([old.tokens, old.logp.view(np.int32)], axis=-1)
  begun = np.where(old.mask[..., None], both, -1).astype(np.int32)
  return dataclasses.replace(prompts, begun=begun)


def _joined(*parts: Any) -> Any:
  """Arrays of chunks of a prompt behind each other, in the order of n."""
  # Slot-steps are of the prompt, all others of its rollouts.
  join = lambda *x: np.concatenate(x, 1) if x[0].ndim > 1 else np.sum(x, axis=0)
  return jax.tree.map(join, *parts)


def _whole(rounds: Sequence[Groups], most: int) -> Groups:
  """One group of all its rounds; see `Rollouts.drawn`."""

  def padded(x: np.ndarray) -> np.ndarray:
    if x.ndim == 1 or x.shape[1] == most:
      return x
    # Zeros: no token, not valid. Of objects None.
    shape = (x.shape[0], most, *x.shape[2:])
    out = np.full(shape, None if x.dtype == object else 0, x.dtype)
    out[:, : x.shape[1]] = x
    return out

  every = [(x.rollouts, x.scores) for x in rounds]
  rollouts, scores = jax.tree.map(padded, _joined(*every))
  prompts = dataclasses.replace(rounds[0].prompts, first=None)
  return Groups(prompts, rollouts, scores)


class Enough(Exception):
  """What a feed raises when what is in progress is needed no more."""


@runtime_checkable
class Crossing(Protocol):
  """Between a step's candidates and devices whose rollouts may cross it."""

  times: dict[Chunk, float]  # at which chunks ended, in decode steps
  left: Finished  # at the end of sampling: all that has tokens

  def ends(self) -> float | None:
    """When the last that is needed had ended; None while it is unknown."""


# Finished chunks -> the same behind what an environment replied. Rollouts that
# go on are not `whole`.
Reply = Callable[[Prompts, Rollouts], Rollouts]


class Candidates:
  """Candidates of one step: drawn, being scored, and decided."""

  def __init__(
    self,
    prompts: Callable[[Sequence[int]], Prompts],
    candidates: Sequence[int],
    target: int,
    plan: RoundPlan,
    usual: float | None = None,
    before: Finished | None = None,
    stopping: Callable[[], bool] = lambda: False,
    max_age: int = 0,
    reply: Reply | None = None,
  ):
    self._prompts, self._candidates = prompts, candidates
    self._reply = reply
    self._stopping, self.stopped = stopping, False
    # Not those of another mesh, on which chunks have another size.
    of = (before or {}).items()
    self._old = {c: x for c, x in of if x.mask.shape[1] == plan.chunk}
    self.finished, self.before = dict[Chunk, Rollouts](), dict(self._old)
    self._age = max_age
    self.times, self.left = dict[Chunk, float](), dict[Chunk, Rollouts]()
    self._begun: Finished = {}  # of those before, what has not ended
    # Candidates that this step will need, and a part of the next. It is raised
    # by their verdicts alone, when all are known, and so depends on no clock.
    self._bound = math.ceil(_AHEAD * target / max(usual or 0, _LEAST))
    # Has chunks judged, in the thread; `collect` sets it.
    self.submit: Callable[[Prompts, Rollouts], futures.Future] | None = None
    self._target, self._plan = target, plan
    self._usual = usual
    self._asked: dict[int, int] = {}  # p -> rollouts asked for so far
    # p -> first -> the finished chunks of its round; and its rounds before.
    self._here: dict[int, dict[int, Rollouts]] = {}
    self._rounds: dict[int, list[Groups]] = {}
    # Chunks that wait for a place: of a new prompt, or of another round.
    self._queue: list[Chunk] = []
    self.spent = collections.defaultdict[str, float](float)  # seconds of parts
    self.judged: list[futures.Future] = []  # of what `collect` judges
    self.decided: dict[int, tuple[Groups, bool]] = {}  # by p, of one group each
    self.given = 0
    self._first: list[bool] = []  # whether each of the first candidates passed

  @contextlib.contextmanager
  def clock(self, part: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      self.spent[part] += time.perf_counter() - start

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next chunks; waits for rewards if the devices are idle.

    Raises Enough if it stops; without a max_age also when the first `target`
    that pass are known.
    """
    self._settle()
    while self.behind:
      self._wait()
    while not (more := self._next(room)) and idle and self.judged:
      self._wait()
    return more

  @property
  def behind(self) -> bool:
    """Whether much is being judged: sampling may have ended meanwhile. On a CPU
    episodes go on, and so decode together, at times that depend on no clock.
    """
    if self._reply is not None and self._usual is None:
      return bool(self.judged)
    return self._age > 0 and len(self.judged) > self._target // 4

  def _wait(self) -> None:
    """For a verdict."""
    with self.clock("score_wait"):
      futures.wait(self.judged, return_when=futures.FIRST_COMPLETED)
    self._settle()

  def suffices(self) -> int | None:
    """How many candidates, in order, have the first `target` that pass."""
    while len(self._first) < len(self._candidates):
      if (good := self._verdict(len(self._first))) is None:
        break
      self._first.append(good)
    passed = np.cumsum(self._first)
    if not len(passed) or passed[-1] < self._target:
      return None
    return int(np.argmax(passed >= self._target)) + 1

  def replied(self, made: Made) -> tuple[Made, list[Chunk]]:
    """Called by the thread with finished chunks: those whose episodes have all
    ended, and the others, which go on behind what an environment replied.
    """
    if self._reply is None:
      return made, []
    made = made[0], self._reply(*made)
    self.finished |= (found := types.by_chunk(*made))
    more = {c: x for c, x in found.items() if not x.whole.all()}
    self.before |= more
    ended = [i for i, chunk in enumerate(found) if chunk not in more]
    return jax.tree.map(lambda x: x[ended], made), [*more]

  def gathered(self, made: Made) -> list[Made]:
    """Called by the thread with finished chunks: the rounds that are whole now,
    those with equally many rollouts together.
    """
    whole: dict[int, list[Made]] = {}
    for one, rollouts in types.each(made):
      p, first = one.chunk
      here = self._here.setdefault(p, {})
      here[first] = rollouts
      n = len(here) * self._plan.chunk
      if self._made(p) + n < self._asked[p]:  # others of the round are missing
        continue
      ordered = [here[n] for n in sorted(self._here.pop(p))]
      whole.setdefault(n, []).append((one, _joined(*ordered)))
    return [types.behind(some) for some in whole.values()]

  def scored(self, round: Groups) -> tuple[list[Groups], list[Chunk]]:
    """Called by the thread with rounds: groups that stop, further chunks."""
    whole: list[Groups] = []
    more: list[Chunk] = []
    for one in types.each(round):
      p = int(one.prompts.index[0])
      before = self._rounds.setdefault(p, [])
      before.append(one)
      reward = np.concatenate([x.scores.reward[0] for x in before])
      further = self._plan.further(reward)
      if further > len(reward):
        more += self._ask(p, further)
      else:
        whole.append(_whole(self._rounds.pop(p), self._plan.n))
    return whole, more

  def ends(self) -> float | None:
    """See `Crossing`."""
    self._settle()
    count = self.suffices()
    return None if count is None else max(map(self._time, range(count)))

  def _time(self, i: int) -> float:
    """When the last chunk of candidate i ended; 0 before the step."""
    first = range(0, self._plan.n, self._plan.chunk)
    each = [Chunk(int(self._candidates[i]), n) for n in first]
    return max(self.times.get(chunk, 0.0) for chunk in each)

  def unfinished(self, count: int) -> Finished:
    """What of other candidates than the first `count` has tokens."""
    gone = {int(p) for p in self._candidates[:count]}
    every = self._old | {c: self._aged([c], x) for c, x in self.left.items()}
    age = lambda x: np.asarray(x.age) + x.mask  # in the next step
    return {
      c: dataclasses.replace(x, age=age(x))
      for c, x in sorted(every.items())
      if c.p not in gone and age(x).max() <= self._age
    }

  def _aged(self, chunks: Sequence[Chunk], made: Rollouts) -> Rollouts:
    """With the age of the tokens that these chunks went on from."""
    age = np.zeros(made.mask.shape, np.int8)
    for i, chunk in enumerate(chunks):
      if chunk in self._old:
        age[i] = np.asarray(self._old[chunk].age)[0]
    return dataclasses.replace(made, age=age)

  def _made(self, p: int) -> int:
    """Rollouts of the rounds of prompt p that are scored."""
    return sum(x.scores.reward.shape[1] for x in self._rounds.get(p, ()))

  def _ask(self, p: int, n: int) -> list[Chunk]:
    """The chunks that bring prompt p to n rollouts."""
    begin, self._asked[p] = self._asked.get(p, 0), n
    return [Chunk(p, first) for first in range(begin, n, self._plan.chunk)]

  def publish(self, p: int, good: bool) -> None:
    """Called by the thread with every verdict."""

  def end(self) -> int:
    """Called when sampling has ended: how many candidates count, in order."""
    self._settle()
    return self.suffices() or self.given

  def _next(self, room: int) -> Prompts | None:
    """At most this many chunks; prompts that are open come first."""
    self.stopped = self._stops()
    if self.stopped or (self.suffices() and not self._age):
      raise Enough
    while len(self._queue) < room and (p := self._new()) is not None:
      self._add(self._ask(p, self._plan.after[0]))
    # Those that go on, or those that begin.
    alike = lambda c: (c in self._begun) == (self._queue[0] in self._begun)
    chunks = [*itertools.takewhile(alike, self._queue[:room])]
    if not chunks:
      return None
    del self._queue[: len(chunks)]
    prompts = with_first(self._prompts([c.p for c in chunks]), chunks)
    if chunks[0] not in self._begun:
      return prompts
    return going_on(prompts, [self._begun[c] for c in chunks])

  def _stops(self) -> bool:
    return self._stopping()

  def _add(self, chunks: Sequence[Chunk]) -> None:
    """Queues chunks, but those that were sampled before are judged."""
    for chunk in chunks:
      made = self.before.pop(chunk, None)
      if made is not None and made.whole.all():
        self.add_finished(with_first(self._prompts([chunk.p]), [chunk]), made)
        continue
      self._queue.append(chunk)
      if made is not None:
        self._begun[chunk] = made

  def add_finished(self, prompts: Prompts, rollouts: Rollouts) -> None:
    """Has chunks judged that have ended."""
    assert self.submit is not None
    found = types.by_chunk(prompts, rollouts)
    if self._age:
      rollouts = self._aged([*found], rollouts)
    else:
      self.finished |= found
    self.judged.append(self.submit(prompts, rollouts))

  def _new(self) -> int | None:
    """The next candidate, if it is needed."""
    passed = [good for _, good in self.decided.values()]
    if self.given == len(self._candidates) or not self._wants(passed):
      return None
    self.given += 1
    return int(self._candidates[self.given - 1])

  def _wants(self, passed: Collection[bool]) -> bool:
    """Whether too few candidates will pass: of those that are in progress all
    that may, or as many as are expected, to the nearest whole number.
    """
    if self._age:  # places never wait, but behind all that a step may need
      good = lambda: sum(self._first[: self._bound])
      while len(self._first) >= self._bound and good() < self._target:
        self._bound += self._target
      return self.given < self._bound
    rate = 1.0
    if self._usual is not None:
      rate = (sum(passed) + _USUAL * self._usual) / (len(passed) + _USUAL)
    expected = sum(passed) + rate * (self.given - len(passed))
    return expected <= self._target - 0.5

  def _verdict(self, i: int) -> bool | None:
    """Whether candidate i passed; None if that is not known."""
    found = self.decided.get(int(self._candidates[i]))
    return found and found[1]

  def _settle(self) -> None:
    """Decides the candidates whose rewards have arrived."""
    for future in [x for x in self.judged if x.done()]:
      self.judged.remove(future)
      decided, more = future.result()
      self._add(more)
      self.decided |= decided


class SharedCandidates(Candidates):
  """The same, where every process samples some of the candidates.

  If each process had its share and waited for the others, sampling would take
  1.07 to 1.26 times as long (simulated: 8 and 64 hosts, 128 groups of 512 with
  a mean of 6,000 of 15,360 tokens, of which 30 to 90 % pass).
  """

  def __init__(
    self, *args: Any, board: Any = None, share: tuple[int, int] | None = None
  ):
    super().__init__(*args)
    self._board = board or processes.Board(f"draw/{next(_DRAWS)}")
    self._place = {int(p): i for i, p in enumerate(self._candidates)}
    self._good: dict[int, bool] = {}  # by place, those of all processes
    self._times: dict[int, float] = {}
    # Which of how many processes this is.
    self._share = share or (jax.process_index(), jax.process_count())
    if self._age:
      self._old = {c: x for c, x in self._old.items() if self._owns(c.p)}

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """Chunks of what it claims; waits if idle while more may be needed."""
    while self.behind:
      self._wait()
    while True:
      self._learn()
      self._settle()
      if more := self._next(room):
        return more
      every = len(self._candidates) if self._age else self.given
      if not idle or len(self._good) == every or self.suffices():
        return None
      with self.clock("score_wait" if self.judged else "process_wait"):
        time.sleep(_LOOK_S)

  def publish(self, p: int, good: bool) -> None:
    i = self._place[p]
    self._board.write(i, f"{good:d} {float(super()._time(i))}")

  def end(self) -> int:
    """Every process then has all candidates that count."""
    self._learn()
    self._settle()
    count = self.suffices() or self.given
    sent = list[tuple[Any, ...]]()
    for p, ((prompts, out, scores), good) in self.decided.items():
      if self._place[p] < count:
        packed = types.without_padding(out), out.mask.shape[2]
        sent.append((p, good, prompts, packed, scores))
    every = processes.gather(sent)
    for p, good, prompts, packed, scores in itertools.chain(*every):
      self.decided[p] = Groups(prompts, types.padded(*packed), scores), good
    self._board.clear()
    return count

  def _stops(self) -> bool:
    if self._stopping() and self._board.claim(_STOP):
      self._board.write(_STOP, "")  # which the next look finds
    return self._told

  def _learn(self) -> None:
    notes = self._board.read()
    self._told = notes.pop(_STOP, None) is not None
    both = {i: note.split() for i, note in notes.items()}
    self._good = {i: good == "1" for i, (good, _) in both.items()}
    self._times = {i: float(time) for i, (_, time) in both.items()}
    if not self._age:  # others have claimed these, perhaps unseen
      self.given = max(self.given, *(i + 1 for i in notes), 0)

  def _new(self) -> int | None:
    """The next candidate that no other process has."""
    every = len(self._candidates)
    while self.given < every and self._wants(self._good.values()):
      self.given += 1
      p = int(self._candidates[self.given - 1])
      if self._owns(p) if self._age else self._board.claim(self.given - 1):
        return p
    return None

  def _owns(self, p: int) -> bool:
    # Not by who comes first: what crosses a step depends on no clock.
    index, count = self._share
    return p % count == index

  def _time(self, i: int) -> float:
    return self._times[i]

  def _verdict(self, i: int) -> bool | None:
    return self._good.get(i)


# (free places, whether nothing is decoding) -> at most that many prompts; None
# if there is none now. None while nothing is decoding ends the sampling, and so
# does Enough at any time, for which it is also called without a place.
Feed = Callable[[int, bool], Prompts | None]
# A feed, and what it is of if rollouts may cross the step.
Sample = Callable[..., Iterator[Made]]


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
  surplus: int = 0  # prompts that were begun and not needed
  # What the next step goes on with; of this process.
  unfinished: Finished = dataclasses.field(default_factory=dict)

  def kept_groups(self, least: int = 1) -> Groups:
    """The groups that are kept; if too few, a multiple of `least` of them."""
    count = int(self.kept.sum())
    spare = count % least if count < self.target else 0
    first = np.flatnonzero(self.kept)[: count - spare]
    return jax.tree.map(lambda x: x[first], self.groups)

  def chunks(self, size: int) -> Finished:
    """All rollouts, each chunk by itself."""
    found: Finished = {}
    for prompt, one, _ in types.each(self.groups):
      for n in range(0, int(one.drawn.sum()), size):
        # Slot-steps are of the prompt: the first chunk has them.
        cut = lambda x, n=n: x[:, n : n + size] if x.ndim > 1 else x * (n == 0)
        found[Chunk(prompt.chunk.p, n)] = jax.tree.map(cut, one)
    return found

  def shortage(self) -> str | None:
    """Why there are fewer groups than were wanted; None if there are not."""
    if (kept := int(self.kept.sum())) >= self.target:
      return None
    scores, rest = self.groups.scores, ~self.kept
    values = np.unique(scores.reward[rest][scores.valid[rest]])
    cause, prompts = "config.filter.keep rejects the others", "easier or harder"
    if len(values) == 1:
      cause = f"all {'other ' if kept else ''}rewards are {values[0]:g}"
      said = scores.responses[rest][self.groups.rollouts.drawn[rest]]
      why = collections.Counter(x.verdict.reason for x in said).most_common(1)
      cause += "".join(f", most often: {k:.100}" for k, _ in why if k)
      cause += " (samples.jsonl shows responses)"
      prompts = "easier" if values[0] < 1.0 else "harder"
    return (
      f"only {kept} of {len(self.kept)} prompts are kept, {self.target} are "
      f"needed: {cause}; use {prompts} prompts, or raise "
      "config.filter.max_oversampling"
    )


Score = Callable[[Prompts, Rollouts], Scores]
Informative = Callable[[Groups], Bool[np.ndarray, " P"]]


def played(sample: Sample, reply: Reply, prompts: Prompts) -> Rollouts:
  """All episodes of these prompts, turn after turn of all of them."""
  every = [Chunk(int(p), 0) for p in prompts.index]
  left, made = with_first(prompts, every), dict[Chunk, Rollouts]()

  def feed(room: int, idle: bool) -> Prompts | None:
    nonlocal left
    some = jax.tree.map(lambda x: x[:room], left)
    left = jax.tree.map(lambda x: x[room:], left)
    return some if len(some.index) else None

  while len(left.index):
    for done, rollouts in sample(feed):
      made |= types.by_chunk(done, reply(done, rollouts))
    some = [i for i, c in enumerate(every) if not made[c].whole.all()]
    left = jax.tree.map(lambda x, some=some: x[some], prompts)
    if some:
      left = with_first(left, [every[i] for i in some])
      left = going_on(left, [made[every[i]] for i in some])
  return types.behind([made[c] for c in every])


def judge(
  pending: Candidates, score: Score, informative: Informative, *made: Any
) -> tuple[dict[int, tuple[Groups, bool]], list[Chunk]]:
  """The groups that finished chunks complete, by p, and whether each is kept;
  further chunks.
  """
  decided: dict[int, tuple[Groups, bool]] = {}
  with pending.clock("score"):
    ended, further = pending.replied(made)
    for some in pending.gathered(ended):
      whole, more = pending.scored(Groups(*some, score(*some)))
      further += more
      for group in whole:
        p, good = int(group.prompts.index[0]), bool(informative(group)[0])
        decided[p] = group, good
        pending.publish(p, good)
  return decided, further


def collect(
  sample: Sample,
  score: Score,
  informative: Informative,
  prompts: Callable[[Sequence[int]], Prompts],
  candidates: Sequence[int],
  *,
  target: int,
  plan: RoundPlan,
  usual: float | None = None,
  before: Finished | None = None,
  stopping: Callable[[], bool] = lambda: False,
  max_age: int = 0,
  reply: Reply | None = None,
) -> SampledGroups:
  """Draws candidates until `target` groups are kept, or there are no more.

  With `usual`, the share of candidates that passed in the step before, as many
  are in progress as will probably be needed; without it never more than are.
  Whole chunks that `before` has are not sampled again. When any process is
  `stopping` all raise Interrupted. With `max_age` the rollouts of other
  candidates cross the step, but no tokens that would be older in the next one.
  With `reply` rollouts are episodes, each of which ends when it adds nothing.
  Raises TooManyInvalid if verifiers failed on more than `MAX_INVALID` of
  responses. Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  make = Candidates if processes.alone() else SharedCandidates
  of = prompts, candidates, target, plan, usual, before, stopping, max_age
  pending = make(*of, reply)
  judged = functools.partial(judge, pending, score, informative)
  begin = time.perf_counter()
  with futures.ThreadPoolExecutor(1) as thread:
    pending.submit = functools.partial(thread.submit, judged)
    try:
      for done, rollouts in sample(pending.feed, *[pending][: bool(max_age)]):
        pending.add_finished(done, rollouts)
    except Enough:  # the verdicts that count are known, or being handed in
      thread.shutdown(cancel_futures=True)
    if max_age:  # what has ended since then belongs to the next step
      thread.shutdown(cancel_futures=True)
    pending.judged = [x for x in pending.judged if not x.cancelled()]
  if any(processes.gather(pending.stopped)):
    had = pending.before | pending.finished
    raise types.Interrupted((before or {}) if max_age else had)
  pending.before.clear()  # of prompts that are not needed
  count = pending.end()
  took, spent = time.perf_counter() - begin, pending.spent
  # First, since groups without a verdict are not kept.
  ordered = [pending.decided[p] for p in candidates[:count]]
  groups = types.behind([group for group, _ in ordered])
  check_invalid(groups.scores.responses[groups.rollouts.drawn])
  spent["rollout"] = took - (spent["score_wait"] + spent["process_wait"])
  spent["rollout_wait"] = max(took - spent["score"], 0.0)
  every = processes.gather((spent["rollout"], pending.given))
  return SampledGroups(
    groups,
    np.array([good for _, good in ordered], bool),
    target,
    {part: spent[part] for part in _PARTS},
    [seconds for seconds, _ in every],
    0 if max_age else max(given for _, given in every) - count,
    pending.unfinished(count) if max_age else {},
  )


def check_invalid(responses: Iterable[types.ScoredResponse]) -> None:
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
