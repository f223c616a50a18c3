"""Evaluations; read by main/commands/evaluate.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Eval(Section):
  """Held-out prompts, and how they are sampled.

  The defaults are those of the paper and of most published scores. They differ
  from training: a lower temperature, and the least likely 5 % are cut.
  """

  every: int = setting(10, "Steps between evaluations.", unit="steps")
  prompts: int = setting(
    60, "Held-out prompts per task.", unit="prompts", evaluated=True
  )
  n: int = setting(
    16, "Samples per held-out prompt.", source="stated", evaluated=True
  )
  temperature: float = setting(
    0.6, "0: greedy.", source="stated", evaluated=True
  )
  top_p: float = setting(0.95, "1: off.", source="stated", evaluated=True)

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "every", "prompts", "n")
    good = self.temperature >= 0.0
    yield "temperature", good, "positive, or 0: greedy"
    good = 0.0 < self.top_p <= 1.0
    yield "top_p", good, "above 0 and at most 1 (off)"
