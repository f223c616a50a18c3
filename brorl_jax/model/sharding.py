"""Where every array lives: two tables, and how shards become whole and back.

Rollouts need no other process: each samples with its own copy of the
parameters, which lies on its devices alone.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)
from jaxtyping import Array, PyTree

from brorl_jax.many import meshes

# Module of a layer -> meaning of the axes that it sums over, and of its own.
_MODULES = (
  ("q", ("width",), ("heads", "head_size")),
  ("[kv]", ("width",), ("kv_heads", "head_size")),
  ("o", ("heads", "head_size"), ("width",)),
  ("gate|up", ("width",), ("mlp",)),
  ("down", ("mlp",), ("width",)),
)
# Parameter path -> the meaning of each of its axes. One matches.
PARAM_AXES = (
  (r"embed/embedding", ("vocab", "width")),
  (r"blocks/ln_[qk]/scale", ("layer", "head_size")),
  (r"blocks/ln_(attn|mlp)\w*/scale", ("layer", "width")),
  *((f"blocks/({m})/kernel", ("layer", *x, *y)) for m, x, y in _MODULES),
  *((f"blocks/({m})/bias", ("layer", *y)) for m, _, y in _MODULES),
  *((f"blocks/({m})/lora_a", ("layer", *x, "rank")) for m, x, _ in _MODULES),
  *((f"blocks/({m})/lora_b", ("layer", "rank", *y)) for m, _, y in _MODULES),
  (r"blocks/router/kernel", ("layer", "width", "router")),
  (
    r"blocks/expert_(gate|up)/kernel",
    ("layer", "expert", "width", "expert_mlp"),
  ),
  (r"blocks/expert_down/kernel", ("layer", "expert", "expert_mlp", "width")),
  (r"ln_final/scale", ("width",)),
  (r"head/kernel", ("width", "vocab")),
)

# Meaning of an axis -> mesh axis, or WITHIN: all axes that cut a row, see
# `meshes`. Change the strategy here, nowhere else.
WITHIN = "within"
MESH_AXIS = {
  "vocab": WITHIN,
  "heads": WITHIN,
  "kv_heads": "tensor",  # few: axis `expert` goes beyond their number
  "mlp": WITHIN,
  "expert": WITHIN,  # each device computes its own experts
  "expert_mlp": None,
  "router": None,  # every device scores all experts
  "width": "fsdp",  # fully sharded: gathered just before use
  "head_size": None,
  "rank": None,
  "layer": None,  # scanned over
}

# The mesh axis, or axes, that each axis of an array is cut over.
Cut = tuple[str | tuple[str, ...] | None, ...]

HOST = "pinned_host"  # JAX's name for the memory of a device's machine


def param_shardings(params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
  """A `NamedSharding` for every parameter, in the same nested dict. Raises
  ValueError if a parameter has no rule, or does not divide by it.
  """

  def place(path, leaf) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = _axes(name, leaf)
    if len(axes) != len(leaf.shape):
      raise ValueError(f"{name} {leaf.shape} does not have axes {axes}")
    spec = PartitionSpec(*_cut(axes, meshes.within(mesh)))
    for size, axis in zip(leaf.shape, spec, strict=True):
      over = (axis,) if isinstance(axis, str) else axis or ()
      devices = math.prod(mesh.shape[a] for a in over)
      if size % devices:
        named = " x ".join(f"mesh_{a}" for a in over)
        raise ValueError(
          f"{name} {leaf.shape}: {size} does not divide over the {devices} "
          f"devices of mesh axis {axis!r}; the nearest that does is {named} = "
          f"{math.gcd(size, devices)}"
        )
    # As XLA writes it: programs are compiled anew for what looks different.
    while spec and spec[-1] is None:
      spec = PartitionSpec(*spec[:-1])
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, params)


def over_rows(
  f: Callable, params: PyTree, mesh: Mesh | None
) -> Callable[..., PyTree]:
  """`f` of the parameters, run by each row of devices on its own prompts.

  By hand, because XLA left to itself cuts the sums of a product, sends
  activations of all tokens from device to device, and adds whole gradients
  where a device needs its shard.
  `f` maps (parameters, *arrays) to arrays and reads parameters through
  `gathered`. The first axis of all arrays is spread, a multiple of the rows.
  """
  if mesh is None or meshes.of(mesh).rows == 1:
    return functools.partial(f, params)
  # What cuts a row stays with XLA: specs name what is cut by hand. So does an
  # axis of one device, or gradients would be summed over it, which copies them.
  by_hand = {name for name in meshes.ROWS if mesh.shape[name] > 1}
  cut = lambda place: PartitionSpec(
    *(axis if axis in by_hand else None for axis in place.spec)
  )
  places = jax.tree.map(cut, param_shardings(params, mesh))
  spread = PartitionSpec(meshes.rows(mesh))
  each = lambda params, x: f(params, *x)
  inside = on_devices(each, (places, spread), spread, by_hand, mesh)
  return lambda *x: inside(params, x)


def on_devices(
  f: Callable, places: Any, out: Any, names: Iterable[str], mesh: Mesh | None
) -> Callable:
  """`f` on every device for its own part of these axes; others stay with XLA.

  `mesh` counts only outside of such a function, which has one already.
  """
  if jax.sharding.get_abstract_mesh().axis_names:
    mesh = None
  # The check would refuse loops that start from the same zeros everywhere.
  how: Any = dict(mesh=mesh, axis_names=set(names), check_vma=False)
  return jax.shard_map(f, in_specs=places, out_specs=out, **how)


def gathered(
  params: PyTree, mesh: Mesh | None, dtype: str, *, inside: str = ""
) -> PyTree:
  """Parameters whole on every device of `fsdp`, as a product reads them.

  Inside of `over_rows`; elsewhere they are left alone. Shards travel in
  `dtype`, in which products compute, but norms as they are, and arrive in the
  dtype of the parameters. The devices' gradients are added in float32 (in
  bfloat16 256 + 1 is 256), and a device gets the sum of its shard alone.
  `inside` is the path of `params`; those of "blocks/" belong to one layer.
  """
  if mesh is None or "fsdp" in axes_here(mesh):
    return params

  def whole(path, leaf):
    name = inside + jax.tree_util.keystr(path, simple=True, separator="/")
    axes = _axes(name, leaf)[1 if inside == "blocks/" else 0 :]
    cut = _cut(axes, meshes.within(mesh))
    if "fsdp" not in cut:
      return leaf
    kind = leaf.dtype if name.endswith("/scale") else dtype
    return _whole(cut, kind, leaf)

  return jax.tree_util.tree_map_with_path(whole, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(cut: Cut, dtype, shard: Array) -> Array:
  axis = cut.index("fsdp")
  gather = functools.partial(
    jax.lax.all_gather, axis_name="fsdp", axis=axis, tiled=True
  )
  # Back, so that its gradient is not rounded before it is added.
  return _by_hand(cut, gather)(shard.astype(dtype)).astype(shard.dtype)


def _whole_backward(cut: Cut, dtype, saved, slope: Array):
  del dtype, saved
  axis = cut.index("fsdp")
  scatter = functools.partial(
    jax.lax.psum_scatter, axis_name="fsdp", scatter_dimension=axis, tiled=True
  )
  out = _by_hand(cut, scatter)(slope.astype(jnp.float32))
  return (out.astype(slope.dtype),)


_whole.defvjp(lambda *args: (_whole(*args), None), _whole_backward)


def _by_hand(cut: Cut, f: Callable) -> Callable:
  """`f` by each device of a row too, inside of `over_rows`. XLA's partitioner
  would first make whole over a row what a gather or scatter reads: it gathered
  7.8 GB instead of .8 for 2 layers of 1.5B on 4 x 2.
  """
  spec = PartitionSpec(*(None if axis == "fsdp" else axis for axis in cut))
  return on_devices(f, spec, spec, meshes.WITHIN, None)


def axes_here(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
  """Axes, and sizes, over which XLA spreads the arrays that are traced here.

  Inside `jax.shard_map` over rows, where shapes are of one row, the other axes;
  elsewhere the axes of `mesh`.
  """
  inside = jax.sharding.get_abstract_mesh()
  if inside.axis_names:
    kinds = zip(inside.axis_names, inside.axis_types, strict=True)
    return {a: inside.shape[a] for a, kind in kinds if kind == AxisType.Auto}
  return {} if mesh is None else dict(mesh.shape)


def heads_apart(tree: PyTree, *, axis: int) -> PyTree:
  """Arrays whose `axis`, key/value heads, is cut over the mesh axis "tensor".

  Zeros that a traced function returns would else lie whole on every device.
  """
  if "tensor" not in axes_here(None):
    return tree
  spec = PartitionSpec(*[None] * axis, "tensor")
  return jax.lax.with_sharding_constraint(tree, spec)


def blocks(prompts: int, rows: int, devices: int) -> tuple[int, int, int]:
  """How rows of a few prompts are cut into blocks that spread over devices.

  Returns blocks of each prompt, rows of each block, and all blocks, of which
  the last are empty where prompts and rows do not divide.
  """
  each = min(devices // math.gcd(prompts, devices), rows)
  return each, -(-rows // each), -(-prompts * each // devices) * devices


def spread(
  mesh: Mesh | None, P: int, M: int
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
  """Prompts [P,S] or their rows [P,M,T] to blocks that spread, and back."""
  count = meshes.of(mesh).rows
  if mesh is None or count == 1:
    return (lambda x: x), (lambda x: x)
  each, rows, total = blocks(P, M, count)
  places = NamedSharding(mesh, PartitionSpec(meshes.rows(mesh)))

  def cut(x: Array) -> Array:
    if x.ndim == 2:  # every block reads its prompt
      x = jnp.repeat(x, each, axis=0)
    else:
      x = jnp.pad(x, ((0, 0), (0, each * rows - M), (0, 0)))
      x = x.reshape(P * each, rows, -1)
    spare = ((0, total - P * each),) + ((0, 0),) * (x.ndim - 1)
    x = jnp.pad(x, spare, mode="edge")  # a prompt has a last token
    return jax.lax.with_sharding_constraint(x, places)

  def join(x: Array) -> Array:
    return x[: P * each].reshape(P, each * rows, -1)[:, :M]

  return cut, join


def _cut(axes: tuple[str, ...], within: str | tuple[str, ...]) -> Cut:
  places = (MESH_AXIS[axis] for axis in axes)
  return tuple(within if place == WITHIN else place for place in places)


def _axes(name: str, leaf) -> tuple[str, ...]:
  axes = next((a for r, a in PARAM_AXES if re.fullmatch(r, name)), None)
  if axes is None:
    raise ValueError(f"no sharding rule for {name} {leaf.shape}")
  return axes


def state_shardings(
  abstract_state: PyTree, params: PyTree, mesh: Mesh | AbstractMesh
):
  """Shardings of any pytree that holds copies of the parameters' tree. Moments
  lie where their parameters lie; other leaves are whole everywhere.
  """
  spec = param_shardings(params, mesh)
  like = jax.tree.structure(params)
  whole = NamedSharding(mesh, PartitionSpec())
  is_params = lambda x: jax.tree.structure(x) == like

  def place(tree):
    if not is_params(tree):
      return whole
    same = lambda x, param, s: s if x.shape == param.shape else whole
    return jax.tree.map(same, tree, params, spec)

  return jax.tree.map(place, abstract_state, is_leaf=is_params)


def shard_bytes(tree: PyTree, shardings: PyTree) -> int:
  """Bytes on a device of arrays, or of their shapes, that are cut like this."""
  shard = lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
  return sum(jax.tree.leaves(jax.tree.map(shard, tree, shardings)))


def on_device(tree: PyTree) -> PyTree:
  """Arrays that lie in host memory as they are on their devices; others."""
  place = lambda x: x.sharding.with_memory_kind("device")
  return put_back(tree, jax.tree.map(place, tree))


def put_back(tree: PyTree, shardings: PyTree) -> PyTree:
  """Arrays in the memory that these shardings name; others are left alone."""
  move = lambda x, s: (
    x if x.sharding.memory_kind == s.memory_kind else jax.device_put(x, s)
  )
  return jax.tree.map(move, tree, shardings)


def own_rows(mesh: Mesh, count: int) -> slice:
  """Of `count` blocks spread over the mesh's rows those of this process."""
  place = NamedSharding(mesh, PartitionSpec(meshes.rows(mesh)))
  parts: Any = place.addressable_devices_indices_map((count,)).values()
  starts, stops, _ = zip(*(at[0].indices(count) for at in parts), strict=True)
  return slice(min(starts), max(stops))


