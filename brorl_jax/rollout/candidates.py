"""The candidates of one step: drawn, being scored, and decided.

`Candidates` are those of a single process. `Shared` are drawn from one list by
several processes. Whoever has room claims the next candidate if it is still
needed, makes all of its rollouts, and tells the others the verdict. Both sets
are those of one process. If each had its share and waited for the others,
sampling would take 1.07 to 1.26 times as long (simulated: 8 and 64 hosts, 128
groups of 512 with a mean of 6,000 of 15,360 tokens, of which .3 to .9 pass).
"""

import collections
import concurrent.futures as futures
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from brorl_jax.many import processes
from brorl_jax.rollout import rounds
from brorl_jax.rollout.rounds import Chunk, Gathered, Plan, with_first
from brorl_jax.types import Groups, Prompts, Rollouts, Scores

# Draws of this process, as many as of any other: a board for each.
_DRAWS = itertools.count()
# How often a process with idle devices looks for verdicts of others.
_LOOK_S = 0.05


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


class Judged(NamedTuple):
  """What follows from some scored chunks."""

  whole: Groups | None  # prompts that have all their rollouts
  good: Bool[np.ndarray, " P"]  # which of them are kept
  more: list[Chunk]  # of prompts that get another round


class Candidates:
  """Candidates of one step: drawn, being scored, and decided."""

  def __init__(
    self,
    prompts: Callable[[Sequence[int]], Prompts],
    candidates: Sequence[int],
    target: int,
    plan: Plan,
    meanwhile: Callable[[], None],
  ):
    self._prompts, self._candidates = prompts, candidates
    self._target, self._others = target, [meanwhile]
    self._gathered = Gathered(plan)
    # Chunks that wait for a place: of a new prompt, or of another round.
    self._queue: list[Chunk] = []
    self.clock = Clock()
    self.judged: list[futures.Future] = []  # of Judged
    self.decided: dict[int, tuple[Groups, bool]] = {}  # by p, of one group each
    self.given = self.kept = 0

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next chunks; waits for rewards if the devices are idle."""
    self._settle()
    while not (more := self._next(room)) and idle and self.judged:
      self.do_others()
      with self.clock("score_wait"):
        futures.wait(self.judged, return_when=futures.FIRST_COMPLETED)
      self._settle()
    return more

  def gathered(self, chunks: Groups) -> tuple[Groups | None, list[Chunk]]:
    """Called by the thread with scored chunks: whole groups, further chunks."""
    found: list[Groups] = []
    more: list[Chunk] = []
    for chunk in rounds.rows(chunks):
      out = self._gathered.add(int(chunk.prompts.index[0]), chunk)
      if isinstance(out, Groups):
        found.append(out)
      else:
        more += out
    if not found:
      return None, more
    return jax.tree.map(lambda *x: np.concatenate(x), *found), more

  def tell(self, whole: Groups | None, good: Bool[np.ndarray, " P"]) -> None:
    """Called by the thread with every verdict."""

  def end(self) -> None:
    """Called when sampling has ended."""

  def do_others(self) -> None:
    with self.clock("meanwhile"):
      while self._others:
        self._others.pop()()

  def _next(self, room: int) -> Prompts | None:
    """At most so many chunks; those of prompts that are open come first."""
    while len(self._queue) < room and (p := self._new()) is not None:
      self._queue.append(self._gathered.begin(p))
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
      whole, good, more = future.result()
      self._queue += more
      self.kept += int(good.sum())
      for group, one in zip(
        rounds.rows(whole) if whole else [], good, strict=True
      ):
        self.decided[int(group.prompts.index[0])] = group, bool(one)


class Shared(Candidates):
  """The same, where every process samples some of the candidates.

  Candidate i is needed if fewer than `target` of those before it passed or may
  still pass. Once true this stays true, so that it does not matter who learns
  of a verdict when: in the end the same candidates are claimed.
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

  def tell(self, whole: Groups | None, good: Bool[np.ndarray, " P"]) -> None:
    """Writes verdicts for the others."""
    for p, one in zip(whole.prompts.index if whole else [], good, strict=True):
      self._board.write(self._place[int(p)], str(int(one)))

  def end(self) -> None:
    """Every process then knows all candidates."""
    self._settle()
    mine = {p: (_Sent.of(x), good) for p, (x, good) in self.decided.items()}
    for other in processes.gather(mine):
      self.decided |= {p: (x.got(), good) for p, (x, good) in other.items()}
    self.kept = sum(good for _, good in self.decided.values())
    self._board.clear()

  def _learn(self) -> None:
    """Reads the verdicts of all."""
    notes = self._board.read()
    self._good = {i: note == "1" for i, note in notes.items()}
    # Others have claimed these, perhaps unseen.
    self.given = max(self.given, *(i + 1 for i in notes), 0)

  def _new(self) -> int | None:
    """The next candidate that nobody else has."""
    may_pass = sum(self._good.get(i, True) for i in range(self.given))
    while may_pass < self._target and self.given < len(self._candidates):
      self.given, may_pass = self.given + 1, may_pass + 1
      if self._board.claim(self.given - 1):
        return int(self._candidates[self.given - 1])
    return None


class _Sent(NamedTuple):
  """A group for the other processes, without padding."""

  group: tuple[Prompts, Scores]
  tokens: np.ndarray  # of all rollouts, one behind the other
  logp: np.ndarray
  length: np.ndarray  # of each
  limit: int  # T
  others: tuple[np.ndarray, np.ndarray]

  @classmethod
  def of(cls, group: Groups) -> "_Sent":
    out = jax.tree.map(np.asarray, group.rollouts)
    return cls(
      (group.prompts, group.scores),
      out.tokens[out.mask],
      out.logp[out.mask],
      out.mask.sum(axis=2),
      out.mask.shape[2],
      (out.truncated, out.slot_steps),
    )

  def got(self) -> Groups:
    """The group, as it was."""
    mask = np.arange(self.limit) < self.length[..., None]

    def padded(real: np.ndarray) -> np.ndarray:
      whole = np.zeros(mask.shape, real.dtype)
      whole[mask] = real
      return whole

    rollouts = Rollouts(
      padded(self.tokens), padded(self.logp), mask, *self.others
    )
    prompts, scores = self.group
    return Groups(prompts, rollouts, scores)
