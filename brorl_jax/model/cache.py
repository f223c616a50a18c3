"""The key-value cache of decoding, and attention over it.

Prompts are stored once for all rows of a lane. A row's own keys and values lie
in pages on CPUs, where products over contiguous columns are fast; a page
reserves the longest rollout for every row. On accelerators a row holds only
the small blocks of one pool that it has written to, which a table names.

A is lanes, R the slots of a lane, B = A R rows, W the prompts of a window, C
the columns of a page or of a block.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.many import meshes
from brorl_jax.model import sharding, tpu_kernels
from brorl_jax.model.attention import MASKED, Softmax, added, capped, product
from brorl_jax.model.spec import Target

# A piece of the prompts has at least 64 columns, and a prompt at most 4 pieces:
# a branch that is not taken costs some microseconds.
_LEAST_PIECE = 64
_MOST_PIECES = 4

Used = int | Int[Array, ""]  # see `ages`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of prompts, stored once for all rows that read them."""

  k: Float[Array, "P L G S K"]
  v: Float[Array, "P L G S K"]
  mask: Bool[Array, "P S"]


class LanePrompts(NamedTuple):
  """Keys and values of the prompts of A lanes, W side by side in each, in
  pieces of columns, see `prompt_pieces`.
  """

  k: list[list[Float[Array, "A G _ K"]]]  # of each layer
  v: list[list[Float[Array, "A G _ K"]]]
  mask: Bool[Array, "A W S"]


class SharedKeys(NamedTuple):
  """Keys and values that the rows of a lane share, in one layer. Pieces have S
  columns in all, and are not read where no row sees a column of them.
  """

  k: list[Float[Array, "A G _ K"]]
  v: list[Float[Array, "A G _ K"]]
  mask: Bool[Array, "A #R S"]  # which of them each row attends to


class Page(NamedTuple):
  """C columns of the own keys and values of B rows, in one layer. Keys are
  stored transposed, so that both products of a row run along the last axis: 65
  to 370 GFLOP/s per core of a CPU, not 11 to 15. int8 columns have scales.
  """

  k: Float[Array, "B G K C"] | Int[Array, "B G K C"]
  v: Float[Array, "B G C K"] | Int[Array, "B G C K"]
  k_scale: Float[Array, "B G C"] | None = None
  v_scale: Float[Array, "B G C"] | None = None

  def write(
    self, k: Float[Array, "B G K"], v: Float[Array, "B G K"], column
  ) -> "Page":
    """The page with one more column, written in place if donated."""
    put = jax.lax.dynamic_update_slice_in_dim
    k_scale, v_scale = self.k_scale, self.v_scale
    if k_scale is not None and v_scale is not None:
      k, k_size = quantized(k)
      v, v_size = quantized(v)
      k_scale = put(k_scale, k_size, column, axis=2)
      v_scale = put(v_scale, v_size, column, axis=2)
    return Page(
      put(self.k, k[..., None].astype(self.k.dtype), column, axis=3),
      put(self.v, v[:, :, None].astype(self.v.dtype), column, axis=2),
      k_scale,
      v_scale,
    )


def quantized(x: Float[Array, "*axes K"]) -> tuple[Array, Array]:
  """int8 x' and scale [B,G,1] with x = x' scale up to scale / 2."""
  size = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 127.0
  size = jnp.maximum(size, 1e-30)  # so that a column of zeros is not 0 / 0
  return jnp.round(x.astype(jnp.float32) / size).astype(jnp.int8), size


def ages(
  column: Int[Array, ""], pages: int, columns: int, used: Used
) -> list[Int[Array, "1 C"]]:
  """How many steps ago each column of each page was written; 0 is now.

  The last `used` pages before the last one and that are a circle of columns,
  oldest page first. The last page is being written. Its columns up to `column`
  are the newest of all; the columns after it are the oldest, from the turn
  before. Pages before the circle have ages that no row sees.
  """
  back = column - jnp.arange(columns)[None]
  older = [back + k * columns for k in range(pages - 1, 0, -1)]
  return [*older, back % ((used + 1) * columns)]


