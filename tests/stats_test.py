"""Tests of brorl_jax/rl/stats.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from brorl_jax.rl import stats


def test_by_hand():
  """1, 2, 6: mean 3, squared deviations 4 + 1 + 9, variance 7 of 3 values."""
  mean, half = stats.mean_interval(jnp.array([1.0, 2.0, 6.0]))
  assert float(mean) == pytest.approx(3.0)
  assert float(half) == pytest.approx(1.959964 * (7 / 3) ** 0.5, rel=1e-6)


def test_agrees_with_scipy():
  values = jax.random.uniform(jax.random.key(0), (60,))
  mean, half = stats.mean_interval(values)
  low, high = scipy.stats.norm.interval(
    0.95, loc=np.mean(values), scale=scipy.stats.sem(values)
  )
  assert float(mean - half) == pytest.approx(low, rel=1e-5)
  assert float(mean + half) == pytest.approx(high, rel=1e-5)


def test_holds_the_truth_in_95_of_100_experiments():
  """Pass rates of 200 prompts: most are near 0 or near 1."""
  count = 1000
  values = jax.random.beta(jax.random.key(1), 0.3, 0.7, (count, 200))
  mean, half = jax.vmap(stats.mean_interval)(values)
  held = float(jnp.mean(jnp.abs(mean - 0.3) <= half))
  noise = 3 * (0.95 * 0.05 / count) ** 0.5
  assert held == pytest.approx(0.95, abs=noise + 0.003)


def test_equal_values_have_no_width():
  mean, half = stats.mean_interval(jnp.full(5, 0.25))
  assert (float(mean), float(half)) == (0.25, 0.0)


@pytest.mark.parametrize("n", [0, 1])
def test_refuses_what_has_no_spread(n):
  with pytest.raises(ValueError, match=f"at least 2 values, not {n}"):
    stats.mean_interval(jnp.zeros(n))
