"""The kernels of a TPU for decoding over a pool of blocks, by Pallas' Mosaic.

They were run by an interpreter and compiled for a v5p; no TPU has run them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Float, Int

from brorl_jax.model.attention import MASKED, Softmax, capped

_LANES = 128
# Columns read and written back to change one: a tile of int8, two of bfloat16.
_SLAB = 32
# Bytes of scalar memory for two numbers per step, of 1 MB on a v5p.
_SCALARS = 2**19


def supports(q: Any, pool: Any, table: Any) -> bool:
  """Whether the TPU's kernel can be lowered with arrays of these shapes."""
  C, K = pool.kv.shape[3:]
  return K % _LANES == 0 and C % _LANES == 0 and table.size * 8 <= _SCALARS


def writes(kv: Any) -> bool:
  """Whether `write` can be lowered with a pool of this shape."""
  C, K = kv.shape[3:]
  return K % _LANES == 0 and C % _SLAB == 0


def _part(which: int, x: Array) -> pl.BlockSpec:
  """Of an array, what step s reads: number scalars[which][s]."""
  at = lambda s, *scalars: (scalars[which][s],) + (0,) * (x.ndim - 1)
  return pl.BlockSpec((1, *x.shape[1:]), at)


@functools.partial(jax.jit, static_argnames="interpret")
def write(
  arrays: tuple[Array, Array | None],
  new: tuple[Array, Array | None],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
  *,
  interpret: bool = False,
) -> tuple[Array, Array | None]:
  """A pool with one more token of every row, in place; see `cache.write_pool`.

  XLA's scatter on a TPU wants the heads of a token side by side. It would bring
  the whole pool into that order and back in every step. `arrays` are kv
  [blocks,2,G,C,K] and scale [blocks,2,G,C] or None, and `new` [B,2,G,K] and
  [B,2,G]. No two rows write to one block; a row without a block is dropped.
  """
  blocks = len(arrays[0])
  real = (block >= 0) & (block < blocks)
  # Rows that write, one per step. Others would write back what they have read,
  # while the row whose block it is changes it.
  order = jnp.argsort(~real, stable=True)
  count = jnp.sum(real, dtype=jnp.int32)
  at = jnp.clip(block, 0, blocks - 1)

  def slab(x):
    # A tile of columns; scales have theirs along the lanes, and are few.
    rows = _SLAB if x.ndim == 5 else x.shape[3]
    behind = (0,) * (x.ndim - 4)

    def place(s, order, at, column, _):
      row = order[s]
      return at[row], 0, 0, jax.lax.div(column[row], rows), *behind

    return pl.BlockSpec((1, *x.shape[1:3], rows, *x.shape[4:]), place)

  of_row = functools.partial(_part, 0)
  held = jax.tree.leaves(arrays)
  added = [x[:, :, :, None] for x in jax.tree.leaves(new)]
  out = pl.pallas_call(
    _write_kernel,
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(jnp.maximum(count, 1),),
      in_specs=[[*map(of_row, added)], [*map(slab, held)]],
      out_specs=[*map(slab, held)],
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held],
    input_output_aliases={4 + len(held) + i: i for i in range(len(held))},
    compiler_params=tpu.CompilerParams(dimension_semantics=("arbitrary",)),
    interpret=interpret,
    name="write_tokens",
  )(order.astype(jnp.int32), at, column, count[None], added, held)
  return jax.tree.unflatten(jax.tree.structure(arrays), out)


def _write_kernel(order, at, column, count, added, held, *written):
  """Arguments are references into memory, two of each if there are scales."""
  del at
  row = order[pl.program_id(0)]
  wide = lambda x: x[0].astype(jnp.float32)  # exact, of 16 bits and of 8
  for new, old, out in zip(added, held, written, strict=True):
    rows = old.shape[3]
    shape = (1, 1, rows, *[1] * (len(old.shape) - 4))
    here = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    here = (here == jax.lax.rem(column[row], rows)) & (count[0] > 0)
    out[0] = jnp.where(here, wide(new), wide(old)).astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("softcap", "interpret"))
