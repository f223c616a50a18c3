"""Pools of blocks for the tests of attention over them; no test file."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model.cache import BlockPool


class Sizes(NamedTuple):
  columns: int = 3  # C
  most: int = 4  # blocks of a row
  each: int = 3  # J, heads of each key/value head
  kv_heads: int = 2  # G
  head_size: int = 4  # K


SMALL = Sizes()


class Case(NamedTuple):
  """What `cache.row_attention` takes."""

  q: jax.Array
  state: tuple[jax.Array, jax.Array, jax.Array]
  pool: BlockPool
  table: jax.Array
  first: jax.Array
  stop: jax.Array


def draw(z=SMALL, stored="float32", activations="float32", seed=0) -> Case:
  """Rows that see nothing, a token, whole blocks, windows within and across.

  Their blocks come in any order; two are no row's.
  """
  rng = np.random.default_rng(seed)
  C, T = z.columns, z.columns * z.most
  ends = [(0, n) for n in sorted({0, 1, C - 1, C, C + 1, T - 1, T})]
  ends += [(2, 2), (C - 1, C), (C, C + 1), (1, T), (T // 2, T), (C - 1, T)]
  normal = lambda dtype, *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B, G, J, K = len(ends), z.kv_heads, z.each, z.head_size
  blocks = B * z.most + 2
  table = rng.permutation(blocks)[: B * z.most].reshape(B, z.most)
  shape = blocks, 2, G, C, K
  if stored == "int8":
    whole = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
    size = jnp.asarray(rng.random(shape[:-1]) / 60, jnp.float32)
    held = BlockPool(whole, size)
  else:
    held = BlockPool(normal(stored, *shape))
  state = (normal("float32", B, G, J), jnp.exp(normal("float32", B, G, J)),
    normal("float32", B, G, J, K))  # fmt: skip
  first, stop = jnp.asarray(ends, jnp.int32).T
  table = jnp.asarray(table, jnp.int32)
  return Case(normal(activations, B, G, J, K), state, held, table, first, stop)


def shapes(z: Sizes, stored="bfloat16", activations="bfloat16") -> Case:
  return jax.eval_shape(lambda: draw(z, stored, activations))


def spoilt(case: Case, outside: int) -> Case:
  """`outside` behind each row's last block, NaN in tokens that are not seen."""
  blocks, _, _, C = case.pool.kv.shape[:4]
  B, most = case.table.shape
  token = np.arange(C * most)[None]
  first, stop = (np.asarray(x)[:, None] for x in (case.first, case.stop))
  used = np.zeros((blocks, C), bool)
  seen = (token >= first) & (token < stop)
  used[np.asarray(case.table)] = seen.reshape(B, most, C)
  used = used[:, None, None]  # blocks 1 1 C
  kv, scale = case.pool
  if scale is None:
    kv = jnp.where(used[..., None], kv, jnp.asarray(np.nan, kv.dtype))
  else:
    scale = jnp.where(used, scale, np.nan)
  behind = np.arange(most)[None] * C >= stop
  table = jnp.where(behind, outside, case.table)
  return case._replace(pool=BlockPool(kv, scale), table=table)


@functools.partial(jax.jit, static_argnames=("form", "softcap"))
def run(form, case: Case, softcap=0.0) -> jax.Array:
  return form(*case, softcap=softcap).astype(jnp.float32)
