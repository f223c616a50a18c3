"""Tests of brorl_jax/model/local.py: a process of two, as seen by one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from small_policies import changed

from brorl_jax.many import meshes
from brorl_jax.model import local, sharding


def test_alone_nothing_changes():
  mesh = meshes.make_mesh(fsdp=8)
  assert local.mesh_of(mesh) is mesh
  params = {"w": jax.numpy.ones(3)}
  assert local.copied(params, mesh) is params


def test_a_process_has_its_own_mesh(monkeypatch):
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  own = Mesh(mesh.devices[:, :1], meshes.NAMES)
  monkeypatch.setattr(Mesh, "local_mesh", property(lambda _: own))
  assert local.mesh_of(mesh) is own


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_process_has_all_parameters_once(monkeypatch, tensor):
  """Devices 0 to 3 as one of two processes: shards of the other are dropped."""
  mesh = meshes.make_mesh(fsdp=8 // tensor, tensor=tensor)
  params = changed(vocab=40).init(jax.random.key(0))
  spread = jax.device_put(params, sharding.param_shardings(params, mesh))
  own = Mesh(mesh.devices[:, : 4 // tensor], meshes.NAMES)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  make = jax.make_array_from_single_device_arrays

  def mine(shape, place, shards):
    here = [s for s in shards if next(iter(s.devices())) in own.devices]
    return make(shape, place, here)

  monkeypatch.setattr(jax, "make_array_from_single_device_arrays", mine)
  got = local.copied(spread, own)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(got), strict=True):
    np.testing.assert_array_equal(a, b)
    assert b.sharding.mesh == own
