"""Tests of brorl_jax/rl/length_penalty.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import length_penalty


def test_cosine_by_hand():
  """cos is 1, 1/sqrt(2), 0, -1/sqrt(2), -1 at quarters of the limit."""
  length = jnp.array([-5, 0, 25, 50, 75, 100, 200])
  got = length_penalty.cosine(length, limit=100, eta_min=-0.6, eta_max=0.4)
  root = 0.5**0.5
  cos = np.array([1.0, 1.0, root, 0.0, -root, -1.0, -1.0])
  np.testing.assert_allclose(got, -0.1 + 0.5 * cos, atol=1e-6)


def test_is_on_first_and_again_after_each_period():
  """On for 0, 1, 2, off for 3, 4, and so on."""
  got = [length_penalty.is_active(u, on=3, off=2) for u in range(11)]
  assert got == ([True] * 3 + [False] * 2) * 2 + [True]
  np.testing.assert_array_equal(
    length_penalty.is_active(jnp.arange(11), on=3, off=2), got
  )


def test_without_off_it_is_always_on():
  assert all(length_penalty.is_active(u, on=1, off=0) for u in range(5))


@pytest.mark.parametrize("on", [0, -3])
def test_says_which_on_is_wrong(on):
  with pytest.raises(ValueError, match=f"on = {on} "):
    length_penalty.is_active(0, on=on, off=5)


def test_says_which_off_is_wrong():
  with pytest.raises(ValueError, match="off = -1 "):
    length_penalty.is_active(0, on=5, off=-1)


def test_overlong_by_hand():
  """Free up to 80; then a twentieth for each token; -1 from 100."""
  length = jnp.array([0, 79, 80, 81, 90, 95, 99, 100, 101, 1000])
  got = length_penalty.overlong(length, limit=100, buffer=20)
  want = [0, 0, 0, -0.05, -0.5, -0.75, -0.95, -1, -1, -1]
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_overlong_may_begin_at_once():
  got = length_penalty.overlong(jnp.array([0, 5, 10]), limit=10, buffer=10)
  np.testing.assert_allclose(got, [0.0, -0.5, -1.0])


@pytest.mark.parametrize("buffer", [0, 11])
def test_says_which_buffer_is_wrong(buffer):
  with pytest.raises(ValueError, match=f"buffer = {buffer} "):
    length_penalty.overlong(jnp.array([1]), limit=10, buffer=buffer)
