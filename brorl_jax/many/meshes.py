"""The four axes of a mesh, in two groups.

  rows    data x fsdp      prompts and rows of a batch are spread over both;
                           `fsdp` cuts the parameters too, `data` copies them
  within  tensor x expert  heads, vocabulary, feed-forward and experts of a row
                           are cut over both; key/value heads over `tensor`
                           alone, so that `expert` goes beyond their number

Groups of `data` exchange gradients once per microbatch and nothing else: they
are for the slow links, between slices of TPUs or islands of GPUs.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

ROWS = ("data", "fsdp")
WITHIN = ("tensor", "expert")
NAMES = (*ROWS, *WITHIN)


@dataclasses.dataclass(frozen=True)
class Axes:
  """How many devices there are along each axis."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  expert: int = 1

  @property
  def sizes(self) -> tuple[int, int, int, int]:
    return self.data, self.fsdp, self.tensor, self.expert

  @property
  def devices(self) -> int:
    return math.prod(self.sizes)

  @property
  def rows(self) -> int:
    """Groups of devices, each of which computes its own prompts."""
    return self.data * self.fsdp

  @property
  def within(self) -> int:
    """Devices of such a group."""
    return self.tensor * self.expert

  @property
  def row(self) -> "Axes":
    """One such group by itself."""
    return dataclasses.replace(self, data=1, fsdp=1)

  @property
  def abstract(self) -> AbstractMesh:
    """A mesh without devices."""
    return AbstractMesh(self.sizes, NAMES)

  def share(self, processes: int) -> "Axes":
    """The axes of one of some processes, each of which has whole groups.

    Raises:
      ValueError: A group lies in several of them, or a copy of the parameters
        and a part of another in one.
    """
    each, left = divmod(self.rows, processes)
    if left or not each:
      raise ValueError(
        f"mesh ({self}): a row of {self.within} devices lies in several of "
        f"{processes} processes; choose mesh_tensor x mesh_expert to divide "
        f"the {self.devices // processes} devices of each"
      )
    fsdp = min(each, self.fsdp)
    if each % fsdp or self.fsdp % fsdp:
      raise ValueError(
        f"mesh ({self}): a copy of {self.fsdp} rows lies in several of "
        f"{processes} processes; choose a mesh_fsdp that divides, or is "
        f"divided by, the {each} rows of each"
      )
    return dataclasses.replace(self, data=each // fsdp, fsdp=fsdp)

  def filled(self, devices: int) -> "Axes":
    """With fsdp = -1 as what the other axes leave of the devices.

    Raises:
      ValueError: A size is not positive.
    """
    others = self.data * self.within
    if min(self.data, self.tensor, self.expert) < 1 or (
      self.fsdp < 1 and self.fsdp != -1
    ):
      raise ValueError(f"mesh ({self}): sizes must be positive; fsdp may be -1")
    if self.fsdp != -1:
      return self
    return dataclasses.replace(self, fsdp=max(devices // others, 1))

  def __str__(self) -> str:
    sizes = zip(NAMES, self.sizes, strict=True)
    return ", ".join(f"{name}={size}" for name, size in sizes)


ONE = Axes()


def of(mesh: Mesh | AbstractMesh | None) -> Axes:
  """The axes of a mesh; one device if None."""
  return ONE if mesh is None else Axes(*(mesh.shape[n] for n in NAMES))


def make_mesh(
  *, data: int = 1, fsdp: int = -1, tensor: int = 1, expert: int = 1
) -> Mesh:
  """A mesh over all devices; `fsdp` = -1 takes what is left.

  Raises:
    ValueError: The devices do not fill the mesh, a process has no whole rows,
      or axis `data` does not go over the slices.
  """
  owner = lambda d: (_slice(d), d.process_index)
  devices = sorted(jax.devices(), key=owner)
  groups = [[*group] for _, group in itertools.groupby(devices, owner)]
  return over(groups, Axes(data, fsdp, tensor, expert))


def _slice(device: Any) -> int:
  """The slice of a TPU; one that is only described may name none."""
  return getattr(device, "slice_index", 0)


def over(groups: Sequence[Sequence[Any]], axes: Axes) -> Mesh:
  """A mesh of the devices of some processes, slice by slice.

  The devices of a process lie together: it samples on them alone.

  Raises:
    ValueError: As of `make_mesh`.
  """
  first, count = groups[0][0], sum(map(len, groups))
  wanted = f"mesh ({axes})"
  axes = axes.filled(count)
  if axes.devices != count:
    raise ValueError(
      f"{wanted} does not fill the {count} devices that exist; leave mesh_fsdp "
      "at -1"
    )
  share = axes.share(len(groups))
  on_tpu = first.platform == "tpu"
  slices = len({_slice(group[0]) for group in groups}) if on_tpu else 1
  if axes.data % slices:
    raise ValueError(
      f"{wanted}: axis data must go over the {slices} slices; choose "
      f"mesh_data = {slices}"
    )

  def placed(group: Sequence[Any]) -> np.ndarray:
    if on_tpu:  # neighbours of the mesh are neighbours of the machine
      return mesh_utils.create_device_mesh(
        share.sizes, group, allow_split_physical_axes=True
      )
    return np.array(group)

  rows = [
    placed(group).reshape(-1, axes.tensor, axes.expert) for group in groups
  ]
  return _mesh(np.concatenate(rows), axes)


def part(mesh: Mesh, processes: int) -> Mesh:
  """The mesh of the first of some processes.

  Raises:
    ValueError: A row lies in several of them.
  """
  share = of(mesh).share(processes)
  return _mesh(
    mesh.devices.reshape(-1, *mesh.devices.shape[2:])[: share.rows], share
  )


def _mesh(rows: np.ndarray, axes: Axes) -> Mesh:
  auto = (AxisType.Auto,) * len(NAMES)
  return Mesh(rows.reshape(axes.sizes), NAMES, axis_types=auto)


def rows(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...]:
  """Axes that prompts are spread over, as XLA writes them.

  Without axes of one device: programs are compiled anew for what looks
  different.
  """
  return _written(mesh, ROWS, or_else="fsdp")


def within(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...]:
  """Axes that heads, vocabulary, feed-forward and experts are cut over."""
  return _written(mesh, WITHIN, or_else="tensor")


def _written(mesh, names: tuple[str, ...], *, or_else: str):
  many = tuple(name for name in names if mesh.shape[name] > 1)
  return many if len(many) > 1 else (*many, or_else)[0]
