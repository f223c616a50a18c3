"""Guards: what shows that a run breaks or collapses, and what is said of it.

All of it is a function of the run state and the metrics of a step, so that a
resumed run warns at the same steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from brorl_jax.config.run import Guard
from brorl_jax.types import RunState

_ENTROPY = "rollout/entropy"
_FIRST = 20  # steps whose mean is what is usual in a run
_NORMS = 128  # gradients whose norms are remembered
_FEW_NORMS = 20  # with fewer a spike cannot be told from the start of a run
# Gradients of a policy that learns grow: 2.1 after .7 in 28 steps of the quick
# start. So a spike is also far above the mean.
_LEAST_SPIKE = 2.0
_MEMORY = 0.9  # of the moving average of rewards, per step


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
  """Compares a step with the bounds.

  Returns:
    The run state after it, and every number that is beyond its bound.
  """
  alarms = []
  for guard, metric, value, low, high in _bounds(c, progress, scalars):
    if low <= value <= high:
      continue
    steps = progress.beyond.get(guard, 0) + 1
    bound = low if value < low else high
    alarms.append(Alarm(guard, metric, value, bound, steps))
  return (
    dataclasses.replace(
      progress,
      usual=_usual(progress, scalars),
      beyond={alarm.guard: alarm.steps for alarm in alarms},
      reward=_averaged(progress.reward, scalars.get("reward/mean")),
    ),
    alarms,
  )


def _bounds(
  c: Guard, progress: RunState, scalars: Mapping[str, float | None]
) -> Iterator[tuple[str, str, float, float, float]]:
  """Guard, metric, value and its bounds, for all that are known."""
  entropy = scalars.get(_ENTROPY)
  if c.entropy_low and entropy is not None and _ENTROPY in progress.usual:
    least = c.entropy_low * progress.usual[_ENTROPY][1]
    yield "entropy_low", _ENTROPY, entropy, least, math.inf
  for guard, metric, most in (
    ("kl", "policy/kl_ref", c.kl),
    ("truncated", "rollout/truncated_fraction", c.truncated),
  ):
    value = scalars.get(metric)
    if most and value is not None:
      yield guard, metric, value, -math.inf, most
  p = progress
  if c.score_drop and p.score is not None and p.peak is not None:
    # The reward at the best score is unknown if that was before the first step.
    more = p.peak_reward is None or (p.reward or 0.0) > p.peak_reward
    if more and p.score < (lowest := p.peak - c.score_drop):
      yield "score_drop", "eval/pass_at_1", p.score, lowest, math.inf


def _usual(
  progress: RunState, scalars: Mapping[str, float | None]
) -> dict[str, tuple[int, float]]:
  """The means of the first steps, with this one."""
  count, mean = progress.usual.get(_ENTROPY, (0, 0.0))
  value = scalars.get(_ENTROPY)
  if value is None or count == _FIRST:
    return dict(progress.usual)
  return {_ENTROPY: (count + 1, mean + (value - mean) / (count + 1))}


def _averaged(before: float | None, value: float | None) -> float | None:
  if value is None or before is None:
    return before if value is None else value
  return _MEMORY * before + (1.0 - _MEMORY) * value


def ends(c: Guard, alarms: list[Alarm]) -> str | None:
  """Why the run shall end, None if it shall not."""
  long = [a for a in alarms if c.end_after and a.steps >= c.end_after]
  if not long:
    return None
  return f"{long[0].text} for {long[0].steps} steps in a row"


def most_norm(deviations: float, norms: tuple[float, ...]) -> float:
  """Norm of a gradient above which it is a spike.

    max(mean + deviations * std, 2 mean) over the last updates

  Args:
    deviations: Standard deviations; 0: nothing is a spike.
    norms: Of the last updates that were applied; with fewer than 20 nothing is.
  """
  if not deviations or len(norms) < _FEW_NORMS:
    return math.inf
  mean = statistics.fmean(norms)
  spread = statistics.pstdev(norms, mean)
  return max(mean + deviations * spread, _LEAST_SPIKE * mean)


def learned(
  progress: RunState, norms: tuple[float, ...], *, bad: bool
) -> RunState:
  """After the updates of a step.

  Args:
    norms: Of the gradients that were applied.
    bad: Whether the step was starved or skipped an update.
  """
  return dataclasses.replace(
    progress,
    bad=progress.bad + 1 if bad else 0,
    grad_norms=(*progress.grad_norms, *norms)[-_NORMS:],
  )