def spread_rows(
  mesh: Mesh, own: slice, count: int, array: np.ndarray
) -> jax.Array:
  """A global array whose axis 1 is spread over the mesh's rows, from `own_rows`
  of it; one without that axis is whole everywhere.
  """
  if array.ndim < 2:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(array.shape, whole, array.__getitem__)
  place = NamedSharding(mesh, PartitionSpec(None, meshes.rows(mesh)))

  def part(at: Any) -> np.ndarray:
    start, stop, _ = at[1].indices(count)
    return array[:, start - own.start : stop - own.start]

  shape = array.shape[0], count, *array.shape[2:]
  return jax.make_array_from_callback(shape, place, part)


def to_host(array: jax.Array) -> np.ndarray:
  """A copy of a global array on the host of every process."""
  place = array.sharding
  if isinstance(place, NamedSharding) and not place.is_fully_addressable:
    whole = NamedSharding(place.mesh, PartitionSpec())  # others have the rest
    array = jax.jit(lambda x: x, out_shardings=whole)(array)
  return np.asarray(array)


def local_mesh(mesh: Mesh) -> Mesh:
  """The mesh of this process' own devices; the mesh itself if it has all."""
  return mesh if jax.process_count() == 1 else mesh.local_mesh


def local_copy(params: PyTree, mesh: Mesh) -> PyTree:
  """Parameters as they lie on the local mesh: each process has all of them."""
  if jax.process_count() == 1:
    return params
  places = param_shardings(params, mesh)

  def mine(x: jax.Array, s: NamedSharding) -> jax.Array:
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, s, shards)

  return jax.tree.map(mine, copying(params, mesh)(params), places)


def copying(params: PyTree, mesh: Mesh) -> jax.stages.Wrapped:
  """The program of `local_copy`, for arrays or their shapes and places."""
  devices = jax.tree.leaves(params)[0].sharding.mesh.devices
  names, shape = ("process", *mesh.axis_names), mesh.devices.shape
  apart = Mesh(devices.reshape(-1, *shape), names)
  places = param_shardings(params, mesh)
  place = lambda s: NamedSharding(apart, s.spec)
  return jax.jit(lambda x: x, out_shardings=jax.tree.map(place, places))