def row_kernel(
  q: Float[Array, "B G J K"],
  state: Softmax,
  pool: Any,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  softcap: float = 0.0,
  interpret: bool = False,
) -> Float[Array, "B G J K"]:
  """`cache.row_attention` as one kernel.

  It takes one step for every block that a row sees, row after row. Which block
  comes next is known before the kernel begins, so a block is on its way while
  the one before it is at work. A step costs about .35 us whatever it does,
  which is the time of 1 MB, and a block of 256 columns and 2 heads of size 128
  is 256 KB in bfloat16. With `interpret` both kernels run without a TPU.
  """
  _, G, J, K = q.shape
  blocks, C = pool.kv.shape[0], pool.kv.shape[3]
  row, block, start = _steps(table, first, stop, blocks, C)

  of_row, of_block = (functools.partial(_part, i) for i in (0, 1))
  top, total, out = state
  arrays = q, top[..., None], total[..., None], out
  memory = lambda size: tpu.VMEM((G, J, size), jnp.float32)
  return pl.pallas_call(
    functools.partial(_kernel, softcap=softcap),
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(start[-1],),
      in_specs=[
        *map(of_row, arrays),
        of_block(pool.kv),
        None if pool.scale is None else of_block(pool.scale),
      ],
      out_specs=of_row(q),
      scratch_shapes=[memory(1), memory(1), memory(K)],
    ),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=tpu.CompilerParams(dimension_semantics=("arbitrary",)),
    interpret=interpret,
    name="decode_attention",
  )(row, block, start, first, stop, *arrays, *pool)


def _steps(
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  blocks: int,
  columns: int,
) -> tuple[Array, Array, Array]:
  """Row and block of every step, and the step at which each row begins. A row
  that sees nothing has one step. Behind the last step, at which a row B would
  begin, anything may stand.
  """
  B, most = table.shape
  low = first // columns
  each = jnp.maximum(-(-stop // columns) - low, 1)
  ends = jnp.cumsum(each)
  start = jnp.pad(ends, (1, 0))
  step = jnp.arange(B * most)
  row = jnp.sum(ends[None] <= step[:, None], axis=1, dtype=jnp.int32)
  row = jnp.minimum(row, B - 1)
  at = jnp.clip(low[row] + step - start[row], 0, most - 1)
  return row, jnp.clip(table[row, at], 0, blocks - 1), start


def _kernel(
  row, block, start, first, stop, q, top, total, out, kv, scale, answer, *sums,
  softcap: float,
):  # fmt: skip
  """Arguments are references into memory: q [1,G,J,K], kv [1,2,G,C,K]."""
  del block
  step = pl.program_id(0)
  b = row[step]
  C = kv.shape[3]

  @pl.when(step == start[b])
  def _():
    for kept, given in zip(sums, (top, total, out), strict=True):
      kept[...] = given[0]

  begin = (jax.lax.div(first[b], C) + step - start[b]) * C

  def seen(shape, axis):
    token = begin + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return (token >= first[b]) & (token < stop[b])

  for g in range(kv.shape[2]):
    _add(q, kv, scale, sums, g, seen, softcap)

  @pl.when(step + 1 == start[b + 1])
  def _():
    answer[0] = (sums[2][...] / sums[1][...]).astype(answer.dtype)


def _add(q, kv, scale, sums, g: int, seen, softcap: float):
  """The running softmax of one head over one more block."""
  kept_top, kept_total, kept_out = sums
  query = q[0, g]
  keys, values = (kv[0, i, g].astype(query.dtype) for i in range(2))
  C = len(keys)
  score = jax.lax.dot_general(
    query, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  if scale is not None:
    score *= scale[0, 0, g : g + 1]
  across = seen((1, C), 1)
  score = jnp.where(across, capped(score, softcap), MASKED)
  top = kept_top[g]
  peak = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
  shrink = jnp.exp(top - peak)
  weight = jnp.where(across, jnp.exp(score - peak), 0.0)
  kept_top[g] = peak
  more = jnp.sum(weight, axis=1, keepdims=True)
  kept_total[g] = shrink * kept_total[g] + more
  if scale is not None:
    weight = jnp.where(across, weight * scale[0, 1, g : g + 1], 0.0)
  # Unseen values may be no numbers, which times 0 are none either.
  values = jnp.where(seen((C, 1), 0), values, jnp.zeros_like(values))
  kept_out[g] = shrink * kept_out[g] + jnp.dot(
    weight.astype(query.dtype), values, preferred_element_type=jnp.float32
  )
