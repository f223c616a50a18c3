"""The KL term and its reference; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Reference(Section):
  """Weight of the KL term, and when the policy becomes the reference."""

  kl_weight: float = setting(
    1e-4,
    "Weight of the KL term (k2). If it is 0 in all phases, no reference is "
    "kept. The released ProRL v2 scripts have 1e-4.",
    unit="per nat",
    source="unknown",
    phased=True,
  )
  reset_every: int = setting(
    300,
    "Steps after which the policy becomes the reference; 0: never. ProRL v2 "
    "has 200 to 500. The runs of 30 to 60 steps have no reset; those of the "
    "language models in presets.py have two.",
    unit="steps",
    source="unknown",
    phased=True,
  )
  reset_stalled: int = setting(
    0,
    "Reset after this many evaluations without a better score; 0: never.",
    phased=True,
  )
  reset_optimizer: bool = setting(
    False, "A reset also restarts moments and warm-up (ProRL).", phased=True
  )

  def rules(self) -> Iterator[Rule]:
    yield "kl_weight", self.kl_weight >= 0.0, "0 or positive"
    for field in ("reset_every", "reset_stalled"):
      good = getattr(self, field) >= 0
      yield field, good, "positive, or 0: never"
