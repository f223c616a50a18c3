"""Functions of tokens in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.model import tiles


def _gated(w):
  return lambda x: jnp.tanh(x @ w) * x


@pytest.mark.parametrize("most", [1, 3, 4, 6, 7, 100])
def test_tiles_give_the_values_and_gradients_of_all_tokens_at_once(most):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(14, 5)), jnp.float32)
  w = jnp.asarray(rng.normal(size=(5, 5)), jnp.float32)
  slope = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

  def out(form):
    value, pull = jax.vjp(form, x, w)
    return value, *pull(slope)

  got = out(lambda x, w: tiles.each(_gated(w), x, prompts=2, most=most))
  want = out(lambda x, w: _gated(w)(x))
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("most", "tile"), [(100, 14), (7, 14), (6, 8), (3, 6)])
def test_no_more_tokens_than_asked_for_are_there_together(most, tile):
  seen = []

  def f(x):
    seen.append(x.shape)
    return x

  out = tiles.each(f, jnp.ones((14, 5)), prompts=2, most=most)
  assert out.shape == (14, 5)
  assert set(seen) == {(tile, 5)}


def test_the_backward_pass_computes_a_tile_again_and_keeps_none():
  x, w = jnp.ones((64, 8)), jnp.ones((8, 8))
  total = lambda w: jnp.sum(tiles.each(_gated(w), x, prompts=1, most=16))
  text = str(jax.make_jaxpr(jax.grad(total))(w))
  assert text.count("tanh") == 2  # kept, it would be there once
