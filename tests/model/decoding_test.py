"""A decode step over a pool gives the logits of the whole row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import EXPERTS, GEMMA2, GEMMA3, TINY, changed

from brorl_jax.model.policy import Policy
from brorl_jax.model.target import Target, here

POLICIES = {
  "qwen2": TINY, "gemma2": GEMMA2, "gemma3": GEMMA3, "experts": EXPERTS,
  "one head": changed(kv_heads=1),
}  # fmt: skip
# Accelerators whose kernels no CPU can run have the others' form.
POOLED = Target("rocm", 8, 2**30)


def shaken(policy):
  params = policy.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda a: a + jnp.asarray(0.3 * rng.normal(size=a.shape), a.dtype), params
  )


@pytest.mark.ci
@pytest.mark.parametrize("name", tiers.some(POLICIES, 1, 1))
@pytest.mark.parametrize("W", [1, 2])
def test_rows_decode_at_their_own_pace_from_blocks_of_a_pool(name, W):
  """5 rows, of which some wait in a step; nothing else is in their blocks."""
  policy = dataclasses.replace(POLICIES[name], target=POOLED)
  params, rng = shaken(policy), np.random.default_rng(1)
  S, C, most, T = 5, 3, 3, 8
  prompts = [rng.integers(0, policy.vocab, n) for n in (2, 5)]
  tokens, mask = np.zeros((2, S), np.int32), np.zeros((2, S), bool)
  for row, ids in enumerate(prompts):
    tokens[row, S - len(ids) :], mask[row, S - len(ids) :] = ids, True
  _, prefix = policy.prefill(params, jnp.asarray(tokens), jnp.asarray(mask))
  weights = policy.unroll(policy.cast(params))
  # One prompt for each of two lanes, or both for one.
  A, R = (2, 3) if W == 1 else (1, 5)
  window = np.arange(2, dtype=np.int32).reshape(A, W)
  shared = policy.lane_prompts(prefix, jnp.asarray(window))
  which = rng.integers(0, W, (A, R)).astype(np.int32)
  blocks = A * R * most + 1
  table = rng.permutation(blocks)[: A * R * most].reshape(A * R, most)
  table = table.astype(np.int32)
  # What was never written is not to be looked at.
  pools = jax.tree.map(lambda x: x + jnp.nan, policy.pool(blocks, C))
  step = jax.jit(Policy.pool_step, static_argnums=0)
  ids = rng.integers(0, policy.vocab, (A, R, T)).astype(np.int32)
  length = np.ones((A, R), np.int32)
  logits = jax.jit(Policy.logits, static_argnums=0)
  want = np.zeros((A, R, T, policy.vocab), np.float32)
  for a, r in np.ndindex(A, R):
    prompt = prompts[window[a, which[a, r]]]
    row = np.concatenate([prompt, ids[a, r]])[None]
    own = logits(policy, params, jnp.asarray(row), jnp.ones(row.shape, bool))
    want[a, r] = own[0, len(prompt) :]
  while (length <= T).any():
    goes = (rng.random((A, R)) < 0.7) & (length <= T)
    at = np.minimum(length, T)
    token = np.take_along_axis(ids, at[..., None] - 1, axis=2)[..., 0]
    args = (token, at, which, table, goes)
    got, pools = step(policy, weights, shared, pools, *map(jnp.asarray, args))
    for a, r in np.argwhere(goes):
      np.testing.assert_allclose(
        got[a, r], want[a, r, length[a, r] - 1], atol=3e-5
      )
    length += goes
  # Nothing was written elsewhere.
  used = np.zeros((blocks, C), bool)
  for row in table:
    used[row[np.arange(T) // C], np.arange(T) % C] = True
  for pool in pools:
    written = np.isfinite(np.asarray(pool.kv)).all(axis=(1, 2, 4))
    np.testing.assert_array_equal(written, used)


def test_pages_on_a_cpu_and_a_pool_elsewhere():
  assert dataclasses.replace(TINY, target=here()).pool_columns == 0
  for platform in ("gpu", "rocm", "tpu"):
    target = Target(platform, 1, 2**30)
    assert dataclasses.replace(TINY, target=target).pool_columns >= 64


def test_pages_of_a_cpu_are_float32_whatever_the_policy_is():
  """In bfloat16 XLA would convert a whole page in every step."""
  half = changed(dtype="bfloat16")
  dtypes = lambda policy: {
    str(x.dtype)
    for x in jax.tree.leaves(jax.eval_shape(lambda: policy.page(2, 8)))
  }
  assert dtypes(dataclasses.replace(half, target=here())) == {"float32"}
  gpu = dataclasses.replace(half, target=Target("gpu", 1, 2**30))
  assert dtypes(gpu) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_a_pool_of_every_layer(int8):
  policy = changed(layers=3, dtype="bfloat16", int8_cache=int8)
  policy = dataclasses.replace(policy, target=POOLED)
  pools = jax.eval_shape(lambda: policy.pool(7, 4))
  shape = (7, 2, policy.kv_heads, 4)
  assert [p.kv.shape for p in pools] == [(*shape, policy.head_size)] * 3
  assert {p.kv.dtype for p in pools} == {
    jnp.dtype("int8" if int8 else "bfloat16")
  }
  assert all((p.scale is not None) == int8 for p in pools)
