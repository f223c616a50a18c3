"""Tests of brorl_jax/model/products.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.model import products
from brorl_jax.model.target import Target

SHAPES = [(7, 5, 3), (64, 33, 16), (1, 4, 2), (5, 1, 1)]


CPU, GPU = Target("cpu", 1, 0), Target("gpu", 1, 0)
on = lambda target, f: functools.partial(f, target=target)


def draw(m, k, n, dtype):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  return normal(m, k), normal(k, n), normal(m, n).astype(jnp.float32)


@pytest.mark.parametrize("m, k, n", tiers.some(SHAPES, 2))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_and_gradients_are_those_of_the_plain_product(m, k, n, dtype):
  x, w, slope = draw(m, k, n, dtype)
  got, pull = jax.vjp(on(CPU, products.dot), x, w)
  exact = lambda *a: np.asarray(
    np.matmul(*(np.asarray(y, np.float64) for y in a))
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact(x, w), rtol=1e-5, atol=1e-4)
  dx, dw = pull(slope)
  assert dx.dtype == dw.dtype == dtype
  # In half precision the slope is rounded, and the result again.
  rounding = {"rtol": 2**-7, "atol": 0.1} if dtype == "bfloat16" else {}
  rounding = rounding or {"rtol": 1e-5, "atol": 1e-4}
  np.testing.assert_allclose(
    np.asarray(dx, np.float64), exact(slope, w.T), **rounding
  )
  np.testing.assert_allclose(
    np.asarray(dw, np.float64), exact(x.T, slope), **rounding
  )


@pytest.mark.parametrize("m, k, n", tiers.some(SHAPES, 2))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_turned_is_the_transpose_and_so_is_its_gradient(m, k, n, dtype):
  x, _, _ = draw(m, k, n, dtype)
  got, pull = jax.vjp(on(CPU, products.turned), x)
  np.testing.assert_array_equal(got, x.T)
  np.testing.assert_array_equal(pull(got * 2)[0], x * 2)


@pytest.mark.parametrize("n, out", [(1, 5), (7, 3), (64, 33)])
def test_a_weight_that_comes_first_gives_the_same_product(n, out):
  x, w, _ = draw(n, 16, out, "float32")
  got = products.weight_first(x, w.T)
  assert got.shape == (n, out)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  np.testing.assert_allclose(got, exact, atol=1e-4)
  # Turning back changes no bit.
  np.testing.assert_array_equal(got, (w.T @ x.T).T)


def test_a_product_is_turned_back_in_a_loop_of_its_own():
  x, w = jnp.ones((4, 3)), jnp.ones((5, 3))
  made = jax.make_jaxpr(products.weight_first)(x, w)
  names = [str(e.primitive) for e in made.eqns]
  alone = "optimization_barrier"
  assert names == ["dot_general", alone, "transpose", alone]


@pytest.mark.parametrize("n", [1, 5, 128, 129])
def test_a_gated_feed_forward_is_the_same_for_few_rows_and_for_many(n):
  x, gate, _ = draw(n, 12, 20, "float32")
  rng = np.random.default_rng(1)
  up = jnp.asarray(rng.normal(size=(20, 12)), jnp.float32)
  down = jnp.asarray(rng.normal(size=(12, 20)), jnp.float32)
  got = products.gated(x, gate.T, up, down, jnp.tanh, CPU)
  wide = lambda *a: [np.asarray(y, np.float64) for y in a]
  x, gate, up, down = wide(x, gate, up, down)
  want = (np.tanh(x @ gate) * (x @ up.T)) @ down.T
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_weights_come_first_for_few_rows_of_float32_on_a_cpu():
  rows = lambda n, dtype: jnp.zeros((n, 2), dtype)
  assert products.few(rows(128, "float32"), CPU)
  assert not products.few(rows(129, "float32"), CPU)
  assert not products.few(rows(8, "bfloat16"), CPU)
  assert not products.few(rows(8, "float32"), GPU)


@pytest.mark.perf
def test_half_precision_is_multiplied_row_by_row_on_a_cpu():
  """What is fast: no product sees a transposed operand, none is rounded."""
  x, w, slope = draw(64, 32, 16, jnp.bfloat16)

  def dots(target):
    both = lambda x, w: jax.vjp(on(target, products.dot), x, w)[1](slope)
    text = str(jax.make_jaxpr(both)(x, w))
    return text.count("concatenate"), text.count("dot_general")

  assert dots(CPU) == (2, 3)
  assert dots(GPU)[0] == 0
