"""Own keys and values of decoding rows in small blocks of one pool.

For accelerators. A row holds only the blocks that it has written to, and a
table says where they are; `cache.Page` reserves the longest rollout for every
row, and is the form for CPUs, where products over contiguous columns are fast.

A is lanes, R the slots of a lane, B = A R rows, C the columns of a block.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from brorl_jax.many import meshes
from brorl_jax.model import cache, mosaic_pool, sharding, triton_pool
from brorl_jax.model.cache import Softmax
from brorl_jax.model.target import Target
from brorl_jax.model.tiled_attention import MASKED, capped

KERNELS = {"gpu": triton_pool, "tpu": mosaic_pool}


class Pool(NamedTuple):
  """Blocks of C columns of keys and values, in one layer.

  Whose they are is said by tables alone. A column of one head is contiguous,
  keys and values of a token are written at once, and in int8 each has a scale.
  """

  kv: (  # keys, then values
    Float[Array, "blocks 2 G C K"] | Int[Array, "blocks 2 G C K"]
  )
  scale: Float[Array, "blocks 2 G C"] | None = None


def columns(target: Target) -> int:
  """C, the tokens of a block, that suits a machine.

  A row wastes half a block on average: 1 % of 6,000 tokens if C is 128. A GPU's
  kernel reads 64 columns at a time. A step of a TPU's kernel costs .35 us
  whatever it loads, which is as long as 2.7 TB/s take for 1 MB: blocks are as
  large as waste allows.
  """
  return 256 if target.platform == "tpu" else 64


def empty(
  blocks: int,
  columns: int,
  kv_heads: int,
  head_size: int,
  dtype: str,
  *,
  int8: bool = False,
) -> Pool:
  """A pool in which nothing is written; `dtype` is ignored if int8."""
  shape = blocks, 2, kv_heads, columns
  if int8:
    return Pool(jnp.zeros((*shape, head_size), jnp.int8), jnp.zeros(shape))
  return Pool(jnp.zeros((*shape, head_size), dtype))


def write(
  pool: Pool,
  k: Float[Array, "B G K"],
  v: Float[Array, "B G K"],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
) -> Pool:
  """The pool with one more token of every row, written in place if donated.

  Args:
    k: Keys, rotated.
    block: Where each row writes. A row whose block does not exist, such as
      number `blocks`, is dropped; no two others write to the same place.
    column: In its block, 0 to C - 1.
  """
  kv, size = jnp.stack([k, v], axis=1), None
  if pool.scale is not None:
    kv, size = cache.quantized(kv)
    size = size[..., 0]
  new = kv.astype(pool.kv.dtype), size
  args = (pool.kv, pool.scale), new, block, column
  if not mosaic_pool.writes(pool.kv):
    return Pool(*_scatter(*args))
  axes = tuple(sharding.axes_here(None))
  heads = PartitionSpec(None, None, "tensor" if axes else None)
  kernel = _on_devices(
    mosaic_pool.write,
    axes,
    (heads, heads, PartitionSpec(), PartitionSpec()),
    heads,
  )
  kv, scale = jax.lax.platform_dependent(*args, tpu=kernel, default=_scatter)
  return Pool(kv, scale)


def _scatter(
  arrays: tuple[Array, Array | None],
  new: tuple[Array, Array | None],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
) -> tuple[Array, Array | None]:
  """`mosaic_pool.write` as one operation."""
  return jax.tree.map(
    lambda x, y: x.at[block, :, :, column].set(y, mode="drop"), arrays, new
  )


def own(
  q: Float[Array, "B G J K"],
  state: Softmax,
  pool: Pool,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  softcap: float = 0.0,
) -> Float[Array, "B G J K"]:
  """Goes on with a softmax over the rows' own tokens, and ends it.

  The simple form: it gathers all blocks of all tables, 2 G C K values each. The
  kernels read what a row sees. A row that sees no token of its own gets what
  the state says.

  Args:
    q: Queries, rotated and scaled, J of each key/value head.
    state: After the prompts.
    pool: Of one layer.
    table: Token i of row b lies in block table[b, i // C], in column i % C.
      Behind the last token anything may stand, also what is no block.
    first: A row sees its tokens first <= i < stop.
    stop: At most `most` * C.
    softcap: Bound of the scores; 0 means none.
  """
  B, G = q.shape[:2]
  take = lambda x: jnp.moveaxis(x.at[table].get(mode="clip"), 2, 0)
  flat = lambda x: jnp.swapaxes(x, 1, 2).reshape(B, G, -1, *x.shape[4:])
  kv = take(pool.kv)  # 2 B most G C K
  k, v = flat(kv[0]), flat(kv[1])
  index = jnp.arange(k.shape[2])[None]
  seen = (first[:, None] <= index) & (index < stop[:, None])
  seen = seen[:, None, None]  # B 1 1 T
  # What is not seen may be no number, which times a weight of 0 is none either.
  v = jnp.where(seen[:, :, 0, :, None], v, jnp.zeros_like(v))
  stored = q.dtype if pool.scale is not None else k.dtype
  score = jnp.einsum(
    "bgjk,bgtk->bgjt",
    q.astype(stored),
    k.astype(stored),
    preferred_element_type=jnp.float32,
  )
  sizes = None if pool.scale is None else [flat(x) for x in take(pool.scale)]
  if sizes is not None:
    score *= sizes[0][:, :, None]
  score = jnp.where(seen, capped(score, softcap), MASKED)
  before, total, out = state
  top = jnp.maximum(before, jnp.max(score, axis=-1))
  shrink = jnp.exp(before - top)
  weight = jnp.where(seen, jnp.exp(score - top[..., None]), 0.0)
  total = total * shrink + jnp.sum(weight, axis=-1)
  if sizes is not None:
    weight *= jnp.where(seen, sizes[1][:, :, None], 0.0)
  out = out * shrink[..., None] + jnp.einsum(
    "bgjt,bgtk->bgjk",
    weight.astype(q.dtype).astype(stored),
    v.astype(stored),
    preferred_element_type=jnp.float32,
  )
  return (out / total[..., None]).astype(q.dtype)


def decode(
  q: Float[Array, "A R H K"],
  shared: cache.Shared,
  pool: Pool,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  scale: float,
  softcap: float = 0.0,
  target: Target,
) -> Float[Array, "A R H K"]:
  """Attention of one new token per row; `cache.decode` over a pool.

  Args:
    q: Queries, rotated, of R rows in each of A lanes.
    shared: Keys and values that all rows of a lane read.
    pool: Of one layer, with the new token; the rest as in `own`.
    target: Whose kernel, if it has one for these arrays.
  """
  A, R, H, K = q.shape
  q *= scale
  state = cache.prompts(q, shared, softcap)
  rows = q.reshape(A * R, -1, H // shared.k.shape[1], K)
  kernel = KERNELS.get(target.platform)
  form = functools.partial(own, softcap=softcap)
  axes = sharding.axes_here(None)
  G, each = rows.shape[1:3]
  tensor, expert = (axes.get(name, 1) for name in meshes.WITHIN)
  apart = all(n == 1 or a in meshes.WITHIN for a, n in axes.items())
  apart = apart and G % tensor == each % expert == 0
  if kernel is not None and kernel.supports(rows, pool, table) and apart:
    fused = functools.partial(kernel.own, softcap=softcap)
    # Devices of axis `expert` share a key/value head and have its queries.
    cut = meshes.WITHIN if axes else ()
    heads, whole = PartitionSpec(None, *cut), PartitionSpec()
    blocks = PartitionSpec(None, None, *cut[:1])
    places = heads, heads, blocks, whole, whole, whole
    form = _on_devices(fused, tuple(axes), places, heads)
  out = form(rows, state, pool, table, first, stop)
  return out.reshape(A, R, H, K)


def _on_devices(
  kernel: Callable, axes: tuple[str, ...], places: tuple, out: PartitionSpec
) -> Callable:
  """`kernel` on every device for its own key/value heads.

  XLA cannot cut a kernel: it would gather all heads of the pool.
  """
  if not axes:
    return kernel
  return jax.shard_map(
    kernel,
    in_specs=places,
    out_specs=out,
    axis_names=set(axes),
    check_vma=False,
  )
