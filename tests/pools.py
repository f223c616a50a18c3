"""Rows whose tokens lie in blocks of a pool, for tests; no test file."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model import cache
from brorl_jax.model.cache import BlockPool


class Sizes(NamedTuple):
  columns: int  # C
  most: int  # blocks of a row
  each: int = 3  # J, heads of each key/value head
  kv_heads: int = 2  # G
  head_size: int = 16  # K


class Case(NamedTuple):
  """What `cache.row_attention` takes."""

  q: jax.Array
  state: tuple[jax.Array, jax.Array, jax.Array]
  pool: BlockPool
  table: jax.Array
  first: jax.Array
  stop: jax.Array


def spans(z: Sizes) -> list[tuple[int, int]]:
  """First token and the one behind the last, of rows of all kinds."""
  C, T = z.columns, z.columns * z.most
  lengths = {0, 1, C - 1, C, C + 1, T - 1, T}
  windows = [(2, 2), (C - 1, C), (C, C + 1), (1, T), (T // 2, T), (C - 1, T)]
  return [(0, n) for n in sorted(lengths)] + windows


def draw(rng, z: Sizes, stored="float32", activations="float32") -> Case:
  """A row for each of `spans`, with blocks in any order; some are no row's."""
  ends = np.asarray(spans(z), np.int32)
  normal = lambda dtype, *shape: jnp.asarray(rng.normal(size=shape), dtype)
  B, G, J, K = len(ends), z.kv_heads, z.each, z.head_size
  blocks = B * z.most + 2
  table = rng.permutation(blocks)[: B * z.most].reshape(B, z.most)
  shape = blocks, 2, G, z.columns, K
  if stored == "int8":
    whole = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
    held = BlockPool(
      whole, jnp.asarray(rng.random(shape[:-1]) / 60, jnp.float32)
    )
  else:
    held = BlockPool(normal(stored, *shape))
  state = (
    normal("float32", B, G, J),
    jnp.exp(normal("float32", B, G, J)),
    normal("float32", B, G, J, K),
  )
  table = jnp.asarray(table, jnp.int32)
  first, stop = jnp.asarray(ends).T
  return Case(normal(activations, B, G, J, K), state, held, table, first, stop)


def spoilt(case: Case, outside: int, value: float = np.nan) -> Case:
  """`outside` behind each row's last block, `value` in tokens not seen."""
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
    kv = jnp.where(used[..., None], kv, jnp.asarray(value, kv.dtype))
  else:
    scale = jnp.where(used, scale, value)
  behind = np.arange(most)[None] * C >= stop
  table = jnp.where(behind, outside, case.table)
  return case._replace(pool=BlockPool(kv, scale), table=table)


def shapes(z: Sizes, stored="bfloat16", activations="bfloat16") -> Case:
  rng = np.random.default_rng(0)
  return jax.eval_shape(lambda: draw(rng, z, stored, activations))


@functools.partial(jax.jit, static_argnames=("form", "softcap"))
def run(form, case: Case, softcap=0.0) -> jax.Array:
  return form(*case, softcap=softcap).astype(jnp.float32)


# Stored numbers, activations, bound of scores, and how near a kernel must be.
PRECISIONS = [
  ("float32", "float32", 1.5, 1e-5),
  ("int8", "float32", 0.0, 1e-5),
  ("int8", "float32", 1.5, 1e-5),
  ("bfloat16", "bfloat16", 0.0, 2e-2),
  ("int8", "bfloat16", 0.0, 2e-2),
]


def check_unseen(kernel, z: Sizes, outside: int, seed: int) -> None:
  """A kernel is the simple form whatever lies in tokens not seen."""
  case = draw(np.random.default_rng(seed), z)
  got = run(kernel, spoilt(case, outside))
  np.testing.assert_allclose(got, run(cache.row_attention, case), atol=1e-5)


def check_precision(kernel, stored, activations, softcap, tolerance) -> None:
  case = draw(np.random.default_rng(0), Sizes(35, 4), stored, activations)
  want = run(cache.row_attention, case, softcap)
  got = run(kernel, spoilt(case, -1), softcap)
  np.testing.assert_allclose(got, want, atol=tolerance)
  assert jax.eval_shape(kernel, *case).dtype == jnp.dtype(activations)


def check_far_scores(kernel) -> None:
  case = draw(np.random.default_rng(0), Sizes(40, 3))
  case = case._replace(q=case.q * 1e3)
  want = run(cache.row_attention, case)
  np.testing.assert_allclose(run(kernel, case), want, atol=1e-5)
