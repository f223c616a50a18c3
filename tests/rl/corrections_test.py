"""Tests of brorl_jax/rl/corrections.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import corrections, losses
from brorl_jax.rl.losses import sequence_log_ratio

ppo = functools.partial(
  losses.policy_loss, losses.LOSSES["ppo"], clip_low=0.2, clip_high=0.28
)
log = lambda *x: jnp.log(jnp.array(x))
BAND = dict(low=0.5, high=5.0)


def test_truncates_by_hand():
  """Ratios 1/2, 1, 3/2 and 3, of which the last is cut to 2."""
  got = corrections.truncated_weight(
    log(0.1, 0.2, 0.3, 0.6), log(0.2, 0.2, 0.2, 0.2), cap=2.0
  )
  np.testing.assert_allclose(got, [0.5, 1.0, 1.5, 2.0], rtol=1e-6)


def test_the_band_by_hand():
  """Ratios 0.49, 0.51, 1, 4.9 and 5.1: the first and the last are dropped."""
  got = corrections.banded_weight(
    log(0.049, 0.051, 0.1, 0.49, 0.51), log(*[0.1] * 5), **BAND
  )
  np.testing.assert_allclose(got, [0.0, 0.51, 1.0, 4.9, 0.0], rtol=1e-5)


def test_the_ends_of_the_band_are_inside():
  """exp(0) is exactly 1."""
  zero = jnp.zeros((1, 1))
  everywhere = jnp.ones((1, 1), bool)
  for low, high, want in ((1.0, 2.0, 1), (0.5, 1.0, 1), (1.1, 2.0, 0)):
    band = dict(low=low, high=high)
    assert corrections.banded_weight(zero, zero, **band)[0, 0] == want
    got = corrections.sequence_mask(zero, zero, everywhere, **band)
    assert bool(got[0]) == want


def rows():
  """Log-ratios of which some are off the mask, and mean ratios e^0, e^1.5."""
  train = jnp.array([[1.0, -1.0, 9.0], [1.0, 2.0, -9.0], [5.0, 5.0, 5.0]])
  mask = jnp.array([[True, True, False], [True, True, False], [False] * 3])
  return train - 3.0, jnp.full((3, 3), -3.0), mask


def test_means_over_valid_tokens_by_hand():
  got = sequence_log_ratio(*rows())
  np.testing.assert_allclose(got, [0.0, 1.5, 0.0], atol=1e-6)


def test_masks_sequences_by_their_geometric_mean():
  """e^1.5 = 4.48. The product would be 20, the arithmetic mean 5.05."""
  mask = lambda low, high: corrections.sequence_mask(
    *rows(), low=low, high=high
  ).tolist()
  assert mask(0.9, 4.4) == [True, False, True]
  assert mask(0.9, 4.6) == [True, True, True]
  assert mask(4.4, 4.6) == [False, True, False]
  assert mask(4.6, 9.0) == [False, False, False]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_positions_off_the_mask_may_hold_anything(bad):
  train, sampler, mask = rows()
  train, sampler = jnp.where(mask, train, bad), jnp.where(mask, sampler, -bad)
  got = sequence_log_ratio(train, sampler, mask)
  np.testing.assert_allclose(got, [0.0, 1.5, 0.0], atol=1e-6)
  got = corrections.sequence_mask(train, sampler, mask, low=0.9, high=4.4)
  assert got.tolist() == [True, False, True]


def test_ratios_do_not_overflow():
  train, sampler = jnp.array([[0.0, -500.0]]), jnp.array([[-500.0, 0.0]])
  got = corrections.banded_weight(train, sampler, low=0.0, high=float("inf"))
  assert jnp.isfinite(got).all() and got[0, 0] > 1e8 and got[0, 1] < 1e-8
  got = corrections.truncated_weight(train, sampler, cap=float("inf"))
  assert jnp.isfinite(got).all() and got[0, 0] > 1e8


def test_nothing_has_a_gradient():
  train, sampler, _ = rows()
  for weight in (lambda *x: corrections.truncated_weight(*x, cap=100.0),
    lambda *x: corrections.banded_weight(*x, low=0.0, high=100.0)):  # fmt: skip
    total = lambda *x: jnp.sum(weight(*x))
    for gradient in jax.grad(total, argnums=(0, 1))(train, sampler):
      np.testing.assert_array_equal(gradient, 0.0)


# A policy over six tokens, and a sampler that was perturbed on purpose.
REWARD = jnp.array([1.0, 0.0, 2.0, -1.0, 0.5, 0.0])


def perturbed():
  kz, kq = jax.random.split(jax.random.key(3))
  z = jax.random.normal(kz, (6,))
  return z, jax.nn.log_softmax(z + 0.5 * jax.random.normal(kq, (6,)))


def gradient_of_loss(z, q, tokens, weight, correction):
  """Of the loss whose data are `tokens`, each `weight` times."""
  old = jax.nn.log_softmax(z)[tokens][:, None]
  if correction is not None:
    correction = correction(old, q[tokens][:, None])

  def loss(z):
    logp = jax.nn.log_softmax(z)[tokens][:, None]
    ones = jnp.ones(logp.shape, bool)
    how = dict(weight=weight, correction=correction)
    return ppo(logp, old, REWARD[tokens], ones, **how)[0].value

  return jax.grad(loss)(z)


def exact(z):
  return -jax.grad(lambda z: jnp.sum(jax.nn.softmax(z) * REWARD))(z)


def capped(cap):
  return lambda *x: corrections.truncated_weight(*x, cap=cap)


@pytest.mark.ci
def test_weights_below_the_cap_remove_the_bias_of_a_perturbed_sampler():
  """E_q[w R grad log p] = E_p[R grad log p], enumerated."""
  z, q = perturbed()
  every = jnp.arange(6)
  assert 1.5 < float(jnp.exp(jax.nn.log_softmax(z) - q).max()) < 5.0
  run = lambda c: gradient_of_loss(z, q, every, jnp.exp(q), c)
  want = exact(z)
  np.testing.assert_allclose(run(capped(5.0)), want, atol=1e-6)
  bias = lambda c: float(jnp.abs(run(c) - want).max())
  assert bias(None) > 0.05
  # A cap that cuts leaves some of the bias.
  assert 1e-3 < bias(capped(1.2)) < bias(None)


@pytest.mark.ci
def test_weights_of_tokens_are_biased_for_two_tokens_those_of_responses_not():
  """All four responses of two tokens, enumerated; no weight is cut."""
  keys = jax.random.split(jax.random.key(6), 4)
  z = (jax.random.normal(keys[0], (2,)), jax.random.normal(keys[1], (2, 2)))
  q = (z[0] + 0.8 * jax.random.normal(keys[2], (2,)),
       z[1] + 0.8 * jax.random.normal(keys[3], (2, 2)))  # fmt: skip
  first, second = jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 0, 1])
  reward, ones = jnp.array([1.0, 0.0, 0.5, -1.0]), jnp.ones((4, 2), bool)

  def logp(z):
    both = map(jax.nn.log_softmax, z)
    a, b = next(both)[first], next(both)[first, second]
    return jnp.stack([a, b], axis=1)

  def gradient(correction, weight):
    how = dict(weight=weight, correction=correction)
    loss = lambda z: ppo(logp(z), logp(old), reward, ones, **how)[0].value
    old = z
    return 2.0 * ravel(jax.grad(loss)(z))  # a mean over two tokens

  ravel = lambda tree: jnp.concatenate([*map(jnp.ravel, tree)])
  chance = lambda z: jnp.exp(jnp.sum(logp(z), axis=1))
  want = -ravel(jax.grad(lambda z: jnp.sum(chance(z) * reward))(z))
  far = lambda *how: float(jnp.abs(gradient(*how) - want).max())
  tokens = corrections.truncated_weight(logp(z), logp(q), cap=5.0)
  assert 1.2 < float(tokens.max()) < 5.0
  whole = jnp.broadcast_to(jnp.prod(tokens, axis=1, keepdims=True), (4, 2))
  assert far(None, chance(z)) < 1e-6 and far(whole, chance(q)) < 1e-6
  assert far(tokens, chance(q)) > 0.01


def test_a_dropped_token_still_counts_in_the_mean():
  """Losses -1 x 1 and -1 x 0 over two tokens."""
  logp = jnp.zeros((1, 2))
  weight = corrections.banded_weight(logp, jnp.array([[0.0, 3.0]]), **BAND)
  counts = jnp.ones((1, 2), bool)
  loss, _ = ppo(logp, logp, jnp.ones(1), counts, correction=weight)
  assert (float(loss.total), float(loss.count)) == (-1.0, 2.0)
