"""Tests of brorl_jax/rl/pass_at_k.py."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.rl.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", tiers.some([4, 1, 7], 1, 2))
def test_is_the_share_of_subsets_with_a_right_answer(n):
  for k in range(1, n + 1):
    subsets = list(itertools.combinations(range(n), k))
    want = [np.mean([min(s) < c for s in subsets]) for c in range(n + 1)]
    got = pass_at_k(n, jnp.arange(n + 1), k)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_by_hand():
  got = pass_at_k(4, jnp.array([0, 1, 2, 3, 4]), 2)
  np.testing.assert_allclose(got, [0, 1 / 2, 5 / 6, 1, 1], rtol=1e-6)


def test_of_all_samples_it_is_whether_any_was_right():
  got = pass_at_k(512, jnp.array([0, 1, 512]), 512)
  np.testing.assert_array_equal(got, [0.0, 1.0, 1.0])


def test_binomials_that_overflow_do_not_matter():
  n, c, k = 4096, 3, 1024
  want = 1 - math.comb(n - c, k) / math.comb(n, k)
  assert float(pass_at_k(n, jnp.array(c), k)) == pytest.approx(want, rel=1e-4)


def test_any_shape_and_inside_jit():
  c = jnp.array([[0, 1], [2, 4]])
  got = jax.jit(lambda c: pass_at_k(4, c, 2))(c)
  np.testing.assert_allclose(got, [[0, 1 / 2], [5 / 6, 1]], rtol=1e-6)


@pytest.mark.parametrize("k", [0, -1, 5])
def test_refuses_k_outside_the_samples(k):
  with pytest.raises(ValueError, match=rf"k = {k} is not in \[1, 4\]"):
    pass_at_k(4, jnp.array([1]), k)
