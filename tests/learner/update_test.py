"""Tests of brorl_jax/learner/update.py."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_decoder
import pytest
import tiers
from compiled import compiled, zeros_of
from one_step import groups
from small_policies import response_logits
from update_cases import (
  OBJECTIVE,
  POLICY,
  Blocks,
  N,
  P,
  T,
  assert_close,
  gradient,
  packed,
  params,
  placed,
  plan_of,
  prompts,
  rollouts,
)

from brorl_jax.learner import packing, update
from brorl_jax.learner import state as states
from brorl_jax.learner.objective import loss_and_stats
from brorl_jax.learner.packing import Layout
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.rl import losses
from brorl_jax.rl.arrays import Mean

TX = optax.adam(0.1)
HOW = dict(tx=TX, response_logp=POLICY.response_logp, objective=OBJECTIVE)


def with_reference(batches, reference):
  return [dataclasses.replace(batch, logp_ref=scores(reference, batch))
    for batch in batches]  # fmt: skip


def scores(at, batch, temperature=1.0):
  batch = jax.tree.map(jnp.asarray, batch)
  return update.logp_of(
    at, batch, temperature, response_logp=POLICY.response_logp
  )


@pytest.mark.ci
@pytest.mark.parametrize("axes",
  [dict(fsdp=4, tensor=2), tiers.at_night(dict(data=2, fsdp=2, expert=2))],
  ids=str)  # fmt: skip
def test_a_mesh_does_not_change_the_gradient(axes):
  want, _ = gradient(packed())
  mesh = meshes.make_mesh(**axes)
  at = jax.device_put(params(), sharding.param_shardings(params(), mesh))
  policy = dataclasses.replace(POLICY, mesh=mesh)
  got, _ = gradient(placed(mesh, blocks=8), at, policy)
  assert_close(got, want)


def exchanged(mesh):
  """(collective, numbers of its result) in the program of a batch."""
  policy = dataclasses.replace(POLICY, vocab=512, mesh=mesh)
  at = zeros_of(policy.init, jax.random.key(0))
  at = jax.device_put(at, sharding.param_shardings(at, mesh))
  parts = {x.size // x.addressable_data(0).size for x in jax.tree.leaves(at)}
  # Biases and norms: one axis to cut.
  assert parts <= {1, 8}
  (batch,) = placed(mesh, rows=12, blocks=8)
  program = compiled(functools.partial(update.add_gradient,
      response_logp=policy.response_logp, objective=OBJECTIVE),
    jax.jit(update.zero_gradient)(at), at, batch)  # fmt: skip
  operations = re.findall(
    r" = (.*?) ((?:all-|collective-|reduce-s)[a-z]+)\S*\(", program.as_text()
  )
  size = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
  return policy, [(kind, size(shape)) for result, kind in operations
    for shape in re.findall(r"\w\d+\[([\d,]*)\]", result)]  # fmt: skip


@pytest.mark.perf
def test_devices_exchange_weights_and_sums_of_their_own_but_no_logits():
  policy, seen = exchanged(meshes.make_mesh(fsdp=8))
  embedding = policy.vocab * policy.width
  assert max(size for _, size in seen) <= embedding < 12 * T * policy.vocab / 2
  kinds = {kind for kind, _ in seen}
  assert kinds == {"all-gather", "all-reduce", "reduce-scatter"}
  # Biases of all layers are whole on every device; nothing else is.
  heads = (policy.heads + 2 * policy.kv_heads) * policy.head_size
  for kind, size in seen:
    if kind == "all-reduce":
      assert size <= policy.layers * heads
    if kind == "reduce-scatter":
      assert size <= policy.vocab * policy.width // 8


def loss_in_float64(at, out, advantage, reference):
  """Each rollout by itself, by a decoder written with loops."""
  wide = functools.partial(np.asarray, dtype=np.float64)
  total = 0.0
  for p, n in np.ndindex(P, N):
    prompt = prompts().tokens[p, prompts().mask[p]]
    length = out.mask[p, n].sum()
    token, old = out.tokens[p, n, :length], wide(out.logp[p, n, :length])

    def score(at, prompt=prompt, token=token, length=length):
      ids = np.concatenate([prompt, token])
      logits = plain_decoder.logits(POLICY, at, ids)[-length - 1 : -1]
      whole = np.log(np.exp(logits).sum(axis=1))
      return logits[np.arange(length), token] - whole

    logp = score(at)
    ratio = np.exp(logp - old)
    gain = np.minimum(
      ratio * advantage[p, n], np.clip(ratio, 0.8, 1.28) * advantage[p, n]
    )
    total += np.sum(-gain + 0.1 * (logp - score(reference)) ** 2 / 2)
  return total / out.mask.sum()


@pytest.mark.ci
def test_gradient_matches_finite_differences_in_float64():
  wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
  out, advantage = rollouts(kinds=3)
  batches = packed(roll=(out, advantage))
  grads, stats = gradient(with_reference(batches, params(1)))
  value = stats.loss.value + 0.1 * stats.kl_ref.value
  want = loss_in_float64(wide(params()), out, advantage, wide(params(1)))
  np.testing.assert_allclose(value, want, rtol=1e-5)
  norm = float(optax.tree.norm(grads))
  np.testing.assert_allclose(stats.grad_norm, norm, rtol=1e-5)
  for seed in (3, 4):
    along = POLICY.init(jax.random.key(seed))
    along = jax.tree.map(lambda x: x / optax.tree.norm(along), along)
    ends = [loss_in_float64(
        jax.tree.map(lambda a, b: a + eps * b, wide(params()), wide(along)),
        out, advantage, wide(params(1))) for eps in (-1e-5, 1e-5)]  # fmt: skip
    slope = (ends[1] - ends[0]) / 2e-5
    got = optax.tree.vdot(wide(grads), wide(along))
    np.testing.assert_allclose(got, slope, rtol=0, atol=1e-5 * norm)


@pytest.mark.ci
@pytest.mark.parametrize("remat", ["products", tiers.at_night("nothing")])
def test_what_is_computed_twice_does_not_change_the_gradient(remat):
  policy = dataclasses.replace(POLICY, remat=remat)
  want, _ = gradient(packed())
  assert_close(gradient(packed(), policy=policy)[0], want, rtol=1e-6)


@pytest.mark.perf
def test_what_is_computed_twice():
  """Products of a layer, forward and backward."""
  batch = jax.tree.map(lambda x: x[0] if x.ndim else x, packed()[-1])

  def products(remat):
    policy = dataclasses.replace(POLICY, remat=remat)
    loss = functools.partial(
      loss_and_stats, response_logp=policy.response_logp, objective=OBJECTIVE
    )
    jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(params(), batch)
    return str(jaxpr).count("dot_general")

  # Of prompts and of responses seven products with weights, but the last three
  # of a layer need only two of their inputs again.
  attention = 2 + 4
  assert products("layer") > products("products") > products("nothing")
  assert products("products") - products("nothing") == attention


def test_unused_microbatches_are_not_computed():
  batches = packed()
  assert all(batch.used < len(batch.prompt) for batch in batches)
  want = gradient(batches)[0]
  for batch in batches:
    batch.logp_sampled[batch.used :] = np.nan
    batch.mask[batch.used :] = True
  assert_close(gradient(batches)[0], want, rtol=0)


def scored(batches, at, temperature=1.0):
  """Log-probabilities and entropies of every row, by logits."""
  for batch in batches:
    flat = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])
    logits = response_logits(POLICY, at, flat(batch.prompt),
      flat(batch.prompt_mask), flat(batch.response))  # fmt: skip
    yield tuple(x.reshape(batch.mask.shape) for x in losses.token_logp(
        logits / temperature, flat(batch.response)))  # fmt: skip


@pytest.mark.ci
def test_logp_gap_is_zero_for_the_policy_that_sampled():
  batches = packed()
  logp, entropy = zip(*scored(batches, params()), strict=True)
  with_logp = lambda field, shift: [
    dataclasses.replace(batch, **{field: x + shift})
    for batch, x in zip(batches, logp, strict=True)
  ]
  _, stats = gradient(with_logp("logp_sampled", 0.0))
  assert stats.logp_gap_max < 1e-5 and stats.clip_fraction.value == 0.0
  _, off = gradient(with_logp("logp_sampled", -0.5))
  np.testing.assert_allclose(off.logp_gap_max, 0.5, rtol=1e-4)
  np.testing.assert_allclose(off.logp_gap.value, 0.5, rtol=1e-4)
  weight = [batch.weight[..., None] * batch.mask for batch in batches]
  join = lambda xs: np.concatenate([np.ravel(x) for x in xs])
  want = np.average(join(entropy), weights=join(weight))
  np.testing.assert_allclose(stats.entropy.value, want, rtol=1e-5)


@pytest.mark.ci
def test_the_ratio_is_to_the_old_policy_and_the_gap_to_the_sampler():
  batches = packed()
  old = [dataclasses.replace(batch, logp_old=scores(params(), batch, 0.7))
    for batch in batches]  # fmt: skip
  for batch in old:
    assert not np.any(batch.logp_old[int(batch.used) :])
  for batch, (logp, _) in zip(old, scored(batches, params(), 0.7), strict=True):
    real = np.arange(len(batch.prompt)) < batch.used
    np.testing.assert_allclose(batch.logp_old[real], logp[real], atol=1e-5)
  objective = dataclasses.replace(OBJECTIVE, temperature=0.7)
  grads, stats = gradient(old, objective=objective)
  assert stats.clip_fraction.value == 0.0 and stats.kl_old.value < 1e-9
  _, plain = gradient(batches, objective=objective)
  assert plain.kl_old.value > 0.1
  np.testing.assert_allclose(stats.logp_gap.value, plain.logp_gap.value)
  # At a ratio of 1 the loss is minus the mean advantage.
  out, advantage = rollouts()
  want = -np.average(
    np.broadcast_to(advantage[..., None], out.mask.shape), weights=out.mask
  )
  np.testing.assert_allclose(stats.loss.value, want, rtol=1e-5)
  assert optax.tree.norm(grads) > 0.0


def spoiled(what):
  batches = packed()
  batches[-1] = dataclasses.replace(batches[-1],
    advantage=np.array(batches[-1].advantage),
    logp_sampled=np.array(batches[-1].logp_sampled))  # fmt: skip
  if what == "advantage":
    batches[-1].advantage[0, 0] = np.nan
  else:
    batches[-1].logp_sampled[0, 0, 0, 0] = -np.inf
  return batches


@pytest.mark.parametrize("what", ["advantage", "sampled", "norm"])
def test_an_update_that_cannot_be_trusted_changes_no_bit(what):
  start = states.init_state(params(), TX, keep_reference=False)
  start, first = update.minibatch_step(start, packed(), **HOW)
  assert not first.skipped and first.finite.all()
  before = jax.tree.map(np.array, start)
  norm = float(first.grad_norm)
  batches = packed() if what == "norm" else spoiled(what)
  after, stats = update.minibatch_step(
    start, batches, most_norm=norm / 1e3 if what == "norm" else np.inf, **HOW
  )
  assert stats.skipped and bool(stats.finite.all()) == (what != "advantage")
  chex.assert_trees_all_equal(after, before)  # the moments and counts too
  # The buffers can be used again, and a good update continues from there.
  again, stats = update.minibatch_step(after, packed(), **HOW)
  assert not stats.skipped
  want = jax.tree.map(jnp.asarray, before)
  want, _ = update.minibatch_step(want, packed(), **HOW)
  chex.assert_trees_all_equal(again, want)


@pytest.mark.ci
def test_what_is_watched_is_the_slope_at_the_old_parameters():
  # Of large eps: with a small one rounding may turn the sign of an update.
  tx = optax.adamw(0.1, eps=0.1, weight_decay=0.1)
  one = packed()[0]
  tokens, mask = jnp.asarray(one.prompt[0]), jnp.asarray(one.prompt_mask[0])

  def entropy(tokens, mask, params):
    logits = POLICY.logits(params, tokens, mask)
    return jnp.mean(losses.token_logp(logits, tokens)[1], where=mask)

  watch = jax.tree_util.Partial(entropy, tokens, mask)
  grads, _ = gradient(packed())
  updates, _ = tx.update(grads, tx.init(params()), params())
  _, want = jax.jvp(watch, (params(),), (updates,))
  _, stats = update.minibatch_step(
    states.init_state(params(), tx, keep_reference=False), packed(),
    watch=watch, **HOW | {"tx": tx})  # fmt: skip
  assert abs(want) > 1e-2
  np.testing.assert_allclose(stats.watched, want, rtol=1e-4)


def test_minibatch_step_applies_what_optax_says():
  tx, _ = states.adamw(lr=1e-2, warmup=0, b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0)  # fmt: skip
  state = states.init_state(params(), tx, keep_reference=True)
  before = jax.tree.map(np.asarray, state.params)
  reference = jax.tree.map(np.asarray, state.reference)
  batches = with_reference(packed(), reference)
  old = state
  grads, _ = gradient(batches)
  updates, _ = tx.update(grads, tx.init(before), before)
  want = optax.apply_updates(before, updates)
  state, _ = update.minibatch_step(state, batches, **HOW | {"tx": tx})
  # Adam divides by the root of the gradient's square: rounding of a gradient
  # that is almost 0 may turn its sign.
  chex.assert_trees_all_close(state.params, want, atol=2e-4)
  chex.assert_trees_all_equal(state.reference, reference)
  # Its memory is used again, but for what numpy looks at; so is that of sums.
  assert all(x.is_deleted() for x in jax.tree.leaves(old.opt))
  sums = jax.jit(update.zero_gradient)(params())
  how = dict(response_logp=POLICY.response_logp, objective=OBJECTIVE)
  update._add(sums, params(), batches[0], **how)
  assert all(x.is_deleted() for x in jax.tree.leaves(sums[0]))


@pytest.mark.ci
def test_a_length_is_compiled_once(monkeypatch, three_lengths):
  add = jax.jit(chex.assert_max_traces(update.add_gradient, n=3),
    static_argnames=("response_logp", "objective"),
    donate_argnames="sums")  # fmt: skip
  monkeypatch.setattr(update, "_add", add)
  mesh = meshes.make_mesh(fsdp=4, tensor=2)
  places = sharding.param_shardings(params(), mesh)
  tx = optax.sgd(0.1)
  make = functools.partial(states.init_state, tx=tx, keep_reference=False)
  abstract = jax.eval_shape(make, params())
  out = sharding.state_shardings(abstract, abstract.params, mesh)
  state = jax.jit(make, out_shardings=out)(jax.device_put(params(), places))
  lengths = set()
  for seed in range(2):
    layout = functools.partial(Blocks, devices=4)
    roll = rollouts(seed, kinds=12)
    batches = placed(mesh, rows=1, blocks=4, roll=roll, layout=layout)
    lengths |= {batch.mask.shape[-1] for batch in batches}
    state, _ = update.minibatch_step(state, batches, **HOW | {"tx": tx})
  assert lengths == {1, 2, 4}  # or chex would not have refused the fourth


def packed_tokens(parts):
  """Every token that the loss sees: how often, and its advantage."""
  seen = {}
  for batch in (batch for plan in parts for batch in plan.batches()):
    for at in np.argwhere(batch.mask):
      row = tuple(at[:-1])
      assert int(batch.response[tuple(at)]) not in seen
      said = float(batch.weight[row]), float(batch.advantage[row])
      seen[int(batch.response[tuple(at)])] = said
  return seen


def test_rollouts_that_do_not_count_are_not_packed():
  it = groups([[1, 0, 1, 0], [0, 0, 1, 1]], length=[[1, 2, 3, 4], [4, 4, 1, 1]])
  cut = np.array([[False, False, False, True], [True, True, False, False]])
  advantage = np.arange(8, dtype=np.float32).reshape(2, 4)
  minibatches = lambda counted: update.minibatches(it, advantage, counted,
    Layout(rows=2, blocks=2, length=4, prompt=5), count=2, seed=(0, 1),
    scale=lambda length: None)  # fmt: skip
  parts = minibatches(~cut)
  want = {}
  for p, n, t in np.argwhere(it.rollouts.mask):
    if not cut[p, n]:
      want[int(it.rollouts.tokens[p, n, t])] = (1.0, float(advantage[p, n]))
  assert packed_tokens(parts) == want and len(want) == 1 + 2 + 3 + 1 + 1
  # Five count, and all of them differ.
  assert update.packing_metrics(parts, 5)["update/distinct_fraction"] == 1.0
  parts = minibatches(np.ones((2, 4), bool))
  assert len(packed_tokens(parts)) == it.rollouts.mask.sum() == 20


def test_why_an_update_was_skipped():
  params = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}
  good = update.Stats.zero(params)
  finite = jnp.array([True, False])
  assert update.skipped([good], params, 7) == ()
  no = dataclasses.replace(good, skipped=jnp.array(True))
  loss = Mean(jnp.array(jnp.nan), jnp.array(2.0))
  cases = {
    "that of b/c is not finite": dict(finite=finite),
    "the loss is nan": dict(finite=finite, loss=loss),
    "a log-probability of sampler or trainer is not finite": dict(
      logp_gap_max=jnp.array(jnp.inf), loss=loss
    ),
    "its norm is inf": dict(grad_norm=jnp.array(jnp.inf)),
    "its norm is 12, a spike": dict(grad_norm=jnp.array(12.0)),
  }
  for why, changes in cases.items():
    bad = dataclasses.replace(no, **changes)
    head = "the gradient of update 2 was not applied: "
    assert update.skipped([good, bad], params, 7) == (head + why,)


def test_a_parameter_that_is_not_finite_is_named():
  params = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}
  good = update.Stats.zero(params)
  bad = dataclasses.replace(good, finite=jnp.array([True, False]))
  with pytest.raises(
    FloatingPointError, match=r"step 7: b/c is not .*lower .*optim\.lr"
  ):
    update.skipped([good, bad], params, 7)


def test_metrics_are_those_of_the_updates_that_were_applied():
  good = dataclasses.replace(update.Stats.zero(params()),
    loss=Mean(jnp.array(6.0), jnp.array(2.0)),
    grad_norm=jnp.array(4.0))  # fmt: skip
  bad = dataclasses.replace(
    good, loss=Mean(jnp.array(jnp.nan), jnp.array(2.0)), skipped=jnp.array(True)
  )
  plain = dataclasses.replace(OBJECTIVE, kl_weight=0.0, entropy_weight=0.0)
  numbers = update.update_metrics([bad, good], plain)
  assert numbers["loss/total"] == 3.0 and numbers["optim/grad_norm"] == 4.0
  assert numbers["update/skipped"] == 1.0
  numbers = update.update_metrics([bad, bad], OBJECTIVE)
  assert numbers["loss/total"] is numbers["optim/grad_norm"] is None
  assert numbers["policy/kl_ref"] is None
  assert numbers["update/skipped"] == 2.0


def one_device():
  return meshes.over([jax.devices()[:1]], meshes.ONE)


def in_batches(monkeypatch, seed=0):
  monkeypatch.setattr(packing, "MICROBATCHES", 1)
  return packed(rows=1, blocks=8, roll=rollouts(seed, kinds=12))


def state_on(mesh):
  new = functools.partial(states.init_state, params(), TX, keep_reference=True)
  abstract = jax.eval_shape(new)
  places = sharding.state_shardings(abstract, abstract.params, mesh)
  return jax.device_put(dataclasses.replace(new(), reference=params(1)), places)


@pytest.mark.parametrize("count, kl_term", [(1, False), (1, True), (2, False)])
def test_only_what_the_loss_needs_is_scored(count, kl_term):
  mesh = one_device()
  parts, seen = [plan_of().later] * count, []
  state = state_on(mesh)

  def logp_of(at, batch):
    seen.append(at is state.params)
    return jnp.zeros_like(batch.logp_sampled)

  known = update.scored(parts, state, mesh, logp_of=logp_of, kl_term=kl_term)
  for batch in (later.make(slice(None)) for part in known for later in part):
    assert (batch.logp_old is not None) == (count > 1)
    assert (batch.logp_ref is not None) == kl_term
  assert seen.count(True) == (count > 1) * sum(map(len, parts))
  assert seen.count(False) == kl_term * sum(map(len, parts))


@pytest.mark.ci
def test_updates_wait_for_their_batches_in_turn(monkeypatch):
  """The host runs ahead of devices: it must not place what waits."""
  events = []
  wait = jax.block_until_ready

  def batches():
    for i, batch in enumerate(in_batches(monkeypatch)):
      events.append(f"batch {i}")
      yield batch

  monkeypatch.setattr(
    jax, "block_until_ready", lambda x: events.append("wait") or wait(x)
  )
  trim = lambda: events.append("trim")  # what the batch before took
  monkeypatch.setattr(update.processes, "trim", trim)
  update.minibatch_step(state_on(one_device()), batches(), **HOW)
  assert events[:4] == ["batch 0", "wait", "trim", "batch 1"]
  assert events[-2:] == ["wait", "trim"]


@pytest.mark.ci
def test_groups_sum_the_same_gradient(monkeypatch):
  batches, (one, two) = in_batches(monkeypatch), ({}, {"groups": 2})
  held, add = [], update._add

  def alone(*args, **how):  # programs start one at a time
    held.append(update.processes.launching.locked())
    return add(*args, **how)

  monkeypatch.setattr(update, "_add", alone)
  make = lambda how: update.minibatch_step(
    state_on(one_device()), batches, **HOW, **how
  )
  chex.assert_trees_all_close(make(one), make(two), atol=1e-6)
  assert held and all(held)
