"""The decode step's attention to own columns as one GPU kernel.

`own` computes what `cache._own` computes. XLA's form of it reads all columns of
all pages for every row and keeps their scores in memory; here each row reads
only the blocks of columns that it sees, and its scores stay on chip.

Lowered through Pallas' Triton backend; `supports` says for what sizes. It was
run by Pallas' interpreter and lowered for a GPU, but its speed on one is not
measured, hence `Policy.decode_kernel` is off by default.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from brorl_jax.model import sharding
from brorl_jax.model.attention import MASKED, capped

# The least side of a matrix that tensor cores multiply.
_LEAST = 16
# Columns of a block, and bytes of its keys: keys and values of two blocks, the
# one at work and the one on its way, then fit into the shared memory of any GPU
# that has bfloat16.
_BLOCK, _BLOCK_BYTES = 64, 16384


# What is known of a softmax before its end: the largest score m, the sum l of
# exp(score - m), and the values o weighted by the same. float32.
Softmax = tuple[
  Float[Array, "B G J"], Float[Array, "B G J"], Float[Array, "B G J K"]
]


def supports(q: Any, pages: Sequence[Any]) -> bool:
  """Whether `own` can be lowered for a GPU with arrays of these shapes.

  To be asked where the arrays are traced: it looks at the mesh in use.

  Args:
    q: As in `own`; anything with shape and dtype.
    pages: As in `own`.
  """
  K = q.shape[3]
  page = pages[0]
  G = page.k.shape[1]
  kinds = (jnp.float32, jnp.bfloat16, jnp.float16)
  stored = page.k.dtype if page.k_scale is None else q.dtype
  spread = [n for n in sharding.axes_here(None).values() if n > 1]
  size, bytes_ = page.k.size, page.k.size * page.k.dtype.itemsize
  return (
    K >= _LEAST
    and K & (K - 1) == 0  # Triton's arrays have powers of two
    and q.dtype in kinds
    and stored in kinds
    and len({x.k.shape for x in pages}) == 1
    and len(spread) <= 1
    and all(G % n == 0 for n in spread)
    # Pallas counts elements in 32 signed bits up to 2^32 bytes, in 64 beyond.
    and (size <= 2**31 or bytes_ > 2**32)
  )


def own(
  q: Float[Array, "B G J K"],
  state: Softmax,
  pages: Sequence[Any],
  column: Int[Array, ""],
  limit: Int[Array, " B"],
  *,
  softcap: float = 0.0,
  interpret: bool = False,
) -> Float[Array, "B G J K"]:
  """Goes on with a softmax over the rows' own columns, and ends it.

  For every block of columns with scores s and values v

    m' = max(m, max s)    l' = e^(m-m') l + sum e^(s-m')
                          o' = e^(m-m') o + e^(s-m') v

  and at last o / l. In unseen columns anything may lie, even what is not a
  number. float32 is multiplied as XLA does by default, on GPUs in tf32; see
  `jax.default_matmul_precision`. Sums are float32.

  References:
    Hydragen, Juravsky et al. 2024, arXiv:2402.05099: the prefix of all rows
    apart, as a matrix product. FlashAttention, Dao et al. 2022,
    arXiv:2205.14135: the running softmax. Flash-Decoding's split of one row
    over several programs is not done: there are many rows.

  Args:
    q: Queries, rotated and scaled, J of each key/value head.
    state: After the prompts.
    pages: The rows' own, oldest first: k [B,G,K,C], v [B,G,C,K], and as int8
      k_scale and v_scale [B,G,C].
    column: Of the last page; the newest. See `cache.ages`.
    limit: Each row sees its columns of age below this; at least 1.
    softcap: Bound of the scores.
    interpret: Without a GPU, as XLA operations.
  """
  run = functools.partial(_own, softcap=softcap, interpret=interpret)
  arrays = tuple(tuple(page) for page in pages)
  return _over_heads(run)(column.reshape(1), limit, q, state, arrays)


def _over_heads(own: Callable) -> Callable:
  """`own` on every device of a mesh for its own key/value heads.

  XLA cannot cut a kernel: it would gather all heads of all pages.
  """
  axes = sharding.axes_here(None)
  if not axes:
    return own
  spread = tuple(name for name, size in axes.items() if size > 1)
  heads, whole = PartitionSpec(None, spread), PartitionSpec()
  return jax.shard_map(
    own,
    in_specs=(whole, whole, heads, heads, heads),
    out_specs=heads,
    axis_names=set(axes),
    check_vma=False,
  )


# Traced once for all layers of a policy.
@functools.partial(jax.jit, static_argnames=("softcap", "interpret"))
def _own(
  column: Int[Array, "1"],
  limit: Int[Array, " B"],
  q: Float[Array, "B G J K"],
  state: tuple[Array, Array, Array],
  pages: tuple[tuple[Array, Array, Array | None, Array | None], ...],
  *,
  softcap: float,
  interpret: bool,
) -> Float[Array, "B G J K"]:
  """One program for every row and key/value head continues its softmax."""
  B, G, J, K = q.shape
  kind = pages[0][0].dtype
  block = _BLOCK_BYTES // (K * kind.itemsize)
  block = max(min(block, _BLOCK), _LEAST)
  rows = max(pl.next_power_of_2(J), _LEAST)

  def of_program(x, *shape):
    at = lambda b, g: (b, g) + (0,) * (x.ndim - 2)
    return pl.BlockSpec((None, None, *(shape or x.shape[2:])), at)

  heads = lambda x: of_program(x, rows, *x.shape[3:])
  return pl.pallas_call(
    functools.partial(_kernel, heads=J, block=block, softcap=softcap),
    grid=(B, G),
    in_specs=[
      pl.BlockSpec((1,), lambda b, g: (0,)),
      pl.BlockSpec((1,), lambda b, g: (b,)),
      heads(q),
      jax.tree.map(heads, state),
      jax.tree.map(of_program, pages),
    ],
    out_specs=heads(q),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="decode_attention",
  )(column, limit, q, state, pages)


def _kernel(
  column, limit, q, state, pages, out, *, heads: int, block: int, softcap: float
):
  """Arguments are references into memory: q [16,K], pages' k [K,C], v [C,K]."""
  rows, _ = q.shape
  real = jnp.arange(rows) < heads
  # What is no head is loaded as 0 / 1 and not stored.
  get = lambda x, other: triton.load(x, mask=real, other=other)
  matrix = lambda x: triton.load(x, mask=real[:, None], other=0.0)
  top, total, weighted = state
  carry = get(top, 0.0), get(total, 1.0), matrix(weighted)
  query = matrix(q)
  _, C = pages[0][0].shape
  for i, first, stop in _spans(column[0], limit[0], len(pages), C):
    step = functools.partial(
      _step, query, pages[i], first, stop, block=block, softcap=softcap
    )
    carry = jax.lax.fori_loop(*_blocks(first, stop, block), step, carry)
  _, total, weighted = carry
  answer = (weighted / total[:, None]).astype(out.dtype)
  triton.store(out, answer, mask=real[:, None])


def _spans(column, limit, pages: int, columns: int) -> list[tuple]:
  """What a row sees: (page, first column, column behind the last).

  Column j of the page that is k pages older than the last has age
  `column - j + k * columns`, of which the row sees those below `limit`. In the
  last page the columns behind `column` are the oldest of all. A span may be
  empty. This is `cache.ages`, solved for j.
  """
  first = lambda k: jnp.maximum(column + k * columns - limit + 1, 0)
  older = [(pages - 1 - k, first(k), columns) for k in range(1, pages)]
  last = pages - 1
  behind = jnp.maximum(first(pages), column + 1)
  return [
    *older,
    (last, first(0), column + 1),
    (last, behind, columns),
  ]


def _blocks(first, stop, block: int):
  """The first block of a span and the one behind its last."""
  low = jax.lax.div(first, block)
  high = jax.lax.div(jnp.int32(stop) + (block - 1), block)
  return low, jnp.where(first < stop, high, low)


def _step(query, page, first, stop, i, carry, *, block: int, softcap: float):
  """The running softmax over one more block of columns; see `own`."""
  k, v, k_scale, v_scale = page
  top, total, out = carry
  at = pl.ds(i * block, block)
  place = i * block + jnp.arange(block)
  seen = (place >= first) & (place < stop)
  # Not loaded by `seen`, which would be element by element: where a page ends
  # is known when the kernel is compiled.
  inside = None if v.shape[0] % block == 0 else place < v.shape[0]

  keys = _load(k.at[:, at], inside, (1, block))
  if k_scale is not None:
    keys = keys.astype(query.dtype)
  score = jnp.dot(
    query.astype(keys.dtype), keys, preferred_element_type=jnp.float32
  )
  if k_scale is not None:
    score *= _load(k_scale.at[at], inside, (block,))[None]
  score = jnp.where(seen[None], capped(score, softcap), MASKED)

  peak = jnp.maximum(top, jnp.max(score, axis=1))
  shrink = jnp.exp(top - peak)
  weight = jnp.exp(score - peak[:, None])
  total = shrink * total + jnp.sum(weight, axis=1)
  values = _load(v.at[at], inside, (block, 1))
  if v_scale is None:
    values = _cleared(values, seen[:, None])
  else:
    sizes = _load(v_scale.at[at], inside, (block,))
    weight *= _cleared(sizes, seen)[None]
    values = values.astype(query.dtype)
  added = jnp.dot(
    weight.astype(query.dtype).astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return peak, total, shrink[:, None] * out + added


def _load(ref, inside, shape: tuple[int, ...]):
  if inside is None:
    return ref[...]
  return triton.load(ref, mask=inside.reshape(shape), other=0)


def _cleared(x, seen):
  """Zero where a weight is zero, which times infinity is not."""
  return jnp.where(seen, x, jnp.zeros_like(x))
