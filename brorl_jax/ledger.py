"""What a run remembers beside arrays: counters, and prompts that rest.

A value: every function returns a new one. A checkpoint holds it as JSON.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


class Newer(ValueError):
  """A newer version wrote it."""


@dataclasses.dataclass(frozen=True)
class Ledger:
  """After a step."""

  tokens: int = 0  # generated so far, those of rejected prompts included
  samples: int = 0
  drawn: int = 0  # candidates so far: where files of examples go on
  shaped: int = 0  # steps that the schedule of the length reward has counted
  # The reference policy.
  since_reset: int = 0  # steps since it was the policy
  resets: int = 0
  best: float | None = None  # held-out score since then
  stalled: int = 0  # evaluations since the best one
  # Prompts that keep their number over a run.
  streak: Mapping[int, int] = dataclasses.field(default_factory=dict)
  rests: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @staticmethod
  def from_json(saved: Mapping[str, Any]) -> "Ledger":
    """What `to_json` gave, after JSON: numbers of prompts are text there.

    Raises:
      Newer: It has fields that this version does not know.
    """
    known = {field.name for field in dataclasses.fields(Ledger)}
    if more := sorted(saved.keys() - known):
      raise Newer(
        f"the checkpoint's ledger has {', '.join(more)}, which this version "
        "does not know: it was written by a newer version, which goes on with "
        "it"
      )
    numbered = {
      name: {int(k): v for k, v in saved.get(name, {}).items()}
      for name in ("streak", "rests")
    }
    return Ledger(**{**saved, **numbered})


def generated(
  ledger: Ledger, *, tokens: int, samples: int, prompts: int
) -> Ledger:
  """After so many more."""
  return dataclasses.replace(
    ledger,
    tokens=ledger.tokens + tokens,
    samples=ledger.samples + samples,
    drawn=ledger.drawn + prompts,
  )


def visited(
  ledger: Ledger,
  step: int,
  prompts: Sequence[int],
  kept: Sequence[bool],
  *,
  rest_after: int,
  rest_steps: int,
) -> Ledger:
  """After visits to prompts: those that gave nothing too often rest.

  Args:
    ledger: Before.
    step: Of the visits.
    prompts: Their numbers.
    kept: Whether each was kept.
    rest_after: Visits in a row without, after which a prompt rests; 0: never.
    rest_steps: Steps that it rests for. Its next visit decides again: one more
      without, and it rests as long once more.
  """
  if not rest_after:
    return ledger
  streak = dict(ledger.streak)
  rests = {p: until for p, until in ledger.rests.items() if until > step}
  for p, good in zip(prompts, kept, strict=True):
    if good:
      streak.pop(p, None)
      continue
    streak[p] = min(streak.get(p, 0) + 1, rest_after)
    if streak[p] == rest_after:
      rests[p] = step + rest_steps + 1
  return dataclasses.replace(ledger, streak=streak, rests=rests)


def resting(ledger: Ledger, step: int) -> frozenset[int]:
  """Prompts that a step does not draw."""
  return frozenset(p for p, until in ledger.rests.items() if step < until)


def evaluated(ledger: Ledger, score: float) -> Ledger:
  """After an evaluation on held-out prompts."""
  if ledger.best is None or score > ledger.best:
    return dataclasses.replace(ledger, best=score, stalled=0)
  return dataclasses.replace(ledger, stalled=ledger.stalled + 1)


def reset_reason(
  ledger: Ledger,
  kl: float | None,
  *,
  every: int,
  above_kl: float,
  stalled: int,
) -> str | None:
  """Why the reference policy is to be set to the policy now, or None.

  Args:
    ledger: After the step and its evaluation.
    kl: Distance of policy and reference in this step, nats per token.
    every: Steps between resets; 0: not for that.
    above_kl: Largest distance; 0: not for that.
    stalled: Evaluations in a row without a better score; 0: not for that.

  References:
    ProRL v2: every 200 to 500 steps, when the KL spikes, or when validation
    stalls.
  """
  if every and ledger.since_reset >= every:
    return f"{ledger.since_reset} steps"
  if above_kl and kl is not None and kl > above_kl:
    return f"KL {kl:.3g} above {above_kl:g}"
  if stalled and ledger.stalled >= stalled:
    return f"no better score in {ledger.stalled} evaluations"
  return None


def was_reset(ledger: Ledger) -> Ledger:
  """After a reset: scores before it do not count any more."""
  return dataclasses.replace(
    ledger, since_reset=0, resets=ledger.resets + 1, best=None, stalled=0
  )