def attend_pages(
  q: Float[Array, "A R H K"],
  shared: SharedKeys,
  pages: Sequence[Page],
  *,
  column: Int[Array, ""],
  used: Used,
  limit: Int[Array, "A R"],
  scale: float,
  softcap: float = 0.0,
) -> Float[Array, "A R H K"]:
  """Attention of one new token per row; `attention.attend` for decoding.

    out = softmax(cap([q k_shared', q k_own'] * scale)) [v_shared; v_own]

  The scores of the prompts are one matrix product per lane and key/value head,
  [R H/G, K] x [K, S]. Parts are merged by log-sum-exp: no array has all scores.

  A row sees the columns of its `pages`, the oldest first, whose age is below
  `limit`; `column` of the last page is the newest, see `ages`. Of the pages
  before it only the last `used` are read: one program serves any number.
  """
  A, R, H, K = q.shape
  q *= scale
  state = prompt_softmax(q, shared, softcap)
  rows = q.reshape(A * R, -1, H // shared.k[0].shape[1], K)
  limit = limit.reshape(A * R)
  circle = ages(column, len(pages), pages[0].v.shape[2], used)

  def add(state: Softmax, page: Page, age: Int[Array, "1 C"]) -> Softmax:
    seen = (age < limit[:, None])[:, None, None]
    k, v, k_scale, v_scale = page
    if k_scale is not None:
      k, v = k.astype(q.dtype), v.astype(q.dtype)
    score = product("bgjk,bgkc->bgjc", rows.astype(k.dtype), k)
    if k_scale is not None:
      score *= k_scale[:, :, None]

    def values(weight: Float[Array, "B G J C"]) -> Float[Array, "B G J K"]:
      if v_scale is not None:
        weight *= v_scale[:, :, None]
      return product(
        "bgjc,bgck->bgjk", weight.astype(q.dtype).astype(v.dtype), v
      )

    score = jnp.where(seen, capped(score, softcap), MASKED)
    return added(state, score, values)

  state = add(state, pages[-1], circle[-1])
  # Newest first. A branch that is not taken costs some microseconds; a program
  # for each number of pages cost 2 CPU-s each for 6 layers of width 256.
  for k in range(1, len(pages)):
    read = functools.partial(add, page=pages[-1 - k], age=circle[-1 - k])
    state = jax.lax.cond(k <= used, read, lambda state: state, state)
  _, total, out = state
  return (out / total[..., None]).astype(q.dtype).reshape(A, R, H, K)


def prompt_softmax(
  q: Float[Array, "A R H K"], shared: SharedKeys, softcap: float
) -> Softmax:
  """What is known of the softmax after the prompts; `q` is scaled.

  A row that sees no prompt has m = -1e30: whatever comes next makes the rest of
  it vanish.
  """
  A, R, H, K = q.shape
  G = shared.k[0].shape[1]
  J = H // G
  # Rows of a lane together, A G (J R) K, and every row by itself, B G J K. An
  # axis of one lane would keep XLA from writing to pages in place. J first: it
  # may be cut over devices, which XLA loses in a product with R before it.
  together = jnp.moveaxis(q.reshape(A, R, G, J, K), 1, 3)
  together = together.reshape(A, G, J * R, K)

  def scores(k: Array, mask: Array) -> Float[Array, "A G J R S"]:
    score = product("agnk,agsk->agns", together, k).reshape(A, G, J, R, -1)
    mask = mask[:, None, None]  # A 1 1 R|1 S
    return jnp.where(mask, capped(score, softcap), MASKED)

  def values(weight: Float[Array, "A G J R S"], v: Array) -> Array:
    weight = weight.astype(q.dtype).reshape(A, G, J * R, -1)
    return product("agns,agsk->agnk", weight, v).reshape(A, G, J, R, K)

  if len(shared.k) == 1:
    score = scores(shared.k[0], shared.mask)
    top = jnp.max(score, axis=-1)
    weight = jnp.exp(score - top[..., None])
    state = top, jnp.sum(weight, axis=-1), values(weight, shared.v[0])
  else:
    none = jnp.zeros((A, G, J, R))
    state = none + MASKED, none, jnp.zeros((A, G, J, R, K))
    ends = np.cumsum([k.shape[2] for k in shared.k])[:-1].tolist()
    masks = jnp.split(shared.mask, ends, axis=-1)
    for k, v, mask in zip(shared.k, shared.v, masks, strict=True):
      read = lambda state, k=k, v=v, mask=mask: added(
        state, scores(k, mask), lambda weight: values(weight, v)
      )
      state = jax.lax.cond(jnp.any(mask), read, lambda state: state, state)
  alone = lambda x: jnp.moveaxis(x, 3, 1).reshape(A * R, G, J, *x.shape[4:])
  top, total, out = state
  return alone(top), alone(total), alone(out)


def prompt_pieces(windows: int, columns: int) -> list[slice]:
  """Columns that are read together, of prompts with tokens on the right."""
  size = max(_LEAST_PIECE, -(-columns // _MOST_PIECES))
  return [
    slice(w * columns + max(end - size, 0), w * columns + end)
    for w in range(windows)
    for end in reversed(range(columns, 0, -size))
  ]


class BlockPool(NamedTuple):
  """Blocks of C columns of keys and values, in one layer. Whose they are is
  said by tables alone. A column of one head is contiguous, keys and values of a
  token are written at once, and in int8 each has a scale.
  """

  kv: (  # keys, then values
    Float[Array, "blocks 2 G C K"] | Int[Array, "blocks 2 G C K"]
  )
  scale: Float[Array, "blocks 2 G C"] | None = None


def pool_columns(target: Target) -> int:
  """C, the tokens of a block, that suits an accelerator."""
  # A row wastes half a block on average: 1 % of 6,000 tokens if C is 128. A
  # GPU's kernel reads 64 columns at a time. A step of a TPU's kernel costs .35
  # us whatever it loads, the time of 1 MB: blocks are as large as waste allows.
  return 256 if target.platform == "tpu" else 64


def write_pool(
  pool: BlockPool,
  k: Float[Array, "B G K"],
  v: Float[Array, "B G K"],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
) -> BlockPool:
  """The pool with one more token of every row, written in place if donated. A
  row whose block does not exist, such as number `blocks`, is dropped; no two
  others write to the same column of a block.
  """
  kv, size = jnp.stack([k, v], axis=1), None
  if pool.scale is not None:
    kv, size = quantized(kv)
    size = size[..., 0]
  args = (pool.kv, pool.scale), (kv.astype(pool.kv.dtype), size), block, column
  if not tpu_kernels.writes(pool.kv):
    return BlockPool(*_scatter(*args))
  heads, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
  kernel = _on_devices(tpu_kernels.write, (heads, heads, whole, whole), heads)
  kv, size = jax.lax.platform_dependent(*args, tpu=kernel, default=_scatter)
  return BlockPool(kv, size)


def _scatter(
  arrays: tuple[Array, Array | None],
  new: tuple[Array, Array | None],
  block: Int[Array, " B"],
  column: Int[Array, " B"],
) -> tuple[Array, Array | None]:
  """`tpu_kernels.write` as one operation."""
  put = lambda x, y: x.at[block, :, :, column].set(y, mode="drop")
  return jax.tree.map(put, arrays, new)


def row_attention(
  q: Float[Array, "B G J K"],
  state: Softmax,
  pool: BlockPool,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  softcap: float = 0.0,
) -> Float[Array, "B G J K"]:
  """A softmax after the prompts, ended over the rows' own tokens.

  The simple form: a loop that gathers one block of every table at a time. Token
  i of row b lies in block table[b, i // C], in column i % C. A row sees its
  tokens first <= i < stop, where stop is at most `most` * C; if it sees none,
  it gets what the state says. Behind the last token of a table anything may
  stand, also what is no block. `q` is rotated and scaled.
  """
  C = pool.kv.shape[3]
  stored = q.dtype if pool.scale is not None else pool.kv.dtype

  def add(i, state: Softmax) -> Softmax:
    kv, sizes = jax.tree.map(
      lambda x: x.at[table[:, i]].get(mode="clip"), tuple(pool)
    )  # B 2 G C K and B 2 G C
    token = i * C + jnp.arange(C)[None]
    seen = (first[:, None] <= token) & (token < stop[:, None])
    seen = seen[:, None, None]  # B 1 1 C
    k, v = kv[:, 0].astype(stored), kv[:, 1].astype(stored)
    # What is not seen may be no number, and that times a weight of 0 is none.
    v = jnp.where(seen[:, :, 0, :, None], v, jnp.zeros_like(v))
    score = product("bgjk,bgck->bgjc", q.astype(stored), k)
    if sizes is not None:
      score *= sizes[:, 0, :, None]
    score = jnp.where(seen, capped(score, softcap), MASKED)

    def values(weight: Float[Array, "B G J C"]) -> Float[Array, "B G J K"]:
      if sizes is not None:
        weight *= jnp.where(seen, sizes[:, 1, :, None], 0.0)
      weight = weight.astype(q.dtype).astype(stored)
      return product("bgjc,bgck->bgjk", weight, v)

    return added(state, score, values, seen)

  _, total, out = jax.lax.fori_loop(0, -(-jnp.max(stop) // C), add, state)
  return (out / total[..., None]).astype(q.dtype)


def attend_pool(
  q: Float[Array, "A R H K"],
  shared: SharedKeys,
  pool: BlockPool,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  scale: float,
  softcap: float = 0.0,
  target: Target,
) -> Float[Array, "A R H K"]:
  """`attend_pages` over a pool that has the new token, see `row_attention`; by
  a kernel, if the target has one for these arrays.
  """
  A, R, H, K = q.shape
  q *= scale
  state = prompt_softmax(q, shared, softcap)
  rows = q.reshape(A * R, -1, H // shared.k[0].shape[1], K)
  form = functools.partial(row_attention, softcap=softcap)
  axes = sharding.axes_here(None)
  G, each = rows.shape[1:3]
  tensor, expert = (axes.get(name, 1) for name in meshes.WITHIN)
  apart = all(n == 1 or a in meshes.WITHIN for a, n in axes.items())
  apart = apart and G % tensor == each % expert == 0
  kernel = None
  if target.platform == "gpu" and kernel_supports(rows, pool):
    kernel = row_kernel
  elif target.platform == "tpu" and tpu_kernels.supports(rows, pool, table):
    kernel = tpu_kernels.row_kernel
  if kernel and apart:
    # Devices of axis `expert` share a key/value head and have its queries.
    heads, whole = PartitionSpec(None, *meshes.WITHIN), PartitionSpec()
    blocks = PartitionSpec(None, None, "tensor")
    places = heads, heads, blocks, whole, whole, whole
    form = functools.partial(kernel, softcap=softcap)
    form = _on_devices(form, places, heads)
  return form(rows, state, pool, table, first, stop).reshape(A, R, H, K)


def _on_devices(kernel: Callable, places: tuple, out: PartitionSpec):
  """`kernel` on every device for its own heads; XLA would gather the pool's."""
  if not (axes := sharding.axes_here(None)):
    return kernel
  return sharding.on_devices(kernel, places, out, axes, None)


# The least side of a matrix that tensor cores multiply.
_LEAST = 16
# Tokens that a program reads at a time, and bytes of their keys. On an H100 a
# program then takes 38 KB of the 228 KB of shared memory, so that five run side
# by side with 160 KB on their way: 25 B/ns and 1 us of latency need 25 KB.
_TILE, _TILE_BYTES = 64, 16384


def kernel_supports(q: Any, pool: Any) -> bool:
  """Whether the GPU's kernel can be lowered with arrays of these shapes."""
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
def row_kernel(
  q: Float[Array, "B G J K"],
  state: Softmax,
  pool: BlockPool,
  table: Int[Array, "B most"],
  first: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  softcap: float = 0.0,
  interpret: bool = False,
) -> Float[Array, "B G J K"]:
  """`row_attention` as one kernel of a GPU, by Pallas' Triton backend.

  Each row reads the tokens that it sees, once and in place, and its scores stay
  on chip. On an H100 it reads the keys and values of 512 rows of up to 2,048
  tokens at .90 of the rate of a copy, in .19 ms where one gather of all blocks
  takes 1.2 (bfloat16, jax 0.11.2, 2026-11-26). `interpret` needs no GPU.

  For every tile of tokens with scores s and values v

    m' = max(m, max s)    l' = e^(m-m') l + sum e^(s-m')
                          o' = e^(m-m') o + e^(s-m') v

  and at last o / l. There is one program for every row and key/value head. A
  tile lies in one block or in several.

  Hydragen, Juravsky et al. 2024, arXiv:2402.05099: the prefix of all rows
  apart, as a matrix product. FlashAttention, Dao et al. 2022, arXiv:2205.14135:
  the running softmax. PagedAttention, Kwon et al. 2023, arXiv:2309.06180:
  blocks behind a table. Flash-Decoding's split of one row over several programs
  is not done: there are many rows.
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
    functools.partial(_kernel, heads=J, tile=tile, softcap=softcap),
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


def _kernel(
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
  low, high = _tiles(first[0], stop[0], tile)
  step = functools.partial(
    _step, matrix(q), pool, table, first[0], stop[0], tile=tile, softcap=softcap
  )
  _, total, weighted = jax.lax.fori_loop(low, high, step, carry)
  answer = (weighted / total[:, None]).astype(out.dtype)
  triton.store(out, answer, mask=real[:, None])


def _tiles(first, stop, tile: int):
  """The first tile that a row sees and the one behind its last."""
  low = jax.lax.div(first, tile)
  return low, jnp.where(first < stop, jax.lax.div(stop + tile - 1, tile), low)


def _step(query, pool, table, first, stop, i, carry, *, tile: int, softcap):
  """The running softmax over one more tile of tokens."""
  kv, scale = pool
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
    query, load(0), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  if scale is not None:
    score *= size(0)[None]
  score = jnp.where(seen[None], capped(score, softcap), MASKED)

  def values(weight):
    if scale is not None:
      weight *= size(1)[None]
    weight = weight.astype(query.dtype)
    return jnp.dot(weight, load(1), preferred_element_type=jnp.float32)

  return added(carry, score, values)
