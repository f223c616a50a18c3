"""Tests of brorl_jax/model/triton_pool.py, by Pallas' interpreter."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
import tiers
from jax.sharding import AbstractMesh
from pools import Sizes, run, shapes

from brorl_jax.model import triton_pool
from brorl_jax.model.pool import Pool

SIZES = {
  "many blocks in a tile": Sizes(16, 7),
  "odd blocks": Sizes(23, 5, each=7, kv_heads=1),
  "tiles as large as blocks": Sizes(64, 3),
  "many tiles in a block": Sizes(128, 2, each=1, kv_heads=4),
  "more heads than a matrix has rows": Sizes(40, 2, each=18, kv_heads=1),
}


kernel = functools.partial(triton_pool.own, interpret=True)


@pytest.mark.parametrize("outside", [-1, 10**6])
@pytest.mark.parametrize("name", tiers.some(SIZES, 2, 3))
def test_equals_the_simple_form_whatever_lies_in_tokens_not_seen(name, outside):
  pools.check_unseen(kernel, SIZES[name], outside, len(name))


@pytest.mark.parametrize(
  "stored, activations, softcap, near", tiers.some(pools.PRECISIONS, 3)
)
def test_equals_the_simple_form_in_all_precisions(
  stored, activations, softcap, near
):
  pools.check_precision(kernel, stored, activations, softcap, near)


def test_scores_far_apart_do_not_overflow():
  pools.check_far_scores(kernel)


def test_only_tiles_with_tokens_that_a_row_sees_are_read():
  tile, most = 8, 40
  ends = np.stack(np.meshgrid(*[np.arange(most)] * 2), -1).reshape(-1, 2)
  ends = ends[ends[:, 0] <= ends[:, 1]]
  find = jax.jit(jax.vmap(functools.partial(triton_pool._tiles, tile=tile)))
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
    program = run.trace(triton_pool.own, case, softcap)
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
    assert triton_pool.supports(case.q, case.pool, case.table)
    text = lowered(case, softcap)
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "gather" not in text


@pytest.mark.parametrize("head_size", [96, 8, 80])
def test_head_sizes_that_the_kernel_does_not_support(head_size):
  case = shapes(Sizes(64, 2, head_size=head_size), "bfloat16", "bfloat16")
  assert not triton_pool.supports(case.q, case.pool, case.table)


def test_dtypes_that_the_kernel_does_not_support():
  for stored, activations, supported in (
    ("bfloat16", "bfloat16", True),
    ("int8", "bfloat16", True),
    ("float32", "float32", False),
    ("int8", "float32", False),
    ("float16", "bfloat16", False),
  ):
    case = shapes(Sizes(16, 2), stored, activations)
    assert triton_pool.supports(case.q, case.pool, case.table) == supported


def test_pools_beyond_32_bits_are_not_supported():
  def supports(blocks, dtype, scale):
    number = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
    held = Pool(number(dtype, blocks, 2, 8, 64, 128), scale)
    return triton_pool.supports(
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
