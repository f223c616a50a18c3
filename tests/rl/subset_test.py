"""Tests of brorl_jax/rl/subset.py."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import subset


def chosen(name, reward, m, valid=None):
  reward = jnp.asarray(reward, jnp.float32)
  valid = jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid)
  args = (valid, jax.random.key(0)) if name == "random" else (reward, valid)
  return map(np.asarray, subset.CHOOSE[name](*args, m=m))


@pytest.mark.parametrize("name", ["random", "stratified", "variance"])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_the_chosen_stand_for_all_in_expectation(name, m):
  """All 2^5 groups; f is a function of (n, reward), as a gradient is.

  A group of which all are chosen is the group itself.
  """
  p, N = 0.3, 5
  f = np.random.default_rng(0).normal(size=2)  # of wrong and right ones
  sums = np.zeros(2)
  for reward in itertools.product((0, 1), repeat=N):
    chance = p ** sum(reward) * (1 - p) ** (N - sum(reward))
    of = (np.array(reward) - np.mean(reward)) * f[list(reward)]
    some, weight = chosen(name, [reward], m)
    assert some.sum() == m
    assert weight[0].sum() == pytest.approx(m, rel=1e-5) or name != "random"
    sums += chance * np.array([(weight[0] * of).sum() / m, of.mean()])
    if m == N:
      np.testing.assert_allclose(weight, 1.0, rtol=1e-6)
  if name == "random" or m > 1:
    # One alone may leave a kind out: its part is lost.
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


def test_half_above_and_half_below_by_hand():
  """Of 2 right and 6 wrong: both right ones and the first two wrong ones.

  Right ones are 2/8 of all and 2/4 of the chosen: 1/2. Wrong ones 6/8 and 2/4.
  """
  some, weight = chosen("stratified", [[0, 1, 0, 0, 0, 1, 0, 0]], 4)
  np.testing.assert_array_equal(np.flatnonzero(some[0]), [0, 1, 2, 5])
  np.testing.assert_allclose(weight[0, [1, 5]], 0.5)
  np.testing.assert_allclose(weight[0, [0, 2]], 1.5)
  # One right: it and the first three wrong ones; 1/8 over 1/4.
  some, weight = chosen("stratified", [[0, 0, 0, 0, 0, 0, 0, 1]], 4)
  np.testing.assert_array_equal(np.flatnonzero(some[0]), [0, 1, 2, 7])
  np.testing.assert_allclose(weight[0, 7], 0.5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("m", [2, 3, 4])
def test_no_other_choice_has_a_larger_variance(seed, m):
  reward = np.random.default_rng(seed).integers(0, 5, 7).astype(np.float32)
  some, _ = chosen("variance", [reward], m)
  others = [
    np.var(reward[list(x)]) for x in itertools.combinations(range(7), m)
  ]
  assert np.var(reward[some[0]]) == pytest.approx(max(others), abs=1e-5)


def test_two_values_are_stratified_whatever_they_are():
  rng = np.random.default_rng(1)
  reward = rng.integers(0, 2, (20, 9)) * 3 - 1
  for m in (2, 4, 5):
    for a, b in zip(
      chosen("variance", reward, m),
      chosen("stratified", reward, m),
      strict=True,
    ):
      np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["random", "stratified", "variance"])
def test_what_does_not_count_is_not_chosen(name):
  reward = np.array([[1.0, np.nan, 0.0, np.nan, 0.0], [np.nan] * 5])
  some, weight = chosen(name, reward, 3, ~np.isnan(reward))
  np.testing.assert_array_equal(some[0], [True, False, True, False, True])
  np.testing.assert_allclose(weight[0], [1, 0, 1, 0, 1])
  assert not some[1].any() and not weight[1].any()


def test_a_random_draw_takes_each_as_often():
  """A stop rule looks at the first ones: they are no draw from all."""
  valid = jnp.array([[True] * 5 + [False]])
  draw = lambda key: subset.drawn(valid, key, m=2)
  some, weight = jax.vmap(draw)(jax.random.split(jax.random.key(1), 2000))
  share = np.asarray(some[:, 0]).mean(axis=0)
  np.testing.assert_allclose(share[:5], 0.4, atol=4 * (0.24 / 2000) ** 0.5)
  assert share[5] == 0.0
  np.testing.assert_array_equal(some, weight)


def test_fewer_than_m_are_all_of_them():
  for name in ("random", "stratified", "variance"):
    some, weight = chosen(name, [[1, 0, 0]], 8)
    assert some.all()
    np.testing.assert_allclose(weight, 1.0, rtol=1e-6)


def test_different_responses_stand_for_their_equals_in_expectation():
  """Three different ones, 3, 2 and 1 times: drawn two at a time."""
  group = jnp.array([[0, 1, 0, 2, 1, 0]])
  valid = jnp.ones((1, 6), bool)
  value = np.array([5.0, -2.0, 7.0])
  draw = lambda key: subset.different(group, valid, key, m=2)
  keys = jax.random.split(jax.random.key(0), 400)
  some, weight = jax.tree.map(np.asarray, jax.vmap(draw)(keys))
  # Two of the first ones of their kind.
  assert (some[:, 0].sum(axis=1) == 2).all()
  assert not some[:, 0, [2, 4, 5]].any()
  found = (some * weight * value[np.asarray(group)])[:, 0].sum(axis=1) / 2
  mean, error = np.mean(found), np.std(found) / 20
  assert abs(mean - value[np.asarray(group[0])].mean()) < 4 * error
  every, weight = subset.different(group, valid, jax.random.key(0), m=3)
  np.testing.assert_allclose(weight[0, np.flatnonzero(every[0])], [1.5, 1, 0.5])
