"""Dynamic sampling: prompts are drawn until enough groups have a gradient.

Candidate prompts are drawn in a fixed order. Never more are in progress than
are still needed. A rejected one is replaced at once by the next candidate while
the others continue. The step keeps the first candidates that pass, and
generates none after the last of them. Both sets depend only on rewards, not on
the order in which rollouts finish or are scored.

A thread computes rewards while the devices sample.

A prompt may get its rollouts in rounds, see rounds.py; several processes may
draw from one list, see candidates.py.
"""

import collections
import concurrent.futures as futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from brorl_jax.many import processes
from brorl_jax.rl import filtering
from brorl_jax.rollout.candidates import Candidates, Judged, Shared
from brorl_jax.rollout.rounds import Plan
from brorl_jax.types import Groups, Prompts, Rollouts, ScoredResponse, Scores

# As in stream.py, which asks a feed for prompts and yields the finished ones.
Feed = Callable[[int, bool], Prompts | None]
Sample = Callable[[Feed], Iterator[tuple[Prompts, Rollouts]]]


# Maximum share of a step's responses whose verifier may fail (time-out, crash).
# These say nothing about the policy, but many of them mean a broken verifier.
MAX_INVALID = 0.01


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
    """The groups that are kept; of too few, the first multiple of `least`."""
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
      "config.filter.max_oversampling or config.data.distinct_prompts"
    )


def collect(
  sample: Sample,
  score: Callable[[Prompts, Rollouts], Scores],
  informative: Callable[[Groups], Bool[np.ndarray, " P"]],
  prompts: Callable[[Sequence[int]], Prompts],
  candidates: Sequence[int],
  *,
  target: int,
  plan: Plan,
  meanwhile: Callable[[], None] = lambda: None,
) -> SampledGroups:
  """Draws candidates until `target` groups are kept, or there are no more.

  Args:
    sample: Makes rollouts of the prompts that a feed gives.
    candidates: Their numbers p, in the order of drawing.
    plan: How many rollouts each prompt gets, see rounds.py.
    meanwhile: Other work for the devices. Called once: when sampling first
      waits for rewards, or at the end.

  Raises:
    TooManyInvalid: Verifiers failed on more than `MAX_INVALID` of responses.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  make = Candidates if processes.alone() else Shared
  pending = make(prompts, candidates, target, plan, meanwhile)

  def judge(prompts: Prompts, rollouts: Rollouts) -> Judged:
    with pending.clock("score"):
      groups = Groups(prompts, rollouts, score(prompts, rollouts))
      whole, more = pending.gathered(groups)
      good = informative(whole) if whole else np.zeros(0, bool)
      pending.tell(whole, good)
      return Judged(whole, good, more)

  begin = time.perf_counter()
  with futures.ThreadPoolExecutor(1) as thread:
    for done, rollouts in sample(pending.feed):
      pending.judged.append(thread.submit(judge, done, rollouts))
  pending.do_others()
  pending.end()
  took, spent = time.perf_counter() - begin, pending.clock.spent
  # First, since groups that nobody could judge are not kept.
  check_invalid(
    one
    for group, _ in pending.decided.values()
    for one in group.scores.responses[group.rollouts.drawn]
  )
  ordered = [pending.decided[p] for p in candidates[: pending.given]]
  waits = "meanwhile", "score_wait", "process_wait"
  rollout = took - sum(spent[part] for part in waits)
  return SampledGroups(
    jax.tree.map(
      lambda *x: np.concatenate(x), *[group for group, _ in ordered]
    ),
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


def expected_pass_rates(groups: Groups) -> dict[str, float | None]:
  """The share of prompts that binary rewards are expected to keep.

  `pass_rate_predicted` uses the share of right rollouts in these groups, which
  is too low on average (see `filtering.expected_pass_rate`). `pass_rate_at_16`
  is unbiased, for groups of 16; null if a group has fewer rollouts.
  """
  right = groups.right.sum(axis=1).tolist()
  drawn = groups.rollouts.drawn.sum(axis=1).tolist()
  rates = [
    [table if table is None else table[c] for table in _pass_rates(n)]
    for c, n in zip(right, drawn, strict=True)
  ]
  predicted, at_16 = zip(*rates, strict=True)
  return {
    "sampling/pass_rate_predicted": float(np.mean(predicted)),
    "sampling/pass_rate_at_16": None
    if None in at_16
    else float(np.mean(at_16)),
  }


@functools.lru_cache
def _pass_rates(N: int) -> tuple[np.ndarray, np.ndarray | None]:
  """Both rates of a prompt with 0 to N right rollouts."""
  # A table of N + 1 entries: its shape does not change with the number of
  # prompts. An array per step compiled a program per step (.4 s and 30 MB).
  right = jnp.arange(N + 1)[:, None]
  predicted = lambda c: filtering.expected_pass_rate(c / N, N)
  at_16 = lambda c: filtering.pass_rate_at(16, c, N)
  # Under jit one program each; op by op there are 28, 10 ms each to load.
  of_all = lambda rate: np.asarray(jax.jit(jax.vmap(rate))(right))
  return of_all(predicted), of_all(at_16) if N >= 16 else None
