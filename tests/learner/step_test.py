"""Tests of brorl_jax/learner/step.py."""

import dataclasses
import functools
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiers
from compiled import compilations
from one_step import groups
from update_cases import OBJECTIVE, POLICY, packed, params, rollouts

from brorl_jax.learner import optimizer, row_packing, update
from brorl_jax.learner import step as steps
from brorl_jax.learner.layout import Layout
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.rl.arrays import Mean


def packed_tokens(parts):
  """Every token that the loss sees: how often, and its advantage."""
  seen = {}
  for batch in (batch for part in parts for batch in part):
    for at in np.argwhere(batch.mask):
      row = tuple(at[:-1])
      assert int(batch.response[tuple(at)]) not in seen
      seen[int(batch.response[tuple(at)])] = (
        float(batch.weight[row]),
        float(batch.advantage[row]),
      )
  return seen


def test_rollouts_that_do_not_count_are_not_packed():
  some = groups(
    [[1, 0, 1, 0], [0, 0, 1, 1]], length=[[1, 2, 3, 4], [4, 4, 1, 1]]
  )
  cut = np.array([[False, False, False, True], [True, True, False, False]])
  advantage = np.arange(8, dtype=np.float32).reshape(2, 4)
  minibatches = lambda counted: steps.minibatches(
    some,
    advantage,
    counted,
    Layout(rows=2, blocks=2, length=4, prompt=5),
    count=2,
    seed=(0, 1),
    scale=lambda length: None,
  )
  parts = minibatches(~cut)
  want = {}
  for p, n, t in np.argwhere(some.rollouts.mask):
    if not cut[p, n]:
      token = int(some.rollouts.tokens[p, n, t])
      want[token] = (1.0, float(advantage[p, n]))
  assert packed_tokens(parts) == want and len(want) == 1 + 2 + 3 + 1 + 1
  # Five count, and all of them differ.
  shares = steps.packing_metrics(parts, 5)
  assert shares["update/distinct_fraction"] == 1.0
  parts = minibatches(np.ones((2, 4), bool))
  assert len(packed_tokens(parts)) == some.rollouts.mask.sum() == 20


def test_why_an_update_was_skipped():
  params = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}
  good = update.Stats.zero(params)
  finite = jnp.array([True, False])
  assert steps.skipped([good], params, 7) == ()
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
    assert steps.skipped([good, bad], params, 7) == (head + why,)


def test_a_parameter_that_is_not_finite_is_named():
  params = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}
  good = update.Stats.zero(params)
  bad = dataclasses.replace(good, finite=jnp.array([True, False]))
  with pytest.raises(
    FloatingPointError, match=r"step 7: b/c is not .*lower .*optim\.lr"
  ):
    steps.skipped([good, bad], params, 7)


def test_metrics_are_those_of_the_updates_that_were_applied():
  good = dataclasses.replace(
    update.Stats.zero(params()),
    loss=Mean(jnp.array(6.0), jnp.array(2.0)),
    grad_norm=jnp.array(4.0),
  )
  bad = dataclasses.replace(
    good,
    loss=Mean(jnp.array(jnp.nan), jnp.array(2.0)),
    skipped=jnp.array(True),
  )
  plain = dataclasses.replace(OBJECTIVE, kl_weight=0.0, entropy_weight=0.0)
  numbers = steps.update_metrics([bad, good], plain)
  assert numbers["loss/total"] == 3.0 and numbers["optim/grad_norm"] == 4.0
  assert numbers["update/skipped"] == 1.0
  numbers = steps.update_metrics([bad, bad], OBJECTIVE)
  assert numbers["loss/total"] is numbers["optim/grad_norm"] is None
  assert numbers["policy/kl_ref"] is None
  assert numbers["update/skipped"] == 2.0


TX = optax.adam(0.1)
HOW = dict(tx=TX, response_logp=POLICY.response_logp, objective=OBJECTIVE)
LOGP_OF = functools.partial(
  update.logp_of, temperature=1.0, response_logp=POLICY.response_logp
)


def one_device():
  return meshes.over([jax.devices()[:1]], meshes.ONE)


def in_batches(monkeypatch, seed=0):
  """A minibatch of several batches."""
  monkeypatch.setattr(row_packing, "MICROBATCHES", 1)
  return packed(rows=1, blocks=8, roll=rollouts(seed, kinds=12))


def state_on(mesh):
  make = functools.partial(
    optimizer.init_state, params(), TX, keep_reference=True
  )
  abstract = jax.eval_shape(make)
  places = sharding.state_shardings(abstract, abstract.params, mesh)
  return jax.device_put(
    dataclasses.replace(make(), reference=params(1)), places
  )


def all_at_once(state, parts, mesh):
  """The updates of a step whose batches are all on the devices."""
  there = [[steps.placed(batch, mesh) for batch in part] for part in parts]
  for name, at in (("logp_old", state.params), ("logp_ref", state.reference)):
    there = [
      [dataclasses.replace(b, **{name: LOGP_OF(at, b)}) for b in part]
      for part in there
    ]
  stats = []
  for part in there:
    state, of_part = update.minibatch_step(state, part, **HOW)
    stats.append(of_part)
  return state, stats


@pytest.mark.slow
@pytest.mark.parametrize("devices", [tiers.at_night(1), 8])
def test_batches_that_are_placed_in_turn_give_the_same_bits(
  devices, monkeypatch
):
  mesh = meshes.make_mesh(fsdp=4, tensor=2) if devices == 8 else one_device()
  parts = [in_batches(monkeypatch, seed) for seed in range(2)]
  assert min(map(len, parts)) > 2
  want = all_at_once(state_on(mesh), parts, mesh)
  there, most, place = [], [], steps.placed

  def placed(batch, mesh):
    most.append(sum(one() is not None for one in there))
    out = place(batch, mesh)
    there.append(weakref.ref(out.response))
    return out

  monkeypatch.setattr(steps, "placed", placed)
  start = state_on(mesh)
  known = steps.scored(parts, start, mesh, logp_of=LOGP_OF, kl_term=True)
  batches = sum(map(len, parts))
  assert most == [0] * batches  # a scored one is gone before the next comes
  for batch in (batch for part in known for batch in part):
    assert {type(x) for x in jax.tree.leaves(batch)} == {np.ndarray}
  state, stats = steps.apply(start, known, mesh, watch=None, **HOW)
  assert len(most) == 2 * batches and max(most) == 1
  assert int(state.step) == 1
  chex.assert_trees_all_equal(
    (state.params, state.opt), (want[0].params, want[0].opt)
  )
  chex.assert_trees_all_equal(stats, want[1])
  again = state_on(mesh)
  with compilations() as programs:
    known = steps.scored(parts, again, mesh, logp_of=LOGP_OF, kl_term=True)
    steps.apply(again, known, mesh, watch=None, **HOW)
  assert not programs


@pytest.mark.parametrize("count, kl_term", [(1, False), (1, True), (2, False)])
def test_only_what_the_loss_needs_is_scored(count, kl_term):
  mesh = one_device()
  parts, seen = [packed()] * count, []
  state = state_on(mesh)

  def logp_of(at, batch):
    seen.append(at is state.params)
    return jnp.zeros_like(batch.logp_sampled)

  known = steps.scored(parts, state, mesh, logp_of=logp_of, kl_term=kl_term)
  for batch in (batch for part in known for batch in part):
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
  update.minibatch_step(state_on(one_device()), batches(), **HOW)
  assert events[:4] == ["batch 0", "wait", "batch 1", "wait"]
