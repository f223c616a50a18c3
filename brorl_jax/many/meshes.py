"""The mesh of a run: `rows` of devices for prompts, several devices a row."""

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
  """How many devices there are along each axis; the axes form two pairs.

    rows    data x fsdp      prompts and rows of a batch are spread over both;
                             `fsdp` cuts the parameters too, `data` copies them
    within  tensor x expert  heads, vocabulary, feed-forward and experts of a
                             row are cut over both; key/value heads over
                             `tensor` alone, so that `expert` may be more

  Rows along `data` exchange gradients once per microbatch and nothing else:
  they are for slow links, between slices of TPUs or islands of GPUs.
  """

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
    return AbstractMesh(self.sizes, NAMES)

  def share(self, processes: int) -> "Axes":
    """The axes of one of several processes.

    Raises ValueError if a process would have a part of a group of devices, or
    copies of the parameters that it shares with another process.
    """
    each, left = divmod(self.rows, processes)
    if left or not each:
      need = f"tensor x expert = {self.within} devices compute a prompt"
      has = f"each of {processes} processes has {self.devices // processes}"
      must = "choose mesh_tensor x mesh_expert that divides this number"
      raise ValueError(f"mesh ({self}): {need} together, but {has}; {must}")
    fsdp = min(each, self.fsdp)
    if each % fsdp or self.fsdp % fsdp:
      raise ValueError(
        f"mesh ({self}): the {each} rows of each of {processes} processes "
        f"hold a copy of the parameters and part of another; choose a "
        f"mesh_fsdp that divides {each}, or is a multiple of it"
      )
    return dataclasses.replace(self, data=each // fsdp, fsdp=fsdp)

  def filled(self, devices: int) -> "Axes":
    """With fsdp = -1 as what the other axes leave of the devices."""
    if self.fsdp != -1:
      return self
    left = devices // (self.data * self.within)
    return dataclasses.replace(self, fsdp=max(left, 1))

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

  Raises ValueError if the devices do not fill the mesh, a process has no whole
  rows, or axis `data` does not go over the slices.
  """
  owner = lambda d: (_slice(d), d.process_index)
  devices = sorted(jax.devices(), key=owner)
  groups = [[*group] for _, group in itertools.groupby(devices, owner)]
  return over(groups, Axes(data, fsdp, tensor, expert))


def _slice(device: Any) -> int:
  """The slice of a TPU; one that is only described may name none."""
  return getattr(device, "slice_index", 0)


def over(groups: Sequence[Sequence[Any]], axes: Axes) -> Mesh:
  """A mesh of the devices of each process; raises ValueError as `make_mesh`.

  The devices of a process lie together: it samples on them alone.
  """
  first, count = groups[0][0], sum(map(len, groups))
  wanted = f"mesh ({axes})"
  axes = axes.filled(count)
  if axes.devices != count:
    why = f"does not fill the {count} devices that exist"
    raise ValueError(f"{wanted} {why}; leave mesh_fsdp at -1")
  share = axes.share(len(groups))
  on_tpu = first.platform == "tpu"
  slices = len({_slice(group[0]) for group in groups}) if on_tpu else 1
  if axes.data % slices:
    must = f"must go over the {slices} slices; choose mesh_data = {slices}"
    raise ValueError(f"{wanted}: axis data {must}")

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
  """The mesh of the first of several processes; ValueError as `Axes.share`."""
  share = of(mesh).share(processes)
  every = mesh.devices.reshape(-1, *mesh.devices.shape[2:])
  return _mesh(every[: share.rows], share)


def _mesh(rows: np.ndarray, axes: Axes) -> Mesh:
  auto = (AxisType.Auto,) * len(NAMES)
  return Mesh(rows.reshape(axes.sizes), NAMES, axis_types=auto)


def rows(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...]:
  """Axes that prompts are spread over, as XLA writes them: without axes of one
  device, because programs are compiled anew for what looks different.
  """
  return _written(mesh, ROWS, or_else="fsdp")


def within(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...]:
  """Axes that heads, vocabulary, feed-forward and experts are cut over."""
  return _written(mesh, WITHIN, or_else="tensor")


def _written(mesh, names: tuple[str, ...], *, or_else: str):
  many = tuple(name for name in names if mesh.shape[name] > 1)
  return many if len(many) > 1 else (*many, or_else)[0]
