"""Devices and their memory; read by main/commands/plan.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Devices(Section):
  """The mesh and its memory.

  Axis `data` splits prompts and rows; axis `model` splits heads and vocabulary.
  """

  mesh_data: int = setting(
    -1,
    "Number of devices along axis `data`, which splits prompts and rows; -1: "
    "all devices divided by mesh_model.",
  )
  mesh_model: int = setting(
    1,
    "Number of devices along axis `model`, which splits heads and vocabulary.",
  )
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
    good = self.mesh_data >= 1 or self.mesh_data == -1
    yield "mesh_data", good, "positive, or -1"
    yield from self.at_least(1, "mesh_model")
    good = self.memory_bytes >= 0
    yield "memory_bytes", good, "positive, or 0: ask the device"
