"""The kernels of a TPU, by Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import Sizes, draw, run, shapes, spoilt

from brorl_jax.model import cache, tpu_kernels

KERNEL = functools.partial(tpu_kernels.row_kernel, interpret=True)


@pytest.mark.parametrize("z, stored, activations, softcap, atol", [
    (Sizes(16, 7), "float32", "float32", 1.5, 1e-5),
    (Sizes(23, 3, 7, 1, 16), "int8", "bfloat16", 0.0, 2e-2)])  # fmt: skip
def test_equals_the_simple_form_whatever_lies_in_tokens_not_seen(
  z, stored, activations, softcap, atol
):
  case = draw(z, stored, activations)
  want = run(cache.row_attention, case, softcap)
  for outside in (-1, 10**6):
    got = run(KERNEL, spoilt(case, outside), softcap)
    np.testing.assert_allclose(got, want, atol=atol)


def test_steps_by_hand():
  # Blocks of 4 tokens. Row 0 sees 2 <= i < 9, row 1 nothing, row 2 its second
  # block; the table of row 1 names what is no block.
  table = jnp.asarray([[7, 5, 6], [-3, 99, 99], [4, 8, 99]], jnp.int32)
  first = jnp.asarray([2, 0, 5], jnp.int32)
  stop = jnp.asarray([9, 0, 8], jnp.int32)
  row, block, start = tpu_kernels._steps(table, first, stop, 10, 4)
  np.testing.assert_array_equal(start, [0, 3, 4, 5])
  np.testing.assert_array_equal(row[:5], [0, 0, 0, 1, 2])
  np.testing.assert_array_equal(block[:5], [7, 5, 6, 0, 8])
  assert len(row) == 9 and jnp.all(row < 3) and jnp.all(block < 10)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("real", ["some", "none"])
def test_writes_what_a_scatter_writes(stored, real):
  z = Sizes(96, 1)
  case = draw(z, stored)
  blocks = len(case.pool.kv)
  rng = np.random.default_rng(1)
  B, G, K = 5, z.kv_heads, z.head_size
  kv = jnp.asarray(100 * rng.normal(size=(B, 2, G, K)), case.pool.kv.dtype)
  size = None
  if stored == "int8":
    size = jnp.asarray(rng.random((B, 2, G)), jnp.float32)
  block = {"some": [3, blocks, 0, 10**6, 7], "none": [blocks] * 5}[real]
  column = jnp.asarray([0, 1, 95, 32, 63], jnp.int32)
  args = tuple(case.pool), (kv, size), jnp.asarray(block, jnp.int32), column
  got = tpu_kernels.write(*args, interpret=True)
  want = cache._scatter(*args)
  assert got[1] is None or stored == "int8"
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(x, y)
    assert x.dtype == y.dtype


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_a_pool_is_written_by_the_kernel_on_a_tpu_alone(stored):
  def kernels(z, platform):
    case = shapes(z, stored)
    B, G, _, K = case.q.shape
    token = jax.ShapeDtypeStruct((B, G, K), jnp.bfloat16)
    program = jax.jit(cache.write_pool, donate_argnums=0).trace(
      case.pool, token, token, case.stop, case.stop
    )
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return text.count("tpu_custom_call"), text.count('"stablehlo.scatter"(')

  z = Sizes(64, 2, head_size=128)
  parts = 1 + (stored == "int8")
  assert kernels(z, "tpu") == (1, 0)
  assert kernels(z, "cpu") == kernels(z, "cuda") == (0, parts)
  assert kernels(z._replace(head_size=64), "tpu") == (0, parts)
  assert kernels(z._replace(columns=48), "tpu") == (0, parts)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_lowers_for_a_tpu_without_one(stored):
  for each, kv_heads, softcap in ((6, 2, 0.0), (4, 8, 3.0), (7, 1, 0.0)):
    case = shapes(Sizes(128, 3, each, kv_heads, 128), stored)
    assert tpu_kernels.supports(case.q, case.pool, case.table)
    program = run.trace(tpu_kernels.row_kernel, case, softcap)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


def test_what_the_kernel_does_not_support_is_said():
  supports = lambda case: tpu_kernels.supports(case.q, case.pool, case.table)
  good = shapes(Sizes(128, 3, head_size=128))
  assert supports(good) and not supports(shapes(Sizes(64, 3, head_size=128)))
  assert not supports(shapes(Sizes(128, 3, head_size=64)))
  table = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  assert supports(good._replace(table=table(1024, 64)))  # 512 KB of scalars
  assert not supports(good._replace(table=table(1024, 65)))
