"""How the counters of a run change: functions from `RunState` to `RunState`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.runs import lines
from brorl_jax.types import RunState


def from_json(saved: Any) -> RunState:
  """The result of `RunState.to_json` after JSON.

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
  norms = tuple(saved["grad_norms"])
  usual = {k: (int(n), x) for k, (n, x) in saved["usual"].items()}
  return RunState(**{**saved, "grad_norms": norms, "usual": usual})


def _is_saved(name: str, value: Any) -> bool:
  """Whether a field of a run state, as JSON has it, is of its type."""
  number = lambda x: type(x) in (int, float)
  if name == "beyond":
    return isinstance(value, Mapping) and all(
      type(v) is int for v in value.values()
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


def reset_reason(progress: RunState, *, every: int, stalled: int) -> str | None:
  """The reason to make the policy the reference now, or None.

  Args:
    progress: After the step and its evaluation.
    every: Steps between resets; 0: off.
    stalled: Reset after this many evaluations without a better score; 0: off.

  References:
    ProRL v2: every 200 to 500 steps, or when validation stalls.
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
