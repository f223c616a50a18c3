"""Tests of many/meshes.py: by hand, and with devices that are not here."""

import types

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from messages import refuses

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes


@pytest.mark.parametrize("sizes, shape", [
  (dict(), (1, 8, 1, 1)), (dict(data=2), (2, 4, 1, 1)),
  (dict(fsdp=4, tensor=2), (1, 4, 2, 1)),
  (dict(data=2, fsdp=-1, tensor=2, expert=2), (2, 1, 2, 2)),
  (dict(expert=8), (1, 1, 1, 8)),
])  # fmt: skip
def test_a_mesh_fills_the_devices(sizes, shape):
  mesh = meshes.make_mesh(**sizes)
  assert mesh.devices.shape == shape
  assert mesh.axis_names == ("data", "fsdp", "tensor", "expert")
  assert [*mesh.devices.flat] == jax.devices()
  assert {*mesh.axis_types} == {AxisType.Auto}
  assert meshes.of(mesh) == meshes.of(Axes(*shape).abstract) == Axes(*shape)


@pytest.mark.parametrize(
  "sizes",
  [(1, 3, 2, 1), (1, 2, 2, 1), (2, 8, 1, 1), (1, -1, 3, 1), (1, -1, 4, 4)],
)
def test_refuses_a_mesh_that_the_devices_do_not_fill(sizes):
  named = "mesh (data={}, fsdp={}, tensor={}, expert={})".format(*sizes)
  with refuses(ValueError, f"{named} does not fill the 8 devices"):
    meshes.make_mesh(**dict(zip(meshes.NAMES, sizes, strict=True)))


def test_what_a_mesh_has_by_hand():
  axes = Axes(data=2, fsdp=3, tensor=4, expert=5)
  assert (axes.rows, axes.within, axes.devices) == (6, 20, 120)
  assert axes.row == Axes(1, 1, 4, 5)
  assert str(axes) == "data=2, fsdp=3, tensor=4, expert=5"
  assert axes.filled(7) == axes
  assert Axes(2, -1, 4, 1).filled(64) == Axes(2, 8, 4, 1)
  assert meshes.of(None) == meshes.ONE == Axes(1, 1, 1, 1)


@pytest.mark.parametrize("axes, processes, want", [
  (Axes(1, 8), 4, Axes(1, 2)), (Axes(2, 4), 2, Axes(1, 4)),
  (Axes(2, 4), 4, Axes(1, 2)), (Axes(4, 2), 2, Axes(2, 2)),
  (Axes(4, 2, 2, 3), 8, Axes(1, 1, 2, 3)), (Axes(4, 3), 2, Axes(2, 3)),
])  # fmt: skip
def test_a_process_has_whole_rows(axes, processes, want):
  assert axes.share(processes) == want


@pytest.mark.parametrize("axes, processes, why", [
  (Axes(1, 4, 2), 8, "2 devices ... 8 processes ... 1 ... mesh_tensor"),
  (Axes(2, 3), 4, "1 devices ... 4 processes ... mesh_tensor"),
  (Axes(3, 4), 2, "the 6 rows ... 2 processes ... mesh_fsdp"),
])  # fmt: skip
def test_a_row_in_several_processes_is_refused(axes, processes, why):
  """Nor a share that is no block of the mesh: one copy and a half."""
  with refuses(ValueError, why):
    axes.share(processes)


class Device(types.SimpleNamespace):
  __hash__ = object.__hash__


def test_the_part_of_a_process_is_a_block_of_the_mesh():
  groups = [[Device(id=i, platform="cpu") for i in range(start, start + 4)]
    for start in range(0, 16, 4)]  # fmt: skip
  mesh = meshes.over(groups, Axes(2, 4, 2))
  assert [d.id for d in mesh.devices.flat] == [*range(16)]
  own = meshes.part(mesh, 4)
  assert meshes.of(own) == Axes(1, 2, 2)
  assert [d.id for d in own.devices.flat] == [0, 1, 2, 3]


def chips(slices, hosts, each):
  return [
    [
      Device(
        id=100 * s + 10 * h + i, platform="tpu", slice_index=s,
        process_index=s * hosts + h,
      )
      for i in range(each)
    ]
    for s in range(slices)
    for h in range(hosts)
  ]  # fmt: skip


def test_slices_lie_along_data_and_links_decide_in_a_host(monkeypatch):
  asked = []

  def place(shape, devices, *, allow_split_physical_axes):
    asked.append((shape, [d.id for d in devices]))
    assert allow_split_physical_axes
    return np.array(devices[::-1]).reshape(shape)

  monkeypatch.setattr(mesh_utils, "create_device_mesh", place)
  mesh = meshes.over(chips(2, 2, 4), Axes(data=2, fsdp=-1, tensor=2))
  assert meshes.of(mesh) == Axes(2, 4, 2)
  assert [shape for shape, _ in asked] == [(1, 2, 2, 1)] * 4
  assert [[d.id for d in half.flat] for half in mesh.devices] == [
    [3, 2, 1, 0, 13, 12, 11, 10], [103, 102, 101, 100, 113, 112, 111, 110],
  ]  # fmt: skip


@pytest.mark.parametrize(
  "devices, axes", [((2, 2, 4), Axes(fsdp=16)), ((2, 3, 2), Axes(3, 4))]
)
def test_copies_are_a_multiple_of_the_slices(devices, axes):
  with refuses(ValueError, "data ... the 2 slices ... mesh_data = 2"):
    meshes.over(chips(*devices), axes)


def test_all_devices_come_by_slice_and_process(monkeypatch):
  every = [d for group in chips(2, 2, 2) for d in group]
  shuffled = [every[i] for i in (5, 0, 2, 7, 1, 4, 3, 6)]
  monkeypatch.setattr(jax, "devices", lambda: shuffled)
  asked = []
  real = meshes.over
  here = [jax.local_devices()[:1]]
  monkeypatch.setattr(
    meshes, "over", lambda *given: (asked.append(given), real(here, Axes()))[1]
  )
  meshes.make_mesh(data=2, tensor=2)
  ((groups, axes),) = asked
  assert axes == Axes(2, -1, 2)
  assert [{d.id for d in group} for group in groups] == [
    {0, 1}, {10, 11}, {100, 101}, {110, 111},
  ]  # fmt: skip


@pytest.mark.parametrize("axes, rows, within", [
  (Axes(), "fsdp", "tensor"), (Axes(data=2), "data", "tensor"),
  (Axes(fsdp=2, tensor=3), "fsdp", "tensor"),
  (Axes(2, 2, 1, 3), ("data", "fsdp"), "expert"),
  (Axes(1, 1, 2, 3), "fsdp", ("tensor", "expert")),
])  # fmt: skip
def test_axes_of_one_device_are_not_written(axes, rows, within):
  assert meshes.rows(axes.abstract) == rows
  assert meshes.within(axes.abstract) == within
