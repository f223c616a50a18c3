"""Tests of brorl_jax/update.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from brorl_jax import sharding, update
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy
from brorl_jax.rl import losses
from brorl_jax.types import Prompts, Rollouts

P, N, S, T, V = 4, 12, 5, 4, 16
POLICY = Policy(
  vocab=V,
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_size=4,
  mlp=24,
  rope=Rope(100.0),
  norm_eps=1e-6,
  tied=True,
  qkv_bias=True,
)
OBJECTIVE = update.Objective(
  clip_low=0.2, clip_high=0.28, kl_weight=0.1, kl_clamp=10.0, temperature=1.0
)
GRADIENT = jax.jit(
  update.gradient, static_argnames=("response_logits", "objective")
)


def params(seed=0):
  # Larger than at initialisation, so that log-probabilities differ.
  init = POLICY.init(jax.random.key(seed))
  return jax.tree.map(lambda x: x * 8.0 if x.std() > 0.0 else x, init)


def rollouts(seed=0, kinds=5):
  """N rollouts of `kinds` different responses per prompt, on the host."""
  rng = np.random.default_rng(seed)
  which = rng.integers(0, kinds, (P, N))
  tokens = rng.integers(1, V, (P, kinds, T))
  length = rng.integers(1, T + 1, (P, kinds))
  take = lambda x: np.take_along_axis(
    x, which.reshape(P, N, *[1] * (x.ndim - 2)), axis=1
  )
  mask = np.arange(T) < take(length)[..., None]
  logp = take(rng.normal(-2.0, 0.3, (P, kinds, T)).astype(np.float32))
  return Rollouts(
    tokens=np.where(mask, take(tokens), 0).astype(np.int32),
    logp=np.where(mask, logp, 0.0).astype(np.float32),
    mask=mask,
    truncated=np.zeros((P, N), bool),
    occupancy=np.ones(P, np.float32),
  ), rng.normal(size=(P, kinds)).astype(np.float32)[
    np.arange(P)[:, None], which
  ]


def prompts(seed=0):
  rng = np.random.default_rng(seed)
  length = rng.integers(1, S + 1, P)
  mask = np.arange(S) >= S - length[:, None]
  tokens = np.where(mask, rng.integers(1, V, (P, S)), 0).astype(np.int32)
  return Prompts(tokens, mask, np.arange(P, dtype=np.int32))


def gradient(batch, reference=None, objective=OBJECTIVE, at=None):
  return GRADIENT(
    at or params(),
    reference,
    batch,
    response_logits=POLICY.response_logits,
    objective=objective,
  )


def packed(rows=4, blocks=3, roll=None):
  out, advantage = roll or rollouts()
  layout = update.Layout.of(P, N, rows=rows, blocks=blocks)
  return update.pack(prompts(), out, advantage, layout)


def plain_loss(at, out, advantage, reference=None):
  """Every rollout on its own, prompt and response joined, no blocks."""
  flat = lambda x: jnp.asarray(x).reshape(P * N, *x.shape[2:])
  spread = lambda x: np.repeat(x, N, axis=0)
  tokens = jnp.concatenate([spread(prompts().tokens), flat(out.tokens)], axis=1)
  mask = jnp.concatenate([spread(prompts().mask), flat(out.mask)], axis=1)

  def score(at):
    logits = POLICY.logits(at, tokens, mask)[:, S - 1 : -1]
    return losses.token_logp(logits, flat(out.tokens))[0]

  clip = dict(clip_low=0.2, clip_high=0.28)
  loss, _ = losses.ppo_clip(
    score(at), flat(out.logp), flat(advantage), flat(out.mask), **clip
  )
  total = loss.value
  if reference is not None:
    total += (
      0.1
      * losses.kl_k2(
        score(at), score(reference), flat(out.mask), clamp=10.0
      ).value
    )
  return total


def assert_close(got, want, rtol=1e-5):
  """Relative to the largest entry of the whole tree."""
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale),
    got,
    want,
  )


@pytest.mark.parametrize("with_reference", [False, True])
def test_gradient_equals_the_plain_form(with_reference):
  reference = params(1) if with_reference else None
  out, advantage = rollouts()
  grads, stats = gradient(packed(), reference)
  loss, want = jax.value_and_grad(plain_loss)(
    params(), out, advantage, reference
  )
  assert_close(grads, want)
  value = stats.loss.value + 0.1 * stats.kl_ref.value
  np.testing.assert_allclose(value, loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(stats.grad_norm, optax.tree.norm(want), rtol=1e-5)


@pytest.mark.parametrize("rows, blocks", [(1, 1), (2, 5), (5, 4), (12, 2)])
def test_microbatch_size_does_not_change_the_gradient(rows, blocks):
  assert_close(gradient(packed(rows, blocks))[0], gradient(packed())[0])


def test_a_mesh_does_not_change_the_gradient():
  want, _ = gradient(packed(blocks=4))
  for data, model in ((8, 1), (4, 2)):
    mesh = sharding.make_mesh(data, model)
    places = sharding.param_shardings(params(), mesh)
    spec = jax.sharding.PartitionSpec(None, "data")
    batch = jax.tree.map(
      lambda x, mesh=mesh: sharding.to_mesh(
        mesh, spec if x.ndim else jax.sharding.PartitionSpec(), x
      ),
      packed(blocks=8),
    )
    got, _ = gradient(batch, at=jax.device_put(params(), places))
    assert_close(got, want)


def test_gradient_matches_finite_differences():
  batch = packed()
  direction = params(3)
  loss = lambda eps: (lambda s: float(s.loss.value + 0.1 * s.kl_ref.value))(
    gradient(
      batch,
      params(1),
      at=jax.tree.map(lambda a, b: a + eps * b, params(), direction),
    )[1]
  )
  slope = (loss(1e-3) - loss(-1e-3)) / 2e-3
  grads, _ = gradient(batch, params(1))
  along = optax.tree.vdot(grads, direction)
  np.testing.assert_allclose(along, slope, rtol=2e-2)


def test_groups_without_advantage_contribute_nothing():
  out, advantage = rollouts()
  advantage[1] = 0.0
  objective = dataclasses.replace(OBJECTIVE, kl_weight=0.0)
  grads, _ = gradient(packed(roll=(out, advantage)), objective=objective)
  other = rollouts(seed=9)[0]
  swapped = jax.tree.map(
    lambda a, b: np.concatenate([a[:1], b[1:2], a[2:]]), out, other
  )
  more, stats = gradient(packed(roll=(swapped, advantage)), objective=objective)
  # The group's tokens count in the mean, its content does not matter.
  ratio = float(stats.loss.count) / out.mask.sum()
  assert_close(jax.tree.map(lambda g: g * ratio, more), grads)


def test_pack_keeps_one_of_identical_rollouts_with_its_count():
  out, advantage = rollouts(kinds=3)
  batch = packed(roll=(out, advantage))
  for p in range(P):
    weight = {}
    for n in range(N):
      key = (*out.tokens[p, n], int(out.mask[p, n].sum()))
      weight[key] = weight.get(key, 0) + 1
    rows = batch.weight > 0
    mine = rows & (batch.prompt == prompts().tokens[p]).all(-1)[..., None]
    got = {
      (*tokens, int(mask.sum())): count
      for tokens, mask, count in zip(
        batch.response[mine], batch.mask[mine], batch.weight[mine], strict=True
      )
    }
    assert got == weight
  assert batch.weight.sum() == P * N


def test_pack_tells_a_real_zero_token_from_padding():
  out, advantage = rollouts()
  out.tokens[0, :2] = [[3, 0, 0, 0], [3, 0, 0, 0]]
  out.mask[0, :2] = [[1, 0, 0, 0], [1, 1, 0, 0]]
  batch = packed(roll=(out, advantage))
  same = (batch.response == [3, 0, 0, 0]).all(-1) & (batch.weight > 0)
  assert sorted(batch.mask[same].sum(-1).tolist())[:2] == [1, 2]


def test_unused_microbatches_are_not_computed():
  batch = packed()
  assert batch.used < len(batch.prompt)
  poisoned = dataclasses.replace(batch, logp_old=batch.logp_old.copy())
  poisoned.logp_old[batch.used :] = np.nan
  poisoned.mask[batch.used :] = True
  assert_close(gradient(poisoned)[0], gradient(batch)[0], rtol=0)


def test_logp_gap_is_zero_for_the_policy_that_sampled():
  out, advantage = rollouts()
  batch = packed(roll=(out, advantage))
  flat = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])
  logits = POLICY.response_logits(
    params(), flat(batch.prompt), flat(batch.prompt_mask), flat(batch.response)
  )
  logp, entropy = losses.token_logp(logits, flat(batch.response))
  sampled = dataclasses.replace(batch, logp_old=logp.reshape(batch.mask.shape))
  _, stats = gradient(sampled)
  assert stats.logp_gap_max < 1e-5
  assert stats.clip_fraction.value == 0.0
  _, off = gradient(
    dataclasses.replace(sampled, logp_old=sampled.logp_old - 0.5)
  )
  np.testing.assert_allclose(off.logp_gap_max, 0.5, rtol=1e-4)
  np.testing.assert_allclose(off.logp_gap.value, 0.5, rtol=1e-4)
  weight = (batch.weight[..., None] * batch.mask).reshape(entropy.shape)
  np.testing.assert_allclose(
    stats.entropy.value, np.average(entropy, weights=weight), rtol=1e-5
  )


def test_temperature_divides_the_logits():
  out, advantage = rollouts()
  cold = dataclasses.replace(OBJECTIVE, temperature=0.5, kl_weight=0.0)
  _, stats = gradient(packed(roll=(out, advantage)), objective=cold)
  _, plain = gradient(packed(roll=(out, advantage)))
  assert stats.entropy.value < plain.entropy.value - 0.1


def test_not_finite_gradients_are_named():
  batch = packed()
  batch.advantage[0, 0] = np.nan
  _, stats = gradient(batch)
  assert not stats.finite.all()
  path = update.first_bad_path(params(), np.asarray(stats.finite))
  assert path == "blocks/down/kernel"
  assert update.first_bad_path(params(), np.ones(13, bool)) is None


def test_what_is_watched_changes_by_its_derivative_along_the_step():
  batch = packed()
  flat = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])

  def loglikelihood(response, params):
    logits = POLICY.response_logits(
      params, flat(batch.prompt), flat(batch.prompt_mask), response
    )
    return jnp.mean(losses.token_logp(logits, response)[0])

  response = flat(batch.response)
  watch = jax.tree_util.Partial(loglikelihood, response)
  errors = []
  for lr in (0.1, 0.01):  # of plain gradient descent, Adam's has no limit
    state, stats = update.minibatch_step(
      update.init_state(params(), tx := optax.sgd(lr), keep_reference=False),
      batch,
      tx=tx,
      response_logits=POLICY.response_logits,
      objective=OBJECTIVE,
      watch=watch,
    )
    change = watch(state.params) - watch(params())
    assert abs(change) > 1e-5
    errors.append(abs(stats.watched / change - 1.0))
  assert errors[1] < 0.02
  assert errors[1] < errors[0] / 4


def test_what_is_watched_is_the_slope_at_the_old_parameters():
  # Of large eps: with a small one rounding may turn the sign of an update.
  tx = optax.adamw(0.1, eps=0.1, weight_decay=0.1)
  tokens, mask = map(jnp.asarray, (packed().prompt[0], packed().prompt_mask[0]))

  def entropy(tokens, mask, params):
    logits = POLICY.logits(params, tokens, mask)
    return jnp.mean(losses.token_logp(logits, tokens)[1], where=mask)

  watch = jax.tree_util.Partial(entropy, tokens, mask)
  grads, _ = gradient(packed())
  updates, _ = tx.update(grads, tx.init(params()), params())
  _, want = jax.jvp(watch, (params(),), (updates,))
  _, stats = update.minibatch_step(
    update.init_state(params(), tx, keep_reference=False),
    packed(),
    tx=tx,
    response_logits=POLICY.response_logits,
    objective=OBJECTIVE,
    watch=watch,
  )
  assert abs(want) > 1e-2
  np.testing.assert_allclose(stats.watched, want, rtol=1e-4)


def test_minibatch_step_applies_what_optax_says():
  tx, _ = update.optimizer(
    lr=1e-2,
    warmup=0,
    total=None,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
  )
  state = update.init_state(params(), tx, keep_reference=True)
  before = jax.tree.map(np.asarray, state.params)
  reference = jax.tree.map(np.asarray, state.reference)
  grads, _ = gradient(packed(), state.reference)
  updates, _ = tx.update(grads, tx.init(before), before)
  want = optax.apply_updates(before, updates)
  state, _ = update.minibatch_step(
    state,
    packed(),
    tx=tx,
    response_logits=POLICY.response_logits,
    objective=OBJECTIVE,
  )
  # Adam divides by the root of the gradient's square: rounding of a gradient
  # that is almost 0 may turn its sign.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
    state.params,
    want,
  )
  jax.tree.map(np.testing.assert_array_equal, state.reference, reference)


def test_schedule_rises_over_the_warmup_and_stays_or_falls():
  make = functools.partial(
    update.optimizer,
    lr=1.0,
    warmup=4,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
  )
  _, constant = make(total=None)
  np.testing.assert_allclose(
    [constant(i) for i in range(6)], [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
  )
  _, cosine = make(total=14)
  np.testing.assert_allclose(
    [cosine(i) for i in (3, 4, 9, 14)], [1.0, 1.0, 0.5, 0.0], atol=1e-6
  )


def test_split_is_a_shuffled_partition_of_whole_groups():
  parts = update.split(12, 3, (0, 5))
  assert parts.shape == (3, 4)
  assert sorted(parts.ravel().tolist()) == list(range(12))
  assert not np.array_equal(parts, update.split(12, 3, (0, 6)))
  np.testing.assert_array_equal(parts, update.split(12, 3, (0, 5)))
