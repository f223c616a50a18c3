"""Bounds of what is normal in a run; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Guard(Section):
  """When a run warns that it collapses, and when it ends.

  A warning is an event, a line on the terminal and the metric guard/alarms.
  Bounds with "times" are relative to the mean of the run's first 20 steps.
  """

  entropy_low: float = setting(
    0.1,
    "Warn below this times the usual entropy of the rollouts; 0: never. With "
    "answers of six tokens it went down to .3 in 30 steps, and with N = 16 to "
    ".2 in 60.",
    free=True,
  )
  entropy_high: float = setting(
    3.0,
    "Warn above this times the usual entropy; 0: never. A learning rate 1,000 "
    "times too high gave 3.9 after one step, 30 healthy steps at most 1.",
    free=True,
  )
  kl: float = setting(
    1.0,
    "Warn above this KL to the reference; 0: never. 24 to 60 healthy steps "
    "have up to .35, the learning rate above 7.",
    unit="nats per token",
    free=True,
  )
  length_low: float = setting(
    0.2, "Warn below this times the usual length; 0: never.", free=True
  )
  truncated: float = setting(
    0.8, "Warn above this share of cut rollouts; 0: never.", free=True
  )
  repeated: float = setting(
    0.5,
    "Warn if more than this share of the runs of 8 tokens of a rollout "
    "occurred in it before, on average; 0: never.",
    free=True,
  )
  answers_low: float = setting(
    0.05,
    "Warn if the mean number of distinct answers to a prompt, less 1, is below "
    "this times the usual one, less 1; 0: never.",
    free=True,
  )
  score_drop: float = setting(
    0.1,
    "Warn if the held-out score is this much below the best one while the mean "
    "reward is higher than it was then; 0: never. The 95 % interval of 480 "
    "prompts is .04.",
    free=True,
  )
  end_after: int = setting(
    0,
    "End the run if a number has been beyond its bound for so many steps in a "
    "row; 0: only warn. The step is saved before.",
    unit="steps",
    free=True,
  )

  def rules(self) -> Iterator[Rule]:
    for name in ("entropy_low", "length_low", "answers_low"):
      yield name, 0.0 <= getattr(self, name) < 1.0, "at least 0 and below 1"
    high = self.entropy_high
    yield "entropy_high", high == 0.0 or high > 1.0, "above 1, or 0: never"
    for name in ("truncated", "repeated", "score_drop"):
      yield name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1"
    yield from self.at_least(0, "kl", "end_after")
