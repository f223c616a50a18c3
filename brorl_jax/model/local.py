"""The devices of one process, and parameters that all lie on them.

Rollouts need no other process, so each samples with a copy of its own.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from brorl_jax.model import sharding


def mesh_of(mesh: Mesh) -> Mesh:
  """The mesh of this process' own devices; the mesh itself if it has all."""
  return mesh if jax.process_count() == 1 else mesh.local_mesh


def copied(params: PyTree, mesh: Mesh) -> PyTree:
  """Parameters as they lie on the local mesh: each process has all of them.

  Args:
    params: Global arrays, spread over the devices of all processes.
    mesh: From `mesh_of`.
  """
  if jax.process_count() == 1:
    return params
  own = sharding.param_shardings(params, mesh)

  def mine(x: jax.Array, s: NamedSharding) -> jax.Array:
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, s, shards)

  return jax.tree.map(mine, spread(params, mesh)(params), own)


def spread(params: PyTree, mesh: Mesh) -> jax.stages.Wrapped:
  """The program of `copied`: to arrays that each process has the whole of.

  Args:
    params: Global arrays, or their shapes and places.
    mesh: From `mesh_of`.
  """
  devices = jax.tree.leaves(params)[0].sharding.mesh.devices
  apart = Mesh(
    devices.reshape(-1, *mesh.devices.shape), ("process", *mesh.axis_names)
  )
  own = sharding.param_shardings(params, mesh)
  place = lambda s: NamedSharding(apart, s.spec)
  return jax.jit(lambda x: x, out_shardings=jax.tree.map(place, own))
