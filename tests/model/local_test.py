"""Tests of brorl_jax/model/local.py: a process of two, as seen by one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from messages import mentions
from small_policies import changed

from brorl_jax.model import local, sharding


def test_alone_nothing_changes():
  mesh = sharding.make_mesh(8, 1)
  assert local.mesh_of(mesh) is mesh
  params = {"w": jax.numpy.ones(3)}
  assert local.copied(params, mesh) is params


def test_a_row_is_not_divided(monkeypatch):
  mesh = sharding.make_mesh(2, 4)
  names = ("data", "model")
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  own = Mesh(mesh.devices[:1], names)
  monkeypatch.setattr(Mesh, "local_mesh", property(lambda _: own))
  assert local.mesh_of(mesh) is own
  half = Mesh(mesh.devices[:, :2], names)
  monkeypatch.setattr(Mesh, "local_mesh", property(lambda _: half))
  with pytest.raises(ValueError) as e:
    local.mesh_of(mesh)
  assert mentions(str(e.value), "model=4 ... mesh_model that divides")


@pytest.mark.parametrize("model", [1, 2])
def test_a_process_has_all_parameters_once(monkeypatch, model):
  """Devices 0 to 3 as one of two processes: shards of the other are dropped."""
  mesh = sharding.make_mesh(8 // model, model)
  params = changed(vocab=40).init(jax.random.key(0))
  spread = jax.device_put(params, sharding.param_shardings(params, mesh))
  own = Mesh(mesh.devices[: 4 // model], ("data", "model"))
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
