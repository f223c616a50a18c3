"""Tests of brorl_jax/rl/losses.py."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.rl import losses
from brorl_jax.rl.losses import policy_loss

CLIP = dict(clip_low=0.2, clip_high=0.28)
ppo, gspo, cispo = (functools.partial(policy_loss, losses.LOSSES[kind])
  for kind in ("ppo", "gspo", "cispo"))  # fmt: skip


def one_token(ratio: float, advantage: float, **more: float):
  """Loss and its gradient in logp for a single valid token."""
  args = jnp.zeros((1, 1)), jnp.array([advantage]), jnp.ones((1, 1), bool)

  def loss(logp):
    mean, stats = ppo(logp, *args, **CLIP, **more)
    return mean.value, stats

  logp = jnp.log(jnp.full((1, 1), ratio))
  (value, stats), grad = jax.value_and_grad(loss, has_aux=True)(logp)
  return float(value), float(grad[0, 0]), stats


@pytest.mark.parametrize("ratio, advantage, value, gradient", tiers.some([
  (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
  (1.0, -2.0, 2.0, 2.0),
  (1.1, 1.0, -1.1, -1.1),  # inside the clip
  (0.9, -1.0, 0.9, 0.9),
  (1.27, 1.0, -1.27, -1.27),  # clip_high is not clip_low
  (1.29, 1.0, -1.28, 0.0),
  (0.81, -1.0, 0.81, 0.81),
  (0.79, -1.0, 0.8, 0.0),
  (1.5, 1.0, -1.28, 0.0),  # good token, already much likelier: held
  (0.5, 1.0, -0.5, -0.5),  # good token, fell: pulled back up
  (0.5, -1.0, 0.8, 0.0),  # bad token, already much rarer: held
  (1.5, -1.0, 1.5, 1.5),  # bad token, rose: pushed down
], 3))  # fmt: skip
def test_ppo_matches_hand_computation(ratio, advantage, value, gradient):
  got_value, got_gradient, stats = one_token(ratio, advantage)
  assert got_value == pytest.approx(value, rel=1e-6)
  assert got_gradient == pytest.approx(gradient, rel=1e-6)
  assert float(stats.clip_fraction.value) == (gradient == 0.0)
  k3 = ratio - 1.0 - np.log(ratio)
  assert float(stats.approx_kl.value) == pytest.approx(k3, abs=1e-6)


@pytest.mark.parametrize("ratio, advantage, value, gradient", [
  (2.9, -2.0, 5.8, 5.8),  # below the bound: as without
  (3.1, -2.0, 6.0, 0.0),  # 3 x |A|, and it counts as clipped
  (0.5, -2.0, 1.6, 0.0),  # by the lower clip
  (3.1, 2.0, -2.56, 0.0),  # by the upper clip: right answers have no other
])  # fmt: skip
def test_dual_clip_by_hand(ratio, advantage, value, gradient):
  *got, stats = one_token(ratio, advantage, dual_clip=3.0)
  np.testing.assert_allclose(got, [value, gradient], rtol=1e-6)
  assert float(stats.clip_fraction.value) == (gradient == 0.0)


def test_an_advantage_of_0_is_not_a_clipped_token():
  value, gradient, stats = one_token(1.5, 0.0)
  assert (value, gradient, float(stats.clip_fraction.value)) == (0.0, 0.0, 0.0)


def example(b=8, t=5):
  """On the scale where some tokens are clipped and some are not."""
  kx, ko, ka, km = jax.random.split(jax.random.key(0), 4)
  old = jax.random.normal(ko, (b, t))
  logp = old + 0.4 * jax.random.normal(kx, (b, t))
  advantage = jax.random.normal(ka, (b,))
  mask = jax.random.bernoulli(km, 0.5, (b, t))  # uneven token counts
  return logp, old, advantage, mask


@pytest.mark.parametrize("loss", [ppo, gspo, cispo])
def test_only_logp_gets_a_gradient(loss):
  *args, mask = example()
  value = lambda *x: loss(*x, mask, **CLIP)[0].value
  new, *others = jax.grad(value, argnums=(0, 1, 2))(*args)
  assert float(jnp.abs(new).sum()) > 0.0
  stats = lambda x: loss(x, *args[1:], mask, **CLIP)[1].approx_kl.value
  k2 = lambda x: losses.kl_k2(args[0], x, mask, clamp=10.0).value
  for gradient in (*others, jax.grad(stats)(args[0]), jax.grad(k2)(args[1])):
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize(
  "bad, weight", [(-jnp.inf, None), (jnp.nan, jnp.array([2.0]))]
)
def test_ignores_masked_tokens_even_when_they_are_not_finite(bad, weight):
  logp = jnp.array([[-1.0, bad]])
  mask = jnp.array([[True, False]])
  args = (jnp.array([[-1.0, -bad]]), jnp.array([1.0]), mask)
  loss = lambda x: ppo(x, *args, **CLIP, weight=weight)[0].value
  value, grad = jax.value_and_grad(loss)(logp)
  np.testing.assert_allclose(value, -1.0)
  np.testing.assert_array_equal(grad, [[-1.0, 0.0]])
  _, stats = ppo(logp, *args, **CLIP, weight=weight)
  assert float(stats.approx_kl.value) == 0.0
  old = jnp.array([[-3.0, -bad]])
  k2 = lambda x: losses.kl_k2(x, old, mask, clamp=10.0, weight=weight).value
  value, grad = jax.value_and_grad(k2)(logp)
  np.testing.assert_allclose(value, 2.0)
  np.testing.assert_array_equal(grad, [[2.0, 0.0]])


@pytest.mark.ci
def test_a_weight_of_c_is_c_equal_rows():
  logp, *rest = example(b=4)
  times = np.array([3, 1, 0, 2])
  repeat = lambda x: jnp.repeat(x, times, axis=0)
  rows = tuple(map(repeat, rest))
  weight = jnp.asarray(times, jnp.float32)

  def weighted(x):
    loss, stats = ppo(x, *rest, weight=weight, **CLIP)
    kl = losses.kl_k2(x, rest[0], rest[2], clamp=0.3, weight=weight)
    return loss, stats.clip_fraction, stats.approx_kl, kl

  def repeated(x):
    loss, stats = ppo(repeat(x), *rows, **CLIP)
    kl = losses.kl_k2(repeat(x), rows[0], rows[2], clamp=0.3)
    return loss, stats.clip_fraction, stats.approx_kl, kl

  both = jax.jit(weighted)(logp), jax.jit(repeated)(logp)
  for got, want in zip(*both, strict=True):
    assert float(got.count) == float(want.count) > 0
    assert float(got.value) == pytest.approx(float(want.value), rel=1e-5)
  for i in (0, 3):
    slope = lambda f, i=i: jax.jit(jax.grad(lambda x: f(x)[i].value))(logp)
    slopes = slope(weighted), slope(repeated)
    np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ratio, advantage, weight, clipped", [
  (1.0, 2.0, 1.0, False),
  (1.1, 1.0, 1.1, False),
  (1.29, 1.0, 1.28, True),  # held, and still followed
  (1.29, -1.0, 1.28, True),
  (0.81, -1.0, 0.81, False),
  (0.5, -1.0, 0.8, True),
  (0.5, 1.0, 0.8, True),
])  # fmt: skip
def test_cispo_by_hand(ratio, advantage, weight, clipped):
  """-sg(clip(rho)) A logp: its gradient is -weight A wherever the clip is."""
  logp = jnp.array([[-0.7, 9.0]])
  args = logp - jnp.log(ratio), jnp.array([advantage])
  mask = jnp.array([[True, False]])
  run = lambda x: cispo(x, *args, mask, **CLIP)
  mean, stats = run(logp)
  assert float(mean.count) == 1.0
  assert float(mean.total) == pytest.approx(weight * advantage * 0.7, rel=1e-5)
  assert float(stats.clip_fraction.value) == clipped
  grad = jax.grad(lambda x: run(x)[0].value)(logp)
  np.testing.assert_allclose(grad, [[-weight * advantage, 0.0]], rtol=1e-5)


def test_reinforce_by_hand():
  logp, reinforce = jnp.array([[-0.7, 9.0]]), losses.LOSSES["reinforce"]
  args = jnp.ones((1, 2)), jnp.array([2.0]), jnp.array([[True, False]])
  run = lambda x: policy_loss(reinforce, x, *args)[0].value
  value, grad = jax.value_and_grad(run)(logp)
  assert float(value) == pytest.approx(1.4)
  np.testing.assert_allclose(grad, [[-2.0, 0.0]])


@pytest.mark.parametrize("gap, value, gradient", [
  (0.0, 0.0, 0.0), (3.0, 4.5, 3.0), (-3.0, 4.5, -3.0), (4.0, 8.0, 4.0),
  # Past the clamp, at sqrt(20) nats: counted, not followed.
  (6.0, 10.0, 0.0), (-6.0, 10.0, 0.0), (25.0, 10.0, 0.0),
  (math.inf, 10.0, 0.0),
])  # fmt: skip
def test_k2_matches_hand_computation(gap, value, gradient):
  reference, mask = jnp.full((1, 1), -2.0), jnp.ones((1, 1), bool)
  loss = lambda x: losses.kl_k2(x, reference, mask, clamp=10.0).value
  got, grad = jax.value_and_grad(loss)(reference + gap)
  assert float(got) == pytest.approx(value)
  assert float(grad[0, 0]) == pytest.approx(gradient)


def test_k2_has_the_gradient_of_the_reverse_kl():
  """Exactly: each token of a categorical is counted with its probability."""
  kz, kr = jax.random.split(jax.random.key(1))
  z, reference = jax.random.normal(kz, (6,)), jax.random.normal(kr, (6,))
  log_r = jax.nn.log_softmax(reference)
  probability = jax.nn.softmax(z)  # of drawing the token: constant
  ones = jnp.ones((6, 1), bool)

  def expected_k2(z):
    logp = jax.nn.log_softmax(z)[:, None]
    return losses.kl_k2(
      logp, log_r[:, None], ones, clamp=10.0, weight=probability
    ).value

  def reverse_kl(z):
    logp = jax.nn.log_softmax(z)
    return jnp.sum(jnp.exp(logp) * (logp - log_r))

  want = jax.grad(reverse_kl)(z)
  assert float(jnp.max(jnp.abs(want))) > 0.1
  np.testing.assert_allclose(jax.grad(expected_k2)(z), want, atol=1e-6)


def test_ratios_are_exact_up_to_20_nats_and_finite_beyond():
  args = jnp.zeros((1, 1)), jnp.array([-1.0]), jnp.ones((1, 1), bool)
  for function in (ppo, gspo):
    loss = lambda gap, function=function: (
      function(jnp.full((1, 1), gap), *args, **CLIP)[0].value
    )
    np.testing.assert_allclose(loss(19.0), np.exp(19.0), rtol=1e-5)
    value, grad = jax.value_and_grad(loss)(500.0)
    np.testing.assert_allclose(value, np.exp(20.0), rtol=1e-5)
    assert grad == 0.0


def test_ppo_is_its_equation_and_a_correction_no_part_of_the_count():
  logp, old, advantage, mask = args = example()
  factor = 2.0 * jax.random.uniform(jax.random.key(7), logp.shape)
  got, stats = ppo(*args, **CLIP, correction=factor)
  plain, plain_stats = ppo(*args, **CLIP)
  total = count = held = alone = 0.0
  for b, t in np.argwhere(np.asarray(mask)):
    rho, a = np.exp(float(logp[b, t] - old[b, t])), float(advantage[b])
    clipped = min(max(rho, 0.8), 1.28) * a
    alone -= min(rho * a, clipped)
    total -= min(rho * a, clipped) * float(factor[b, t])
    held += clipped < rho * a
    count += 1
  assert 0 < held < count  # both kinds are there
  assert float(plain.total) == pytest.approx(alone, rel=1e-5)
  assert float(got.total) == pytest.approx(total, rel=1e-5)
  assert float(got.count) == float(plain.count) == count
  assert float(stats.clip_fraction.value) == pytest.approx(held / count)
  numbers = lambda stats: [*map(float, jax.tree.leaves(stats))]
  assert numbers(stats) == numbers(plain_stats)  # of the policy alone


@pytest.mark.ci
def test_corrections_multiply_the_gradient_and_have_none():
  logp, old, advantage, mask = example()
  kt, ks = jax.random.split(jax.random.key(7))
  token = jax.random.uniform(kt, logp.shape)
  row = jax.random.uniform(ks, advantage.shape)
  for loss, factor, spread in ((ppo, token, token), (gspo, row, row[:, None])):
    total = lambda x, c: (
      loss(x, old, advantage, mask, **CLIP, correction=c)[0].total
    )
    with_factor, of_factor = jax.grad(total, argnums=(0, 1))(logp, factor)
    plain = jax.grad(lambda x: total(x, None))(logp)
    assert float(jnp.abs(plain).max()) > 0.1
    np.testing.assert_allclose(with_factor, plain * spread, rtol=1e-5)
    np.testing.assert_array_equal(of_factor, 0.0)


@pytest.mark.parametrize("bad", tiers.some([-jnp.inf, jnp.nan], 1))
def test_a_correction_off_the_mask_may_be_anything(bad):
  logp = jnp.array([[-1.0, bad], [bad, bad]])
  mask = jnp.array([[True, False], [False, False]])
  args = (jnp.array([[-1.0, -bad], [bad, -bad]]), jnp.array([1.0, 2.0]), mask)
  token, row = jnp.array([[3.0, bad], [bad, bad]]), jnp.array([3.0, bad])
  for loss, correction in ((ppo, token), (gspo, row)):
    run = lambda x: loss(x, *args, **CLIP, correction=correction)
    mean, stats = run(logp)
    assert (float(mean.value), float(mean.count)) == (-3.0, 1.0)
    assert float(stats.approx_kl.value) == 0.0
    grad = jax.grad(lambda x: run(x)[0].value)(logp)
    np.testing.assert_array_equal(grad, [[-3.0, 0.0], [0.0, 0.0]])


def test_a_correction_off_the_mask_makes_no_nan_on_the_way(bad=jnp.inf):
  """Nor one that a mask would take away again: 0 * inf in the gradient."""
  zero, mask = jnp.zeros((2, 2)), jnp.array([[True, False], [False, False]])
  token, row = jnp.where(mask, 1.0, bad), jnp.array([1.0, bad])
  for loss, correction in ((ppo, token), (gspo, row)):
    total = lambda x: (
      loss(x, zero, jnp.ones(2), mask, **CLIP, correction=correction)[0].value
    )
    with jax.debug_nans(True):
      grad = jax.grad(total)(zero)
    np.testing.assert_array_equal(grad, [[-1.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("ratio, advantage, value, slope", tiers.some([
  (1.0, 2.0, -2.0, -2.0), (1.1, 1.0, -1.1, -1.1), (1.29, 1.0, -1.28, 0.0),
  (1.27, 1.0, -1.27, -1.27), (0.79, -1.0, 0.8, 0.0), (0.81, -1.0, 0.81, 0.81),
  (0.5, 1.0, -0.5, -0.5), (1.5, -1.0, 1.5, 1.5),
], 2))  # fmt: skip
def test_gspo_by_hand(ratio, advantage, value, slope):
  """Log-ratios x + 1 and x - 1 of two tokens, of mean x = log s.

  Each token's gradient is half of d loss / d log s. A token's own ratio would
  be clipped in all these cases.
  """
  mask = jnp.array([[True, True, False]])
  logp = jnp.log(ratio) + jnp.array([[1.0, -1.0, 7.0]])
  args = (jnp.zeros((1, 3)), jnp.array([advantage]), mask)
  run = lambda x: gspo(x, *args, **CLIP)
  (mean, stats) = run(logp)
  assert float(mean.value) == pytest.approx(value, rel=1e-5)
  assert float(mean.count) == 1.0
  assert float(stats.clip_fraction.value) == (slope == 0.0)
  assert float(stats.clip_fraction.count) == 1.0
  grad = jax.grad(lambda x: run(x)[0].value)(logp)
  np.testing.assert_allclose(grad, [[slope / 2, slope / 2, 0.0]], rtol=1e-5)
  # k3 is of tokens, as in ppo.
  x = np.log(ratio) + np.array([1.0, -1.0])
  assert float(stats.approx_kl.count) == 2.0
  assert float(stats.approx_kl.value) == pytest.approx(
    np.mean(np.exp(x) - 1 - x), rel=1e-5
  )


@pytest.mark.ci
def test_gspo_counts_sequences():
  """However many tokens they have; one without any is none."""
  logp, old, advantage, mask = example(b=4, t=5)
  mask = jnp.array([5, 1, 0, 3])[:, None] > jnp.arange(5)[None]
  weight = jnp.array([2.5, 1.0, 4.0, 0.0])
  loss, stats = gspo(logp, old, advantage, mask, **CLIP, weight=weight)
  assert float(loss.count) == float(stats.clip_fraction.count) == 3.5
  assert float(stats.approx_kl.count) == 13.5
  total = 0.0
  for b, n in ((0, 5), (1, 1)):
    s = np.exp(np.mean(np.asarray(logp - old)[b, :n]))
    a = float(advantage[b])
    total -= float(weight[b]) * min(s * a, min(max(s, 0.8), 1.28) * a)
  assert float(loss.total) == pytest.approx(total, rel=1e-5)
  plain, _ = gspo(logp, old, advantage, mask, **CLIP)
  assert float(plain.count) == 3.0


def squared(logp, logp_old, advantage, mask):
  return (logp - logp_old - advantage[:, None]) ** 2


def mean_logp(logp, logp_old, advantage, mask, *, clip_high):
  """Of sequences; says where it holds."""
  mean = jnp.sum(logp, axis=1, where=mask) / jnp.sum(mask, axis=1)
  return -advantage * jnp.minimum(mean, clip_high), mean > clip_high


def example_of_policy_loss():
  rng = np.random.default_rng(0)
  logp, old = rng.normal(size=(2, 4, 3)).astype(np.float32)
  advantage = rng.normal(size=4).astype(np.float32)
  mask = np.arange(3) < np.array([3, 1, 0, 2])[:, None]
  return tuple(map(jnp.asarray, (logp, old, advantage, mask)))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_the_table_says_what_from_user_would_find(name):
  loss = losses.LOSSES[name]
  assert losses.from_user(loss.function, **CLIP, dual_clip=0.0) == loss
  assert hash(loss) == hash(dataclasses.replace(loss))


def test_the_unit_is_the_rank_of_what_a_loss_returns():
  loss, found = losses.PolicyLoss, lambda of: losses.from_user(of, **CLIP)
  assert found(squared) == loss(squared, "token", ())
  assert found(mean_logp) == loss(mean_logp, "sequence", ("clip_high",))
  any_option = lambda logp, *_, **options: logp * options["clip_low"]
  assert found(any_option).options == losses.OPTIONS[:2]  # those of CLIP


@pytest.mark.parametrize("function", [squared, mean_logp])
def test_an_own_loss_by_hand(function):
  """Of tokens, and of sequences, of which one has no token."""
  logp, old, advantage, mask = map(np.asarray, example_of_policy_loss())
  loss = losses.from_user(function, **CLIP)
  by_token = function is squared
  weight, scale = np.array([[2.0, 1.0, 5.0, 3.0], [1.0, 0.5, 9.0, 2.0]])
  correction = np.abs(old if by_token else advantage)
  options = {} if by_token else {"clip_high": 0.28}
  mean, stats = policy_loss(
    loss, *map(jnp.asarray, (logp, old, advantage, mask)),
    weight=jnp.float32(weight), scale=jnp.float32(scale),
    correction=jnp.asarray(correction), **options,
  )  # fmt: skip
  total = count = held = 0.0
  for b in (0, 1, 3):
    values = (logp[b] - old[b] - advantage[b])[mask[b]] ** 2
    if not by_token:
      middle = logp[b][mask[b]].mean()
      values = -advantage[b] * np.minimum([middle], 0.28)
      held += weight[b] * (middle > 0.28)
    factor = correction[b][mask[b]] if by_token else correction[b]
    total += (values * factor).sum() * weight[b] * scale[b]
    count += weight[b] * len(values)
  assert float(mean.total) == pytest.approx(total, rel=1e-5)
  assert float(mean.count) == count == (13 if by_token else 6)
  assert float(stats.clip_fraction.count) == (0 if by_token else count)
  assert float(stats.clip_fraction.total) == held


@pytest.mark.parametrize("bad", tiers.some([jnp.nan, 1e30], 1))
def test_an_own_loss_sees_nothing_off_the_mask(bad):
  """Nor an empty row, whose mean would be 0 / 0, in value or gradient."""
  logp, old, advantage, mask = example_of_policy_loss()
  spoil = lambda x: jnp.where(mask, x, bad)
  for function in (squared, mean_logp):
    loss = losses.from_user(function, **CLIP)
    options = {name: CLIP[name] for name in loss.options}
    run = lambda logp, old: (
      losses.policy_loss(loss, logp, old, advantage, mask, **options)[0].value
    )
    spoilt = spoil(logp), spoil(old)
    with jax.debug_nans(True):
      got = jax.value_and_grad(run)(*spoilt)
    want = jax.value_and_grad(run)(logp, old)
    assert float(got[0]) == float(want[0]) != 0.0
    np.testing.assert_array_equal(got[1], want[1])


def needs_beta(logp, logp_old, advantage, mask, *, beta):
  return logp * beta


@pytest.mark.parametrize("function, message", [
  (needs_beta, "'beta'"),
  (lambda logp: logp, "TypeError"),
  (lambda logp, *_: jnp.mean(logp), r"float32\[\] "),
  (lambda logp, *_: logp > 0, r" bool\[3,5\]"),
  (lambda logp, *_: (logp, logp), r"float32\[3,5\], float32\[3,5\]"),
  (lambda logp, *_: (logp, logp[:, 0] > 0), r"float32\[3,5\], bool\[3\]"),
  (lambda logp, *_: None, "NoneType"),
  (lambda logp, *_: 1 / 0, r"line \d+: ZeroDivisionError"),
])  # fmt: skip
def test_what_is_no_loss_is_refused_in_one_line(function, message):
  with pytest.raises(ValueError, match=message) as error:
    losses.from_user(function, **CLIP)
  assert "\n" not in str(error.value)
