"""Values out of range are refused where they are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl.values import require, require_count, require_finite


@pytest.mark.parametrize(
  "value", [0, -3, 2.0, True is None, "3", np.float32(3), np.zeros(2, int)]
)
def test_a_count_is_an_integer_of_at_least_1(value):
  with pytest.raises(ValueError, match=r"^n = .* at least 1$"):
    require_count("n", value)


def test_counts_of_numpy_and_jax_will_do():
  for value in (1, np.int32(3), jnp.int32(3)):
    require_count("n", value)


def test_the_first_value_that_is_out_of_range_is_named():
  p = jnp.array([0.5, 1.5, -2.0])
  with pytest.raises(ValueError, match=r"^p = 1\.5 must be at most 1$"):
    require("p", p, lambda x: x <= 1, "at most 1")
  with pytest.raises(ValueError, match=r"^lr = nan must be finite$"):
    require_finite(p=p, lr=float("nan"))


def test_traced_values_are_not_known_and_constants_are():
  good = lambda x: x > 0
  jax.jit(lambda x: require("x", x, good, "above 0"))(-1.0)
  with pytest.raises(ValueError, match=r"^y = -1"):
    jax.jit(lambda x: require("y", -1.0, good, "above 0"))(1.0)
