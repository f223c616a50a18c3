"""Bounds of what is normal in a run; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Guard(Section):
  """When a run warns that it collapses, and when it ends.

  A warning is an event, a line on the terminal and the metric guard/alarms. The
  usual entropy is the mean of the run's first 20 steps.
  """

  entropy_low: float = setting(
    0.1,
    "Warn below this times the usual entropy of the rollouts; 0: never. With "
    "answers of six tokens it went down to .3 in 30 steps, and with N = 16 to "
    ".2 in 60.",
    free=True,
  )
  kl: float = setting(
    1.0,
    "Warn above this KL to the reference; 0: never. 24 to 60 healthy steps "
    "have up to .35, the learning rate above 7.",
    unit="nats per token",
    free=True,
  )
  truncated: float = setting(
    0.8, "Warn above this share of cut rollouts; 0: never.", free=True
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
    good = 0.0 <= self.entropy_low < 1.0
    yield "entropy_low", good, "at least 0 and below 1"
    for name in ("truncated", "score_drop"):
      yield name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1"
    yield from self.at_least(0, "kl", "end_after")
