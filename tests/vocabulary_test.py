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


def tiled(hidden, kernel, tokens, rows):
  head = lambda x: jnp.tanh(x @ kernel) * 4.0
  return vocabulary.token_logp(head, hidden, tokens, rows=rows)


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
  forward = jax.jvp(
    lambda h: tiled(h, kernel, tokens, rows)[0], [hidden], [hidden]
  )
  want = jax.jvp(lambda h: plain(h, kernel)[0], [hidden], [hidden])
  np.testing.assert_allclose(forward[1], want[1], atol=1e-4)


def shapes(jaxpr):
  """Of everything that is computed, in loops too."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for sub in jex.core.jaxprs_in_params(eqn.params):
      yield from shapes(sub)


def test_no_array_has_the_logits_of_all_tokens():
  hidden, kernel, tokens, _ = draw()
  loss = lambda h, k: jnp.sum(tiled(h, k, tokens, 2)[0])
  found = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, kernel)
  sizes = [np.prod(s) for s in shapes(found.jaxpr) if s and s[-1] == V]
  assert max(sizes) == max(P * 2 * V, D * V)


def test_rows_of_a_tile(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  assert vocabulary.tile_rows(10**6, 2048, 1) == 1024
  assert vocabulary.tile_rows(10**6, 2048, 4) == 256
  assert vocabulary.tile_rows(100, 2048, 4) == 100
  assert vocabulary.tile_rows(100, 10**8, 4) == 1
  monkeypatch.setattr(jax, "device_count", lambda: 8)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert vocabulary.tile_rows(10**6, 151936, 8) == 441
