"""Kernels of a GPU and of a TPU, by Pallas' interpreter."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
import tiers
from jax.sharding import AbstractMesh
from pools import Sizes, draw, run, shapes

from brorl_jax.model import cache, pool_kernels
from brorl_jax.model.cache import BlockPool

TRITON = functools.partial(pool_kernels.triton_row_attention, interpret=True)
MOSAIC = functools.partial(pool_kernels.mosaic_row_attention, interpret=True)
# Sizes that the interpreter takes; a TPU does not take all.
SIZES = {
  "many blocks in a tile": Sizes(16, 7),
  "odd blocks": Sizes(23, 5, each=7, kv_heads=1),
  "tiles as large as blocks": Sizes(64, 3),
  "many tiles in a block": Sizes(128, 2, each=1, kv_heads=4),
  "more heads than a matrix has rows": Sizes(40, 2, each=18, kv_heads=1),
}
both = pytest.mark.parametrize("kernel", [TRITON, MOSAIC], ids=["gpu", "tpu"])


@both
@pytest.mark.parametrize("outside", [-1, 10**6])
@pytest.mark.parametrize("name", tiers.some(SIZES, 1, 2))
def test_equals_the_simple_form_whatever_lies_in_tokens_not_seen(
  name, outside, kernel
):
  pools.check_unseen(kernel, SIZES[name], outside, len(name))


@both
@pytest.mark.parametrize(
  "stored, activations, softcap, near", tiers.some(pools.PRECISIONS, 2)
)
def test_equals_the_simple_form_in_all_precisions(
  stored, activations, softcap, near, kernel
):
  pools.check_precision(kernel, stored, activations, softcap, near)


@both
def test_scores_far_apart_do_not_overflow(kernel):
  pools.check_far_scores(kernel)


def test_only_tiles_with_tokens_that_a_row_sees_are_read():
  tile, most = 8, 40
  ends = np.stack(np.meshgrid(*[np.arange(most)] * 2), -1).reshape(-1, 2)
  ends = ends[ends[:, 0] <= ends[:, 1]]
  find = jax.jit(
    jax.vmap(functools.partial(pool_kernels._triton_tiles, tile=tile))
  )
  low, high = find(*jnp.asarray(ends, jnp.int32).T)
  for (first, stop), a, b in zip(ends, low, high, strict=True):
    assert list(range(a, b)) == sorted({i // tile for i in range(first, stop)})


@contextlib.contextmanager
def some_gpu():
  """What to lower for, where there is none. JAX 0.10 takes any."""
  if not hasattr(jax.sharding, "AbstractDevice"):
    yield
    return
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100", num_cores=None, platform="gpu"
  )
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    yield


def lowered(case, softcap=0.0):
  with some_gpu():
    program = run.trace(pool_kernels.triton_row_attention, case, softcap)
    return program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("head_size", tiers.some([16, 64, 128, 256], 2, 2))
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_lowers_for_a_gpu_without_one(stored, head_size):
  for each, kv_heads, columns, softcap in (
    (1, 2, 64, 0.0),
    (6, 2, 50, 3.0),
    (4, 8, 16, 0.0),
    (18, 1, 128, 0.0),
  ):
    z = Sizes(columns, 3, each, kv_heads, head_size)
    case = shapes(z, stored, "bfloat16")
    assert pool_kernels.triton_supports(case.q, case.pool, case.table)
    text = lowered(case, softcap)
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "gather" not in text


@pytest.mark.parametrize("head_size", [96, 8, 80])
def test_head_sizes_that_the_kernel_does_not_support(head_size):
  case = shapes(Sizes(64, 2, head_size=head_size), "bfloat16", "bfloat16")
  assert not pool_kernels.triton_supports(case.q, case.pool, case.table)


def test_dtypes_that_the_kernel_does_not_support():
  for stored, activations, supported in (
    ("bfloat16", "bfloat16", True),
    ("int8", "bfloat16", True),
    ("float32", "float32", False),
    ("int8", "float32", False),
    ("float16", "bfloat16", False),
  ):
    case = shapes(Sizes(16, 2), stored, activations)
    assert (
      pool_kernels.triton_supports(case.q, case.pool, case.table) == supported
    )


def test_pools_beyond_32_bits_are_not_supported():
  def supports(blocks, dtype, scale):
    number = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
    held = BlockPool(number(dtype, blocks, 2, 8, 64, 128), scale)
    return pool_kernels.triton_supports(
      number(jnp.bfloat16, 1, 8, 2, 128), held, number(jnp.int32, 1, 9)
    )

  scale = jax.ShapeDtypeStruct((1, 2, 8, 64), jnp.float32)
  most = 2**31 // (2 * 8 * 64 * 128)
  assert supports(most, jnp.int8, scale)
  assert not supports(most + 1, jnp.int8, scale)
  assert supports(2 * most + 1, jnp.int8, scale)
  assert supports(most, jnp.bfloat16, None)
  assert supports(most + 1, jnp.bfloat16, None)
  assert not supports(64, jnp.int8, None)  # a number is missing


def test_a_row_without_prompt_and_tokens_is_finite():
  case = draw(np.random.default_rng(0), Sizes(16, 2))
  state = jnp.full_like(case.state[0], -1e30), *case.state[1:]
  none = jnp.zeros_like(case.first)
  got = run(MOSAIC, case._replace(state=state, first=none, stop=none))
  np.testing.assert_allclose(got, state[2] / state[1][..., None], rtol=1e-6)


def test_steps_by_hand():
  # Blocks of 4 tokens. Row 0 sees 2 <= i < 9, row 1 nothing, row 2 its second
  # block; the table of row 1 names what is no block.
  table = jnp.asarray([[7, 5, 6], [-3, 99, 99], [4, 8, 99]], jnp.int32)
  first = jnp.asarray([2, 0, 5], jnp.int32)
  stop = jnp.asarray([9, 0, 8], jnp.int32)
  row, block, start = pool_kernels._mosaic_steps(table, first, stop, 10, 4)
  np.testing.assert_array_equal(start, [0, 3, 4, 5])
  np.testing.assert_array_equal(row[:5], [0, 0, 0, 1, 2])
  np.testing.assert_array_equal(block[:5], [7, 5, 6, 0, 8])
  assert len(row) == 9 and jnp.all(row < 3) and jnp.all(block < 10)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("real", tiers.some(["some", "all", "none"], 1))
def test_writes_what_a_scatter_writes(stored, real):
  z = Sizes(96, 1)
  case = draw(np.random.default_rng(0), z, stored)
  blocks = len(case.pool.kv)
  rng = np.random.default_rng(1)
  B, G, K = 5, z.kv_heads, z.head_size
  kv = jnp.asarray(100 * rng.normal(size=(B, 2, G, K)), case.pool.kv.dtype)
  size = None
  if stored == "int8":
    size = jnp.asarray(rng.random((B, 2, G)), jnp.float32)
  block = {
    "some": [3, blocks, 0, 10**6, 7],
    "all": [3, 5, 0, 8, 7],
    "none": [blocks] * 5,
  }[real]
  column = jnp.asarray([0, 1, 95, 32, 63], jnp.int32)
  args = tuple(case.pool), (kv, size), jnp.asarray(block, jnp.int32), column
  got = pool_kernels.mosaic_write(*args, interpret=True)
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
    assert pool_kernels.mosaic_supports(case.q, case.pool, case.table)
    program = run.trace(pool_kernels.mosaic_row_attention, case, softcap)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


def test_what_the_kernel_does_not_support_is_said():
  supports = lambda case: pool_kernels.mosaic_supports(
    case.q, case.pool, case.table
  )
  good = shapes(Sizes(128, 3, head_size=128))
  assert supports(good)
  assert not supports(shapes(Sizes(64, 3, head_size=128)))
  assert not supports(shapes(Sizes(128, 3, head_size=64)))
  table = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  assert supports(good._replace(table=table(1024, 64)))  # 512 KB of scalars
  assert not supports(good._replace(table=table(1024, 65)))
