"""Supervised training of a checkpoint; read by main/train.py.

Fields that training has too have the same names here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.config.run import Meshed, PolicyConfig
from brorl_jax.config.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Pairs(Section):
  """Prompts and responses."""

  files: tuple[str, ...] = setting(
    (),
    "Files, folders or hub datasets, in the formats of a run. A line has "
    "a prompt (or messages) and a response.",
  )
  heldout_files: tuple[str, ...] = setting(
    (),
    "Held-out files. (): one prompt in heldout_one_in of `files`, chosen by "
    "the same hash as in a run.",
  )
  heldout_one_in: int = setting(
    20, "One prompt in this many is held out, without heldout_files."
  )
  fields: str = setting(
    "",
    "Columns with other names: 'prompt:question' reads the prompt from column "
    "`question`.",
  )
  skip_bad: bool = setting(
    False,
    "Skip invalid lines and pairs that are longer than a row, and count them, "
    "instead of stopping.",
  )
  system: str = setting("", "System message of every prompt that has none.")

  def rules(self) -> Iterator[Rule]:
    yield from self.paths("files", "heldout_files")
    yield from self.at_least(2, "heldout_one_in")


@dataclasses.dataclass(frozen=True)
class Descent(Section):
  """Rows, updates and AdamW."""

  seed: int = setting(0, "Seed of the order of the pairs.")
  epochs: int = setting(2, "Passes over all pairs.")
  row_tokens: int = setting(
    2048,
    "Tokens per row. Pairs share rows; a row must hold the longest pair.",
    unit="tokens",
  )
  rows: int = setting(
    8,
    "Rows per microbatch, over all devices; they must fit in memory. A "
    "multiple of the rows of the mesh.",
  )
  microbatches: int = setting(
    4, "Microbatches per update; rows x microbatches decides the update."
  )
  lr: float = setting(
    1e-5,
    "Peak learning rate; falls to 0 along a cosine.",
    source="unknown",
  )
  warmup: int = setting(10, "Updates in which lr rises from 0.", unit="updates")
  b1: float = setting(0.9, "Decay of the first moment.", source="unknown")
  b2: float = setting(0.95, "Decay of the second moment.", source="unknown")
  eps: float = setting(
    1e-8, "Added to the square root of the second moment.", source="unknown"
  )
  weight_decay: float = setting(0.0, "Multiplied by lr.", source="unknown")
  max_grad_norm: float = setting(
    1.0, "Norm above which gradients are scaled down.", source="unknown"
  )

  def rules(self) -> Iterator[Rule]:
    yield "seed", 0 <= self.seed < 2**31, "0 to 2**31 - 1"
    yield from self.at_least(1, "epochs", "rows", "microbatches")
    yield from self.at_least(2, "row_tokens")
    yield from self.at_least(0, "warmup", "weight_decay")
    for field in ("lr", "eps", "max_grad_norm"):
      yield field, getattr(self, field) > 0.0, "positive"
    for field in ("b1", "b2"):
      good = 0.0 <= getattr(self, field) < 1.0
      yield field, good, "at least 0 and below 1"


@dataclasses.dataclass(frozen=True)
class Spread(Meshed):
  """The mesh; a row of it is mesh_tensor x mesh_expert devices."""

  remat: Literal["layer", "products", "nothing"] = setting(
    "layer", "What the backward pass recomputes, as in a run."
  )


@dataclasses.dataclass(frozen=True)
class Warmup:
  """Every hyperparameter of a supervised start."""

  policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
  data: Pairs = dataclasses.field(default_factory=Pairs)
  optim: Descent = dataclasses.field(default_factory=Descent)
  devices: Spread = dataclasses.field(default_factory=Spread)
