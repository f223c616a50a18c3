"""Kernels of decoding over a pool of blocks: a GPU's and a TPU's.

The GPU's is lowered through Pallas' Triton backend. The TPU's is lowered
through its Mosaic backend; it was run by Pallas' interpreter and compiled for
a v5p, and its speed on one is not measured.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton
from jaxtyping import Array, Float, Int

from brorl_jax.model.attention import MASKED, Softmax, capped

# The least side of a matrix that tensor cores multiply.
_LEAST = 16
# Tokens that a program reads at a time, and bytes of their keys. On an H100 a
# program then takes 38 KB of the 228 KB of shared memory, so that five run side
# by side with 160 KB on their way: 25 B/ns and 1 us of latency need 25 KB.
_TILE, _TILE_BYTES = 64, 16384


def triton_supports(q: Any, pool: Any, table: Any) -> bool:
  """Whether the GPU's kernel can be lowered with arrays of these shapes."""
  del table
  K = q.shape[3]
  stored = q.dtype if pool.scale is not None else pool.kv.dtype
  size = pool.kv.size
  return (
    K >= _LEAST
    and K & (K - 1) == 0  # Triton's arrays have powers of two
    and q.dtype in (jnp.bfloat16, jnp.float16)
    and stored == q.dtype
    # Pallas counts elements in 32 signed bits up to 2^32 bytes, in 64 beyond.
    and (size <= 2**31 or size * pool.kv.dtype.itemsize > 2**32)
  )


