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
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Bool

from brorl_jax.types import Groups, Prompts, Rollouts, Scores

# See stream.py: it asks for prompts, and yields those that are done.
Feed = Callable[[int, bool], Prompts | None]
Sample = Callable[[Feed], Iterator[tuple[Prompts, Rollouts]]]


class Starved(RuntimeError):
  """Dynamic sampling found too few prompts that carry a gradient."""


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

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  clock, found, judged = Clock(), {}, []
  given = kept = 0
  others = [meanwhile]
  begin = time.perf_counter()

  def judge(prompts: Prompts, rollouts: Rollouts):
    with clock("score"):
      groups = Groups(prompts, rollouts, score(prompts, rollouts))
      return groups, informative(groups)

  def settle() -> None:
    """Takes the verdicts that are there."""
    nonlocal kept
    for one in [x for x in judged if x.done()]:
      judged.remove(one)
      groups, good = one.result()
      kept += int(good.sum())
      for i, p in enumerate(groups.prompts.index):
        found[int(p)] = (
          jax.tree.map(lambda x, i=i: x[i : i + 1], groups),
          good[i],
        )

  def do_others() -> None:
    with clock("meanwhile"):
      while others:
        others.pop()()

  def feed(room: int, idle: bool) -> Prompts | None:
    nonlocal given
    settle()
    while not (more := wanted(room)) and idle and judged:
      do_others()
      with clock("score_wait"):
        futures.wait(judged, return_when=futures.FIRST_COMPLETED)
      settle()
    if not more:
      return None
    given += len(more)
    return prompts(more)

  def wanted(room: int) -> Sequence[int]:
    undecided = given - len(found)
    return candidates[given : given + min(room, target - kept - undecided)]

  with futures.ThreadPoolExecutor(1) as thread:
    for done, rollouts in sample(feed):
      judged.append(thread.submit(judge, done, rollouts))
  do_others()
  took = time.perf_counter() - begin
  if kept < target:
    raise Starved(
      f"only {kept} of {given} prompts have rewards that differ, {target} are "
      "needed: raise config.max_oversampling, or train on prompts that are "
      "neither solved nor hopeless"
    )
  spent, ordered = clock.spent, [found[p] for p in candidates[:given]]
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
