"""Tests of brorl_jax/rl/vocabulary.py."""

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import losses, vocabulary

P, M, D, V = 2, 10, 5, 11


def draw():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return (
    normal(P, M, D), normal(D, V), jnp.asarray(rng.integers(0, V, (P, M))),
    normal(P, M),
  )  # fmt: skip


def tiled(hidden, kernel, tokens, rows, block=V):
  logits = lambda x, head: jnp.tanh(x @ head.T) * 4.0
  return vocabulary.token_logp(
    logits, kernel.T, hidden, tokens, rows=rows, block=block
  )


@pytest.mark.parametrize("rows", [1, 3, 5, 10, 64])
def test_equals_the_plain_form_and_its_gradient(rows):
  hidden, kernel, tokens, weight = draw()

  def plain(hidden, kernel):
    return losses.token_logp(jnp.tanh(hidden @ kernel) * 4.0, tokens)

  want, pull = jax.vjp(plain, hidden, kernel)
  got, pull_tiled = jax.vjp(
    lambda *args: tiled(*args, tokens, rows), hidden, kernel
  )
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  still = jnp.zeros_like(weight)
  for a, b in zip(
    pull_tiled((weight, weight)), pull((weight, still)), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)


def shapes(jaxpr):
  """Of everything that is computed, in loops too."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for sub in jex.core.jaxprs_in_params(eqn.params):
      yield from shapes(sub)


def test_no_array_has_the_logits_of_all_tokens():
  hidden, kernel, tokens, _ = draw()
  loss = lambda h, k, **tile: jnp.sum(tiled(h, k, tokens, **tile)[0])

  def largest(**tile):
    grad = jax.grad(lambda *a: loss(*a, **tile), argnums=(0, 1))
    found = jax.make_jaxpr(grad)(hidden, kernel)
    return max(np.prod(s) for s in shapes(found.jaxpr))

  assert largest(rows=M) == P * M * V
  assert largest(rows=2) == P * M * D == 100  # hidden states
  assert largest(rows=M, block=1) == 100


@pytest.mark.parametrize(
  "blocked, rows, devices", [(2, 4, 1), (3, 10, 8), (4, 10, 1), (6, 4, 8)]
)
def test_blocks_of_the_vocabulary_change_nothing(
  blocked, rows, devices, monkeypatch
):
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  rng = np.random.default_rng(1)
  hidden, _, _, weight = draw()
  kernel = jnp.asarray(rng.normal(size=(D, 12)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 12, (P, M)))
  # Logits that overflow unless the largest one so far is taken off.
  for scale in (1.0, 300.0):
    logits = lambda x, head, scale=scale: jnp.tanh(x @ head.T) * scale
    run = lambda h, k, block, logits=logits: vocabulary.token_logp(
      logits, k.T, h, tokens, rows=rows, block=block
    )
    want, pull = jax.vjp(lambda *a, run=run: run(*a, 12), hidden, kernel)
    got, pull_blocks = jax.vjp(
      lambda *a, run=run: run(*a, 12 // blocked), hidden, kernel
    )
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    still = jnp.ones_like(weight)  # the entropy has no gradient
    for a, b in zip(
      pull_blocks((weight, still)), pull((weight, still * 0)), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale)


def test_tiles(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  shape = vocabulary.tile_shape
  assert shape(10**6, 2048, 1) == (1024, 2048)
  assert shape(10**6, 2048, 4) == (256, 2048)
  assert shape(100, 2048, 4) == (100, 2048)
  # 151,936 = 2^7 x 1,187.
  assert shape(10**6, 151936, 1) == (1024, 1187)
  assert shape(10**6, 151936, 4) == (256, 1187)
  # A prime has no blocks.
  assert shape(10**6, 150001, 2) == (2**20 // 150001, 150001)
  assert shape(10**6, 10**9 + 7, 4) == (1, 10**9 + 7)
  # Every device of eight has a part of a block.
  monkeypatch.setattr(jax, "device_count", lambda: 8)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  rows, block = shape(10**6, 151936, 8)
  assert (rows, block) == (4096, 8 * 1187)
  assert rows * 8 * block <= 8 * 2**26
  # 16,424 = 8 x 2,053: half of it would fit, but not in eight parts.
  assert shape(10**6, 16424, 8) == (2**29 // (16424 * 8), 16424)
