"""Tests of brorl_jax/rl/mean.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl.mean import Mean

VALUES = jnp.array([[1.0, 2.0, 6.0], [4.0, 5.0, 9.0]])
WHERE = jnp.array([[True, True, False], [False, True, False]])


def test_counts_what_the_mask_says():
  mean = Mean.of(VALUES, WHERE)
  assert (float(mean.total), float(mean.count)) == (8.0, 3.0)
  assert float(mean.value) == pytest.approx(8 / 3)


def test_a_weight_of_c_is_c_copies():
  weight = jnp.array([[2.0, 0.0, 7.0], [7.0, 3.0, 7.0]])
  mean = Mean.of(VALUES, WHERE, weight)
  assert (float(mean.total), float(mean.count)) == (17.0, 5.0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("weight", [None, jnp.ones((2, 3))])
def test_what_does_not_count_may_be_anything(bad, weight):
  values = jnp.where(WHERE, VALUES, bad)
  assert float(Mean.of(values, WHERE, weight).value) == pytest.approx(8 / 3)


def test_parts_add_up_where_averages_of_averages_do_not():
  whole = Mean.of(VALUES, WHERE)
  first, second = (Mean.of(VALUES[i], WHERE[i]) for i in (0, 1))
  both = first + second
  assert (float(both.total), float(both.count)) == (8.0, 3.0)
  assert float(both.value) == float(whole.value)
  assert float((first.value + second.value) / 2) == pytest.approx(3.25)


@pytest.mark.parametrize("weight", [None, jnp.ones((2, 3))])
def test_nothing_counted_is_0_with_a_gradient_of_0(weight):
  nothing = jnp.zeros((2, 3), bool)
  of = lambda x: Mean.of(x, nothing, weight).value
  value, gradient = jax.value_and_grad(of)(VALUES)
  assert float(value) == 0.0
  np.testing.assert_array_equal(gradient, 0.0)


def test_a_count_below_1_still_divides():
  mean = Mean.of(jnp.array([3.0]), jnp.array([True]), jnp.array([0.5]))
  assert float(mean.value) == 3.0


def test_passes_through_jit_and_scan():
  step = lambda total, xw: (total + Mean.of(*xw), None)
  zero = Mean(jnp.zeros(()), jnp.zeros(()))
  total, _ = jax.jit(lambda: jax.lax.scan(step, zero, (VALUES, WHERE)))()
  assert float(total.value) == pytest.approx(8 / 3)