# Traced once for all layers of a policy.
@functools.partial(jax.jit, static_argnames=("softcap", "interpret"))
def triton_row_attention(
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
  """`cache.row_attention`, which gathers every block of every table.

  Here each row reads the tokens that it sees, once and in place, and its
  scores stay on chip. On an H100 it reads the keys and values of 512 rows of up
  to 2,048 tokens at .90 of the rate of a copy, in .19 ms where the simple form
  takes 1.2 (bfloat16, jax 0.11.2, 2026-11-26).

  For every tile of tokens with scores s and values v

    m' = max(m, max s)    l' = e^(m-m') l + sum e^(s-m')
                          o' = e^(m-m') o + e^(s-m') v

  and at last o / l. One program for every row and key/value head, which reads
  nothing that the row does not see. A tile lies in one block or in several.

  References:
    Hydragen, Juravsky et al. 2024, arXiv:2402.05099: the prefix of all rows
    apart, as a matrix product. FlashAttention, Dao et al. 2022,
    arXiv:2205.14135: the running softmax. PagedAttention, Kwon et al. 2023,
    arXiv:2309.06180: blocks behind a table. Flash-Decoding's split of one row
    over several programs is not done: there are many rows.

  Arguments as of `cache.row_attention`, and

    interpret: Without a GPU, as XLA operations.
  """
  B, G, J, K = q.shape
  tile = _TILE_BYTES // (K * pool.kv.dtype.itemsize)
  tile = max(min(tile, _TILE), _LEAST)
  rows = max(pl.next_power_of_2(J), _LEAST)
  arrays = tuple(pool)

  def heads(x):
    at = lambda b, g: (b, g) + (0,) * (x.ndim - 2)
    return pl.BlockSpec((None, None, rows, *x.shape[3:]), at)

  def blocks(x):
    at = lambda b, g: (0, 0, g) + (0,) * (x.ndim - 3)
    return pl.BlockSpec((*x.shape[:2], None, *x.shape[3:]), at)

  return pl.pallas_call(
    functools.partial(_triton_kernel, heads=J, tile=tile, softcap=softcap),
    grid=(B, G),
    in_specs=[
      heads(q),
      jax.tree.map(heads, state),
      jax.tree.map(blocks, arrays),
      pl.BlockSpec((None, table.shape[1]), lambda b, g: (b, 0)),
      pl.BlockSpec((1,), lambda b, g: (b,)),
      pl.BlockSpec((1,), lambda b, g: (b,)),
    ],
    out_specs=heads(q),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="decode_attention",
  )(q, state, arrays, table, first, stop)


def _triton_kernel(
  q, state, pool, table, first, stop, out, *, heads: int, tile: int, softcap
):
  """Arguments are references into memory: q [16,K], kv [blocks,2,C,K]."""
  rows, _ = q.shape
  real = jnp.arange(rows) < heads
  # What is no head is loaded as 0 and not stored.
  get = lambda x: triton.load(x, mask=real, other=0.0)
  matrix = lambda x: triton.load(x, mask=real[:, None], other=0.0)
  top, total, weighted = state
  carry = get(top), get(total), matrix(weighted)
  low, high = _triton_tiles(first[0], stop[0], tile)
  step = functools.partial(
    _triton_step,
    matrix(q),
    pool,
    table,
    first[0],
    stop[0],
    tile=tile,
    softcap=softcap,
  )
  _, total, weighted = jax.lax.fori_loop(low, high, step, carry)
  answer = (weighted / total[:, None]).astype(out.dtype)
  triton.store(out, answer, mask=real[:, None])


def _triton_tiles(first, stop, tile: int):
  """The first tile that a row sees and the one behind its last."""
  low = jax.lax.div(first, tile)
  return low, jnp.where(first < stop, jax.lax.div(stop + tile - 1, tile), low)


def _triton_step(
  query, pool, table, first, stop, i, carry, *, tile: int, softcap
):
  """The running softmax over one more tile of tokens."""
  kv, scale = pool
  top, total, out = carry
  token = i * tile + jnp.arange(tile)
  seen = (token >= first) & (token < stop)
  C = kv.shape[2]
  block = triton.load(table.at[jax.lax.div(token, C)], mask=seen, other=0)
  column = jax.lax.rem(token, C)
  component = jnp.arange(kv.shape[3])[None]

  def load(kind: int):
    tokens = kv.at[block[:, None], kind, column[:, None], component]
    return triton.load(tokens, mask=seen[:, None], other=0).astype(query.dtype)

  def size(kind: int):
    return triton.load(scale.at[block, kind, column], mask=seen, other=0.0)

  score = jax.lax.dot_general(
    query,
    load(0),
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  if scale is not None:
    score *= size(0)[None]
  score = jnp.where(seen[None], capped(score, softcap), MASKED)

  peak = jnp.maximum(top, jnp.max(score, axis=1))
  shrink = jnp.exp(top - peak)
  weight = jnp.exp(score - peak[:, None])
  total = shrink * total + jnp.sum(weight, axis=1)
  if scale is not None:
    weight *= size(1)[None]
  added = jnp.dot(
    weight.astype(query.dtype), load(1), preferred_element_type=jnp.float32
  )
  return peak, total, shrink[:, None] * out + added


_LANES = 128
# Columns that are read and written back to change one: a tile of int8, and two
# of bfloat16.
_SLAB = 32
# Bytes of scalar memory for two numbers per step, of 1 MB on a v5p.
_SCALARS = 2**19


def mosaic_supports(q: Any, pool: Any, table: Any) -> bool:
  """Whether the TPU's kernel can be lowered with arrays of these shapes."""
  C, K = pool.kv.shape[3:]
  return K % _LANES == 0 and C % _LANES == 0 and table.size * 8 <= _SCALARS


def mosaic_writes(kv: Any) -> bool:
  """Whether `mosaic_write` can be lowered with a pool of this shape."""
  C, K = kv.shape[3:]
  return K % _LANES == 0 and C % _SLAB == 0


def _mosaic_part(which: int, x: Array) -> pl.BlockSpec:
  """Of an array, what step s reads: number scalars[which][s]."""
  at = lambda s, *scalars: (scalars[which][s],) + (0,) * (x.ndim - 1)
  return pl.BlockSpec((1, *x.shape[1:]), at)


@functools.partial(jax.jit, static_argnames="interpret")
def mosaic_write(
  arrays: tuple[Array, Array | None],
  new: tuple[Array, Array | None],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
  *,
  interpret: bool = False,
) -> tuple[Array, Array | None]:
  """A pool with one more token of every row, in place; see `cache.write_pool`.

  XLA's scatter on a TPU wants the heads of a token side by side. It would bring
  the whole pool into that order and back in every step.

  Args:
    arrays: kv [blocks,2,G,C,K] and scale [blocks,2,G,C] or None.
    new: What is written, [B,2,G,K] and [B,2,G].
    block: Where each row writes; no other row writes to its block. A row whose
      block does not exist is dropped.
    column: In its block.
    interpret: Without a TPU, as XLA operations.
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

  of_row = functools.partial(_mosaic_part, 0)
  held = jax.tree.leaves(arrays)
  added = [x[:, :, :, None] for x in jax.tree.leaves(new)]
  out = pl.pallas_call(
    _mosaic_write_kernel,
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


def _mosaic_write_kernel(order, at, column, count, added, held, *written):
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
def mosaic_row_attention(
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
  """`triton_row_attention` on a TPU.

  It takes one step for every block that a row sees, row after row. Which block
  comes next is known before the kernel begins, so a block is on its way while
  the one before it is at work. A step costs about .35 us whatever it does,
  which is the time of 1 MB, and a block of 256 columns and 2 heads of size 128
  is 256 KB in bfloat16.

  Args:
    interpret: Without a TPU, as XLA operations.
  """
  _, G, J, K = q.shape
  blocks, C = pool.kv.shape[0], pool.kv.shape[3]
  row, block, start = _mosaic_steps(table, first, stop, blocks, C)

  of_row, of_block = (functools.partial(_mosaic_part, i) for i in (0, 1))
  top, total, out = state
  arrays = q, top[..., None], total[..., None], out
  memory = lambda size: tpu.VMEM((G, J, size), jnp.float32)
  return pl.pallas_call(
    functools.partial(_mosaic_kernel, softcap=softcap),
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


def _mosaic_steps(
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  blocks: int,
  columns: int,
) -> tuple[Array, Array, Array]:
  """Row and block of every step, and the step at which each row begins.

  A row that sees nothing has one step. Behind the last step, at which a row
  B would begin, anything may stand.
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


def _mosaic_kernel(
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
    _mosaic_add(q, kv, scale, sums, g, seen, softcap)

  @pl.when(step + 1 == start[b + 1])
  def _():
    answer[0] = (sums[2][...] / sums[1][...]).astype(answer.dtype)


def _mosaic_add(q, kv, scale, sums, g: int, seen, softcap: float):
  """The running softmax of one head over one more block."""
  kept_top, kept_total, kept_out = sums
  query = q[0, g]
  keys, values = (kv[0, i, g].astype(query.dtype) for i in range(2))
  C = len(keys)
  score = jax.lax.dot_general(
    query,
    keys,
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
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
  kept_total[g] = shrink * kept_total[g] + jnp.sum(
    weight, axis=1, keepdims=True
  )
  if scale is not None:
    weight = jnp.where(across, weight * scale[0, 1, g : g + 1], 0.0)
  # Unseen values may be no numbers, which times 0 are none either.
  values = jnp.where(seen((C, 1), 0), values, jnp.zeros_like(values))
  kept_out[g] = shrink * kept_out[g] + jnp.dot(
    weight.astype(query.dtype), values, preferred_element_type=jnp.float32
  )
