"""Updates; read by main/stages/learning.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Optim(Section):
  """Minibatches and AdamW."""

  minibatches: int = setting(
    2,
    "Optimizer updates per step, each on whole groups, for every N. BroRL "
    "states only that both of its runs have the same number; ProRL has 4.",
    source="unknown",
    phased=True,
  )
  rows: int = setting(
    32,
    "Rows of a block, at most. It holds distinct rollouts of one prompt, and "
    "padding. 0: 8, or as few as fit into memory.",
    phased=True,
  )
  blocks: int = setting(
    16,
    "Blocks per microbatch of the longest responses, a multiple of the rows of "
    "the mesh. 0: one for each row.",
    phased=True,
  )
  lr: float = setting(
    3e-4,
    "Learning rate after the warm-up. BroRL states only that it grows with "
    "the square root of the samples.",
    source="unknown",
    phased=True,
  )
  lr_samples: int = setting(
    0,
    "Samples per step for which lr is meant; the rate grows with the square "
    "root of sampling.samples / lr_samples (BroRL). 0: lr is used as it is.",
    unit="rollouts",
    source="stated",
    phased=True,
  )
  warmup: int = setting(
    5,
    "Updates at the start in which lr rises from 0.",
    unit="updates",
    phased=True,
  )
  b1: float = setting(0.9, "Decay of the first moment.", source="unknown")
  b2: float = setting(0.95, "Decay of the second moment.", source="unknown")
  eps: float = setting(
    1e-8, "Added to the square root of the second moment.", source="unknown"
  )
  weight_decay: float = setting(
    0.0,
    "AdamW's weight decay: an update subtracts lr x this x the weight.",
    source="unknown",
  )
  max_grad_norm: float = setting(
    1.0, "Norm above which gradients are scaled down.", source="unknown"
  )
  spike: float = setting(
    0.0,
    "Skip an update whose gradient's norm is this many standard deviations "
    "above the mean of the last 128, and twice that mean; 0: off. 6 is common.",
    unit="standard deviations",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "minibatches")
    for field in ("rows", "blocks"):
      good = getattr(self, field) >= 0
      yield field, good, "positive, or 0: it follows from the devices"
    yield "lr", self.lr > 0.0, "positive"
    yield from self.at_least(0, "warmup", "lr_samples")
    for field in ("b1", "b2"):
      good = 0.0 <= getattr(self, field) < 1.0
      yield field, good, "at least 0 and below 1"
    yield "eps", self.eps > 0.0, "positive"
    yield "weight_decay", self.weight_decay >= 0.0, "0 or positive"
    yield "spike", self.spike >= 0.0, "positive, or 0: off"
    yield "max_grad_norm", self.max_grad_norm > 0.0, "positive"
