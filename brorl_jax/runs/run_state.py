"""Counters of a run and its guards: functions from `RunState` to `RunState`.

Guards show that a run breaks or collapses. They see the run state and the
metrics of a step alone, so that a resumed run warns at the same steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from brorl_jax.config.run import Guard
from brorl_jax.runs import lines
from brorl_jax.types import Groups, RunState

_ENTROPY = "rollout/entropy"
_FIRST = 20  # steps whose mean is what is usual in a run
_NORMS = 128  # gradients whose norms are remembered
_FEW_NORMS = 20  # with fewer a spike cannot be told from the start of a run
# Gradients of a policy that learns grow: 2.1 after .7 in 28 steps of the quick
# start. So a spike is also far above the mean.
_LEAST_SPIKE = 2.0
_MEMORY = 0.9  # of the moving average of rewards, per step


def from_json(saved: Mapping[str, Any]) -> RunState:
  """The result of `RunState.to_json` after JSON.

  Raises Damaged if another version of the program saved it.
  """
  known = {field.name for field in dataclasses.fields(RunState)}
  if odd := sorted(saved.keys() ^ known):
    which = "the checkpoint was saved by another version of brorl_jax"
    only = f"only one of the two has {', '.join(odd)}"
    must = "use that version (git_commit in config.json)"
    raise lines.Damaged(f"{which}: {only}; {must}")
  norms = tuple(saved["grad_norms"])
  usual = {k: (n, x) for k, (n, x) in saved["usual"].items()}
  return RunState(**{**saved, "grad_norms": norms, "usual": usual})


def generated(progress: RunState, groups: Groups, kept: Any) -> RunState:
  """Adds what a step generated, and which of these groups it kept, [P]."""
  mask = groups.rollouts.mask
  return dataclasses.replace(
    progress,
    tokens=progress.tokens + int(mask.sum()),
    samples=progress.samples + int(mask[..., 0].sum()),
    drawn=progress.drawn + len(mask),
    passed=float(kept.mean()),
  )


def evaluated(progress: RunState, score: float) -> RunState:
  """Updates the best scores after an evaluation."""
  progress = dataclasses.replace(progress, score=score)
  if progress.peak is None or score > progress.peak:
    new = {"peak": score, "peak_reward": progress.reward}
    progress = dataclasses.replace(progress, **new)
  if progress.best is None or score > progress.best:
    return dataclasses.replace(progress, best=score, stalled=0)
  return dataclasses.replace(progress, stalled=progress.stalled + 1)


def reset_reason(progress: RunState, *, every: int, stalled: int) -> str | None:
  """The reason to make the policy the reference now, or None.

  After an evaluation: `every` steps have passed (0: off), or `stalled`
  evaluations had no better score (0: off). ProRL v2 resets every 200 to 500
  steps, or when validation stalls.
  """
  if every and progress.since_reset >= every:
    return f"{progress.since_reset} steps"
  if stalled and progress.stalled >= stalled:
    return f"no better score in {progress.stalled} evaluations"
  return None


def was_reset(progress: RunState) -> RunState:
  """After a reset: earlier scores no longer count."""
  return dataclasses.replace(
    progress, since_reset=0, resets=progress.resets + 1, best=None, stalled=0
  )


def learned(
  progress: RunState, norms: tuple[float, ...], *, bad: bool
) -> RunState:
  """After the updates of a step, with the norms of the gradients applied.

  `bad`: whether the step was starved or skipped an update.
  """
  norms = (*progress.grad_norms, *norms)[-_NORMS:]
  count = progress.bad + 1 if bad else 0
  return dataclasses.replace(progress, bad=count, grad_norms=norms)


def most_norm(deviations: float, norms: tuple[float, ...]) -> float:
  """Norm of a gradient above which it is a spike.

    max(mean + deviations * std, 2 mean) over the last updates

  With 0 deviations, or fewer than 20 updates, nothing is a spike.
  """
  if not deviations or len(norms) < _FEW_NORMS:
    return math.inf
  mean = statistics.fmean(norms)
  spread = statistics.pstdev(norms, mean)
  return max(mean + deviations * spread, _LEAST_SPIKE * mean)


class Alarm(NamedTuple):
  """A number of a step that is beyond its bound."""

  guard: str
  metric: str
  value: float
  bound: float
  steps: int  # in a row

  @property
  def text(self) -> str:
    above = "above" if self.value > self.bound else "below"
    return (
      f"{self.metric} = {self.value:.3g} is {above} {self.bound:.3g} "
      f"(config.guard.{self.guard})"
    )


def watched(
  c: Guard, progress: RunState, scalars: Mapping[str, float | None]
) -> tuple[RunState, list[Alarm]]:
  """The run state after a step, and every number that is beyond its bound."""
  steps = lambda guard: progress.beyond.get(guard, 0) + 1
  alarms = [Alarm(*x, steps(x[0])) for x in _beyond(c, progress, scalars)]
  beyond = {alarm.guard: alarm.steps for alarm in alarms}
  usual, reward = dict(progress.usual), scalars.get("reward/mean")
  count, mean = usual.get(_ENTROPY, (0, 0.0))
  entropy = scalars.get(_ENTROPY)
  if entropy is not None and count < _FIRST:
    usual[_ENTROPY] = count + 1, mean + (entropy - mean) / (count + 1)
  if reward is None:
    reward = progress.reward
  elif progress.reward is not None:
    reward = _MEMORY * progress.reward + (1.0 - _MEMORY) * reward
  new = {"usual": usual, "beyond": beyond, "reward": reward}
  return dataclasses.replace(progress, **new), alarms


def _beyond(
  c: Guard, p: RunState, scalars: Mapping[str, float | None]
) -> Iterator[tuple[str, str, float, float]]:
  entropy = scalars.get(_ENTROPY)
  if c.entropy_low and entropy is not None and _ENTROPY in p.usual:
    least = c.entropy_low * p.usual[_ENTROPY][1]
    if entropy < least:
      yield "entropy_low", _ENTROPY, entropy, least
  for guard, metric, most in (
    ("kl", "policy/kl_ref", c.kl),
    ("truncated", "rollout/truncated_fraction", c.truncated),
  ):
    value = scalars.get(metric)
    if most and value is not None and value > most:
      yield guard, metric, value, most
  if c.score_drop and p.score is not None and p.peak is not None:
    # The reward at the best score is unknown if that was before the first step.
    more = p.peak_reward is None or (p.reward or 0.0) > p.peak_reward
    if more and p.score < (least := p.peak - c.score_drop):
      yield "score_drop", "eval/pass_at_1", p.score, least


def ends(c: Guard, alarms: list[Alarm]) -> str | None:
  """Why the run shall end, None if it shall not."""
  for alarm in alarms:
    if c.end_after and alarm.steps >= c.end_after:
      return f"{alarm.text} for {alarm.steps} steps in a row"
  return None
