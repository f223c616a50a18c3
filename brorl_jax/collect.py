"""Dynamic sampling: the groups of one step, as many as carry a gradient.

Candidates are drawn in a fixed order. As many are on the way as are still
needed: one that is rejected is replaced at once by the next, while the others
go on. So those that are kept, and those that were generated for them, are a
function of rewards alone: the first that pass, and all before the last of them,
whatever the order in which rollouts are done or judged.

Rewards are computed in a thread while the devices sample.
"""

import collections
import concurrent.futures as futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax.rl import filtering
from brorl_jax.types import Groups, Judged, Prompts, Rollouts, Scores

# See stream.py: it asks for prompts, and yields those that are done.
Feed = Callable[[int, bool], Prompts | None]
Sample = Callable[[Feed], Iterator[tuple[Prompts, Rollouts]]]


# Share of a step's responses whose verifier may fail. It is not evidence about
# the policy, but much of it is evidence about the verifiers.
MAX_INVALID = 0.01


class Starved(RuntimeError):
  """Dynamic sampling found too few prompts that carry a gradient."""


class Unjudged(RuntimeError):
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
class Drawn:
  """All groups that a step generated, in the order of candidates."""

  groups: Groups
  kept: Bool[np.ndarray, " P"]
  # rollout: until the last was done, without waiting. score: of the thread.
  # score_wait: devices had nothing to do before the next verdict. rollout_wait:
  # the thread had nothing to judge.
  spent: dict[str, float]

  def trained(self) -> Groups:
    """Those that are kept."""
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
) -> Drawn:
  """Draws candidates until `target` groups are kept.

  Args:
    sample: Makes rollouts of what it is fed.
    score: Judges them.
    informative: Which groups are kept.
    prompts: The prompts of some candidates.
    candidates: Their numbers p, in the order of drawing.
    target: Groups to keep.
    meanwhile: Work for the devices that may be done while nothing is sampled:
      called once, when sampling first waits for verdicts, or at the end.

  Raises:
    Starved: There were not enough candidates.
    Unjudged: Verifiers failed on more than `MAX_INVALID` of the responses.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  draw = _Draw(prompts, candidates, target, meanwhile)

  def judge(prompts: Prompts, rollouts: Rollouts):
    with draw.clock("score"):
      groups = Groups(prompts, rollouts, score(prompts, rollouts))
      return groups, informative(groups)

  begin = time.perf_counter()
  with futures.ThreadPoolExecutor(1) as thread:
    for done, rollouts in sample(draw.feed):
      draw.judged.append(thread.submit(judge, done, rollouts))
  draw.do_others()
  took, spent = time.perf_counter() - begin, draw.clock.spent
  # First, since groups that nobody could judge are not kept.
  check_judged(
    one for group, _ in draw.found.values() for one in group.scores.judged.flat
  )
  if draw.kept < target:
    raise Starved(
      f"only {draw.kept} of {draw.given} prompts are kept, {target} are "
      "needed: raise config.max_oversampling (or distinct_prompts), or train "
      "on prompts that are neither solved nor hopeless"
    )
  ordered = [draw.found[p] for p in candidates[: draw.given]]
  return Drawn(
    jax.tree.map(
      lambda *x: np.concatenate(x), *[group for group, _ in ordered]
    ),
    np.array([good for _, good in ordered], bool),
    {
      "rollout": took - spent["meanwhile"] - spent["score_wait"],
      "score": spent["score"],
      "score_wait": spent["score_wait"],
      "rollout_wait": max(took - spent["score"], 0.0),
    },
  )


class _Draw:
  """Candidates of one step: given to the sampler, being judged, decided."""

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
    self.found: dict[int, tuple[Groups, bool]] = {}  # by p, of one group each
    self.given = self.kept = 0

  def feed(self, room: int, idle: bool) -> Prompts | None:
    """The next candidates; waits for verdicts if nothing else is to be done."""
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
    undecided = self.given - len(self.found)
    count = min(room, self._target - self.kept - undecided)
    return self._candidates[self.given : self.given + count]

  def _settle(self) -> None:
    """Takes the verdicts that are there."""
    for one in [x for x in self.judged if x.done()]:
      self.judged.remove(one)
      groups, good = one.result()
      self.kept += int(good.sum())
      for i, p in enumerate(groups.prompts.index):
        group = jax.tree.map(lambda x, i=i: x[i : i + 1], groups)
        self.found[int(p)] = group, bool(good[i])


def check_judged(judged: Iterable[Judged]) -> None:
  """Raises Unjudged if the verifiers failed on more than `MAX_INVALID`."""
  every = [*judged]
  failed = [(one.task, one.verdict.reason) for one in every if not one.valid]
  if len(failed) <= MAX_INVALID * len(every):
    return
  (task, reason), count = collections.Counter(failed).most_common(1)[0]
  raise Unjudged(
    f"verifiers failed on {len(failed)} of {len(every)} responses, at most "
    f"{MAX_INVALID:.0%} may; {count} times on {task}: {reason}"
  )


def expected_pass_rates(
  reward: Float[np.ndarray, "P N"],
) -> dict[str, float | None]:
  """How many prompts binary rewards should keep, to read beside the pass rate.

  From the shares of right rollouts in these groups, which is too low on average
  (see `filtering.expected_pass_rate`); and with 16 rollouts of each instead,
  which is unbiased, null where there are fewer.
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
  """Both, of a prompt with 0 to N right rollouts: one shape for any prompts."""
  right = jnp.arange(N + 1)[:, None]
  predicted = lambda c: filtering.expected_pass_rate(c / N, N)
  at_16 = lambda c: filtering.pass_rate_at(16, c, N)
  of_all = lambda rate: np.asarray(jax.vmap(rate)(right))
  return of_all(predicted), of_all(at_16) if N >= 16 else None
