"""Devices and their memory; read by main/commands/plan.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Meshed(Section):
  """The mesh.

  A row of it is mesh_tensor x mesh_expert devices and computes its own prompts.
  """

  mesh_data: int = setting(
    1,
    "Copies of the training state, each over all devices of the other axes; "
    "with several slices of TPUs a multiple of their number.",
  )
  mesh_fsdp: int = setting(
    -1,
    "Rows that the training state of a copy is cut over; -1: as many as the "
    "devices make.",
  )
  mesh_tensor: int = setting(
    1,
    "Devices of a row that heads, key/value heads, vocabulary, feed-forward "
    "and experts are cut over.",
  )
  mesh_expert: int = setting(
    1,
    "The same but for key/value heads, so that a row may have more devices "
    "than there are of these.",
  )

  @property
  def mesh(self) -> dict[str, int]:
    """Axis -> devices along it."""
    return {
      name: getattr(self, f"mesh_{name}")
      for name in ("data", "fsdp", "tensor", "expert")
    }

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "mesh_data", "mesh_tensor", "mesh_expert")
    good = self.mesh_fsdp >= 1 or self.mesh_fsdp == -1
    yield "mesh_fsdp", good, "positive, or -1"


@dataclasses.dataclass(frozen=True)
class Devices(Meshed):
  """The mesh and its memory.

  A row of it is mesh_tensor x mesh_expert devices and computes its own prompts.
  """

  memory_bytes: int = setting(
    0,
    "Memory of one device; 0: ask the device. With a number, --mode=plan can "
    "plan for more devices than this machine has; it assumes accelerators.",
    unit="bytes",
  )
  remat: Literal["layer", "products", "nothing"] = setting(
    "layer",
    "What the backward pass recomputes. 'layer' keeps only the input of each "
    "layer; 'products' also keeps the results of matrix products; 'nothing' "
    "keeps everything. On a CPU 'products' is 5 to 10 % faster in float32.",
  )
  offload: Literal["nothing", "reference", "moments"] = setting(
    "nothing",
    "What stays in host memory between uses: the 'reference' policy, or with "
    "'moments' the optimizer's moments too.",
  )

  def rules(self) -> Iterator[Rule]:
    yield from super().rules()
    good = self.memory_bytes >= 0
    yield "memory_bytes", good, "positive, or 0: ask the device"
