"""The theorem, measured on a run; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Theory(Section):
  """The prompts of a step on which the theorem is measured."""

  prompts: int = setting(
    2,
    "Prompts per step, each with its 16 most probable responses of at most 128 "
    "tokens; 0: the theorem is not measured. 2 x 16 answers of 6 tokens cost "
    "less than 2 % of a step.",
    unit="prompts",
  )

  def rules(self) -> Iterator[Rule]:
    good = self.prompts >= 0
    yield "prompts", good, "positive, or 0: the theorem is not measured"
