"""The theorem, measured on a run; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Theory(Section):
  """The prompts and responses of a step on which the theorem is measured."""

  prompts: int = setting(
    2,
    "Prompts per step; 0: the theorem is not measured. 2 x 16 answers of 6 "
    "tokens cost less than 2 % of a step.",
    unit="prompts",
  )
  responses: int = setting(16, "Most probable responses of each prompt.")
  tokens: int = setting(
    128,
    "Longer responses are left out. At 0.3 nats per token a response of 128 "
    "tokens has probability 2e-17 and cannot change a mean, but gradients of 2 "
    "x 16 responses of 15,360 tokens take 42 GB with preset 1p5b.",
    unit="tokens",
  )

  def rules(self) -> Iterator[Rule]:
    good = self.prompts >= 0
    yield "prompts", good, "positive, or 0: the theorem is not measured"
    yield from self.at_least(1, "responses", "tokens")
