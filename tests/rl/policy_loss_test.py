"""Tests of brorl_jax/rl/policy_loss.py, with losses of users."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.rl import losses, policy_loss

OPTIONS = dict(clip_low=0.2, clip_high=0.28)


def squared(logp, logp_old, advantage, mask):
  """Of tokens."""
  return (logp - logp_old - advantage[:, None]) ** 2


def mean_logp(logp, logp_old, advantage, mask, *, clip_high):
  """Of sequences; says where it holds."""
  mean = jnp.sum(logp, axis=1, where=mask) / jnp.sum(mask, axis=1)
  return -advantage * jnp.minimum(mean, clip_high), mean > clip_high


def example():
  rng = np.random.default_rng(0)
  logp, old = rng.normal(size=(2, 4, 3)).astype(np.float32)
  advantage = rng.normal(size=4).astype(np.float32)
  mask = np.arange(3) < np.array([3, 1, 0, 2])[:, None]
  return tuple(map(jnp.asarray, (logp, old, advantage, mask)))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_table_says_what_own_would_find(name):
  loss = losses.LOSSES[name]
  assert policy_loss.own(loss.function, **OPTIONS) == loss
  assert hash(loss) == hash(dataclasses.replace(loss))


def test_the_unit_is_the_rank_of_what_a_loss_returns():
  assert policy_loss.own(squared, **OPTIONS) == policy_loss.Loss(
    squared, "token", ()
  )
  assert policy_loss.own(mean_logp, **OPTIONS) == policy_loss.Loss(
    mean_logp, "sequence", ("clip_high",)
  )
  any_option = lambda logp, *_, **options: logp * options["clip_low"]
  assert policy_loss.own(any_option, **OPTIONS).options == policy_loss.OPTIONS


def test_an_own_loss_of_tokens_by_hand():
  logp, old, advantage, mask = example()
  loss = policy_loss.own(squared, **OPTIONS)
  weight, scale = (
    jnp.array([2.0, 1.0, 5.0, 3.0]),
    jnp.array([1.0, 0.5, 9.0, 2.0]),
  )
  correction = jnp.abs(old)
  mean, stats = policy_loss.policy_loss(
    loss, logp, old, advantage, mask,
    weight=weight, scale=scale, correction=correction,
  )  # fmt: skip
  total = count = 0.0
  for b, t in np.argwhere(np.asarray(mask)):
    one = (logp[b, t] - old[b, t] - advantage[b]) ** 2
    total += float(one * weight[b] * scale[b] * correction[b, t])
    count += float(weight[b])
  assert float(mean.total) == pytest.approx(total, rel=1e-5)
  assert float(mean.count) == count == 2 * 3 + 1 + 3 * 2
  assert float(stats.clip_fraction.count) == 0.0  # it does not say


def test_an_own_loss_of_sequences_by_hand():
  logp, old, advantage, mask = example()
  loss = policy_loss.own(mean_logp, **OPTIONS)
  weight, scale = (
    jnp.array([2.0, 1.0, 5.0, 3.0]),
    jnp.array([1.0, 0.5, 9.0, 2.0]),
  )
  correction = jnp.abs(advantage)
  mean, stats = policy_loss.policy_loss(
    loss, logp, old, advantage, mask,
    weight=weight, scale=scale, correction=correction, clip_high=0.28,
  )  # fmt: skip
  total, held = 0.0, 0.0
  for b in (0, 1, 3):
    value = float(logp[b][mask[b]].mean())
    one = -float(advantage[b]) * min(value, 0.28)
    total += one * float(weight[b] * scale[b] * correction[b])
    held += float(weight[b]) * (value > 0.28)
  assert float(mean.total) == pytest.approx(total, rel=1e-5)
  assert float(mean.count) == float(stats.clip_fraction.count) == 6.0
  assert float(stats.clip_fraction.total) == held


@pytest.mark.parametrize("bad", tiers.some([jnp.nan, jnp.inf, 1e30], 1))
def test_an_own_loss_sees_nothing_off_the_mask(bad):
  """Nor an empty row, whose mean would be 0 / 0, in value or gradient."""
  logp, old, advantage, mask = example()
  spoil = lambda x: jnp.where(mask, x, bad)
  for function in (squared, mean_logp):
    loss = policy_loss.own(function, **OPTIONS)
    options = {name: OPTIONS[name] for name in loss.options}
    run = lambda logp, old: (
      policy_loss.policy_loss(loss, logp, old, advantage, mask, **options)[
        0
      ].value
    )
    spoilt = spoil(logp), spoil(old)
    with jax.debug_nans(True):
      got = jax.value_and_grad(run)(*spoilt)
    want = jax.value_and_grad(run)(logp, old)
    assert float(got[0]) == float(want[0]) != 0.0
    np.testing.assert_array_equal(got[1], want[1])


def test_an_own_loss_gets_constants():
  logp, old, advantage, mask = example()
  loss = policy_loss.own(
    lambda logp, logp_old, advantage, mask: (
      logp * logp_old * advantage[:, None]
    ),
    **OPTIONS,
  )
  run = lambda logp, old, advantage, weight: (
    policy_loss.policy_loss(
      loss, logp, old, advantage, mask, correction=weight
    )[0].value
  )
  grads = jax.grad(run, argnums=(0, 1, 2, 3))(logp, old, advantage, old)
  assert float(jnp.abs(grads[0]).max()) > 0.0
  for grad in grads[1:]:
    np.testing.assert_array_equal(grad, 0.0)


def needs_beta(logp, logp_old, advantage, mask, *, beta):
  return logp * beta


@pytest.mark.parametrize(
  "function, message",
  [
    (needs_beta, "TypeError: .*'beta'"),
    (lambda logp: logp, "TypeError: .* 4 "),
    (
      lambda logp, *_: jnp.mean(logp),
      r"returns float32\[\] for 3 sequences of",
    ),
    (lambda logp, *_: logp[:, :2], r"returns float32\[3,2\]"),
    (lambda logp, *_: logp > 0, r"returns bool\[3,5\]"),
    (lambda logp, *_: (logp, logp), r"returns float32\[3,5\], float32\[3,5\]"),
    (lambda logp, *_: (logp, logp[:, 0] > 0), r"float32\[3,5\], bool\[3\]"),
    (lambda logp, *_: None, "returns NoneType"),
    (lambda logp, *_: np.log(logp), "line .*: TracerArrayConversionError"),
    (lambda logp, *_: logp if logp[0, 0] else -logp, "line .*: Tracer"),
    (lambda logp, *_: 1 / 0, r"line \d+: ZeroDivisionError: division by zero"),
  ],
)
def test_what_is_no_loss_is_refused_in_one_line(function, message):
  with pytest.raises(ValueError, match=message) as error:
    policy_loss.own(function, **OPTIONS)
  assert "\n" not in str(error.value)
