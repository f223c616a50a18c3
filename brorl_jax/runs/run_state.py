"""The part of a run's state that is not arrays: counters, resting prompts.

It is an immutable value: every function returns a new one. A checkpoint stores
it as JSON.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.runs import lines


@dataclasses.dataclass(frozen=True)
class RunState:
  """Counters and resting prompts after a step."""

  tokens: int = 0  # generated so far, including those of rejected prompts
  samples: int = 0
  drawn: int = 0  # candidates so far: the next position in the files
  shaped: int = 0  # steps counted by the schedule of the length reward
  # State of the reference policy.
  since_reset: int = 0  # steps since the policy became the reference
  resets: int = 0
  best: float | None = None  # best held-out score since the reset
  stalled: int = 0  # evaluations in a row without a better score
  # State of the guards, see guards.py.
  bad: int = 0  # steps in a row that were starved or skipped an update
  grad_norms: tuple[float, ...] = ()  # of the last updates that were applied
  usual: Mapping[str, tuple[int, float]] = dataclasses.field(
    default_factory=dict
  )  # metric -> first steps, and its mean over them
  beyond: Mapping[str, int] = dataclasses.field(
    default_factory=dict
  )  # guard -> steps in a row beyond its bound
  reward: float | None = None  # moving average of the mean reward
  score: float | None = None  # held-out, of the last evaluation
  peak: float | None = None  # the best of the whole run
  peak_reward: float | None = None  # `reward` at that time
  # By prompt, with data.distinct_prompts: rejections in a row, and the step at
  # which a resting prompt may be drawn again.
  streak: Mapping[int, int] = dataclasses.field(default_factory=dict)
  rests: Mapping[int, int] = dataclasses.field(default_factory=dict)
  # Right rollouts and all, of earlier visits, the older the less they count.
  seen: Mapping[int, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )
  # Most rollouts that a prompt may get, with sampling.allocation = 'stop': in
  # the next step, and in the last one; 0: sampling.n.
  most: int = 0
  most_before: int = 0

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @staticmethod
  def from_json(saved: Any) -> "RunState":
    """The result of `to_json` after JSON, where prompt indices are text.

    Raises:
      Damaged: A field or a value is not what a run saves.
    """
    if not isinstance(saved, Mapping):
      raise lines.Damaged("the checkpoint's run state is not a JSON object")
    known = {field.name for field in dataclasses.fields(RunState)}
    if odd := sorted(saved.keys() ^ known):
      raise lines.Damaged(
        f"the fields of the checkpoint's run state are not those that a run "
        f"saves: see {', '.join(odd)}"
      )
    for name, value in saved.items():
      if not _is_saved(name, value):
        raise lines.Damaged(
          f"{name!r} of the checkpoint's run state is not what a run saves"
        )
    numbered = {
      name: {int(k): v for k, v in saved[name].items()}
      for name in ("streak", "rests")
    }
    norms = tuple(saved["grad_norms"])
    usual = {k: (int(n), x) for k, (n, x) in saved["usual"].items()}
    seen = {int(p): (k, n) for p, (k, n) in saved["seen"].items()}
    more = {**numbered, "grad_norms": norms, "usual": usual, "seen": seen}
    return RunState(**{**saved, **more})


def _is_saved(name: str, value: Any) -> bool:
  """Whether a field of a run state, as JSON has it, is of its type."""
  if name in ("streak", "rests"):
    return isinstance(value, Mapping) and all(
      str(k).isdecimal() and type(v) is int for k, v in value.items()
    )
  number = lambda x: type(x) in (int, float)
  if name == "beyond":
    return isinstance(value, Mapping) and all(
      type(v) is int for v in value.values()
    )
  if name == "seen":
    return isinstance(value, Mapping) and all(
      str(p).isdecimal()
      and isinstance(of, Sequence)
      and len(of) == 2
      and all(map(number, of))
      for p, of in value.items()
    )
  if name == "usual":
    return isinstance(value, Mapping) and all(
      isinstance(v, Sequence)
      and len(v) == 2
      and type(v[0]) is int
      and number(v[1])
      for v in value.values()
    )
  if name == "grad_norms":
    return isinstance(value, Sequence) and all(map(number, value))
  if name in ("best", "reward", "score", "peak", "peak_reward"):
    return value is None or number(value)
  return type(value) is int


def generated(
  progress: RunState, *, tokens: int, samples: int, prompts: int
) -> RunState:
  """Adds what a step generated."""
  return dataclasses.replace(
    progress,
    tokens=progress.tokens + tokens,
    samples=progress.samples + samples,
    drawn=progress.drawn + prompts,
  )


def visited(
  progress: RunState,
  step: int,
  prompts: Sequence[int],
  kept: Sequence[bool],
  *,
  rest_after: int,
  rest_steps: int,
) -> RunState:
  """Updates which prompts rest: those that were rejected too often in a row.

  Args:
    progress: Before the step.
    step: The step.
    prompts: Indices of the prompts that it sampled.
    kept: Whether each prompt was kept.
    rest_after: Rejections in a row after which a prompt rests; 0: never.
    rest_steps: Steps for which it rests. If it is rejected again after that, it
      rests again.
  """
  if not rest_after:
    return progress
  streak = dict(progress.streak)
  rests = {p: until for p, until in progress.rests.items() if until > step}
  for p, good in zip(prompts, kept, strict=True):
    if good:
      streak.pop(p, None)
      continue
    streak[p] = min(streak.get(p, 0) + 1, rest_after)
    if streak[p] == rest_after:
      rests[p] = step + rest_steps + 1
  return dataclasses.replace(progress, streak=streak, rests=rests)


def remembered(
  progress: RunState,
  prompts: Sequence[int],
  right: Sequence[int],
  drawn: Sequence[int],
  *,
  forget: float,
) -> RunState:
  """Adds a visit of some prompts to what is known of their pass rates.

  Args:
    progress: Before the step.
    prompts: Indices of the prompts that it sampled.
    right: Right rollouts of each.
    drawn: All rollouts of each.
    forget: Factor on earlier visits.
  """
  seen = dict(progress.seen)
  for p, k, n in zip(prompts, right, drawn, strict=True):
    before = seen.get(p, (0.0, 0.0))
    seen[p] = (forget * before[0] + k, forget * before[1] + n)
  return dataclasses.replace(progress, seen=seen)


def resting(progress: RunState, step: int) -> frozenset[int]:
  """Prompts that a step must not draw."""
  return frozenset(p for p, until in progress.rests.items() if step < until)


def evaluated(progress: RunState, score: float) -> RunState:
  """Updates the best scores after an evaluation."""
  progress = dataclasses.replace(progress, score=score)
  if progress.peak is None or score > progress.peak:
    progress = dataclasses.replace(
      progress, peak=score, peak_reward=progress.reward
    )
  if progress.best is None or score > progress.best:
    return dataclasses.replace(progress, best=score, stalled=0)
  return dataclasses.replace(progress, stalled=progress.stalled + 1)


def reset_reason(
  progress: RunState,
  kl: float | None,
  *,
  every: int,
  above_kl: float,
  stalled: int,
) -> str | None:
  """The reason to make the policy the reference now, or None.

  Args:
    progress: After the step and its evaluation.
    kl: KL of policy and reference in this step, nats per token.
    every: Steps between resets; 0: off.
    above_kl: Reset above this KL; 0: off.
    stalled: Reset after this many evaluations without a better score; 0: off.

  References:
    ProRL v2: every 200 to 500 steps, when the KL spikes, or when validation
    stalls.
  """
  if every and progress.since_reset >= every:
    return f"{progress.since_reset} steps"
  if above_kl and kl is not None and kl > above_kl:
    return f"KL {kl:.3g} above {above_kl:g}"
  if stalled and progress.stalled >= stalled:
    return f"no better score in {progress.stalled} evaluations"
  return None


def was_reset(progress: RunState) -> RunState:
  """After a reset: earlier scores no longer count."""
  return dataclasses.replace(
    progress, since_reset=0, resets=progress.resets + 1, best=None, stalled=0
  )
