"""Tests of brorl_jax/learner/supervised.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from brorl_jax.learner import supervised
from brorl_jax.learner.pair_packing import Layout, Pair
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

POLICY = Policy(
  vocab=16, width=16, layers=1, heads=4, kv_heads=2, head_size=4, mlp=16,
  rope=Rope(100.0), norm_eps=1e-6, tied=True, qkv_bias=True,
)  # fmt: skip


def some_pairs(count=12, seed=0):
  rng = np.random.default_rng(seed)
  ids = lambda low, high: rng.integers(1, 16, rng.integers(low, high)).tolist()
  return [Pair(ids(1, 5), ids(1, 4)) for _ in range(count)]


@functools.cache
def start():
  return POLICY.init(jax.random.key(0))


def copy(tree):
  return jax.tree.map(jnp.copy, tree)


def by_hand(params, pairs):
  """Nats per response token, each pair in a row of its own."""
  total = count = 0.0
  width = max(len(p) + len(r) for p, r in pairs)
  rows = np.zeros((len(pairs), width), np.int32)
  mask = np.zeros(rows.shape, bool)
  for i, (prompt, response) in enumerate(pairs):
    rows[i, : len(prompt) + len(response)] = [*prompt, *response]
    mask[i, : len(prompt) + len(response)] = True
  logits = jax.jit(POLICY.logits)(params, jnp.asarray(rows), jnp.asarray(mask))
  logp = np.asarray(jax.nn.log_softmax(logits))
  for i, (prompt, response) in enumerate(pairs):
    for j, token in enumerate(response):
      total -= logp[i, len(prompt) + j - 1, token]
      count += 1
  return total / count


def run(pairs, layout, count, seed=0, lr=0.03, tx=None, params=None, **more):
  looks = []
  trained = supervised.train(
    copy(start() if params is None else params),
    pairs,
    packed_logp=more.pop("policy", POLICY).packed_logp,
    tx=tx or optax.adamw(lr),
    layout=layout,
    count=count,
    seed=seed,
    look=looks.append,
    **more,
  )
  return trained, looks


SMALL = Layout(tokens=16, rows=2, microbatches=2)


@pytest.mark.ci
def test_losses_are_those_of_the_responses_alone():
  pairs, heldout = some_pairs(9), some_pairs(7, seed=1)
  one = Layout(tokens=16, rows=8, microbatches=2)  # all of them in an update
  trained, looks = run(pairs, one, 1, heldout=heldout)
  before, after = looks
  assert before.update == before.tokens == 0 and before.loss is None
  assert before.heldout == pytest.approx(by_hand(start(), heldout), rel=1e-5)
  assert after.update == 1 and after.epochs == 1.0
  assert after.tokens == sum(len(x.response) for x in pairs)
  assert after.loss == pytest.approx(by_hand(start(), pairs), rel=1e-5)
  assert after.heldout == pytest.approx(by_hand(trained, heldout), rel=1e-5)


@pytest.mark.ci
def test_neither_packing_nor_microbatches_change_an_update():
  pairs = some_pairs(9)
  sgd = optax.sgd(1.0)
  want, _ = run(pairs, Layout(64, 1, 1), 1, tx=sgd)
  moved = [
    float(jnp.abs(a - b).max())
    for a, b in zip(
      jax.tree.leaves(want), jax.tree.leaves(start()), strict=True
    )
  ]
  assert max(moved) > 0.01
  for layout in (Layout(16, 16, 1), Layout(16, 1, 16), Layout(24, 2, 3)):
    got, _ = run(pairs, layout, 1, tx=sgd)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.ci
def test_a_mesh_changes_no_update():
  pairs = some_pairs(9)
  mesh = meshes.make_mesh(fsdp=4, tensor=2)
  places = sharding.param_shardings(start(), mesh)
  want, _ = run(pairs, Layout(16, 4, 3), 1, heldout=pairs)
  got, looks = run(
    pairs,
    Layout(16, 4, 3),
    1,
    heldout=pairs,
    params=jax.device_put(start(), places),
    policy=dataclasses.replace(POLICY, mesh=mesh),
    mesh=mesh,
  )
  assert looks[1].heldout < looks[0].heldout
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert len(a.sharding.device_set) == 8


@pytest.mark.ci
def test_training_lowers_both_losses_and_is_deterministic():
  # What follows the prompt is its last token, repeated, and an end.
  pairs = [Pair([a, b], [b, b, 15]) for a in range(1, 8) for b in range(1, 8)]
  heldout, pairs = pairs[::5], [x for i, x in enumerate(pairs) if i % 5]
  one, looks = run(pairs, SMALL, 60, heldout=heldout)
  two, again = run(pairs, SMALL, 60, heldout=heldout)
  assert looks == again
  jax.tree.map(np.testing.assert_array_equal, one, two)
  assert [x.update for x in looks] == [0, *range(6, 61, 6)]
  assert looks[-1].heldout < 0.7 * looks[0].heldout
  assert looks[-1].loss < 0.8 * looks[1].loss
  assert looks[-1].tokens == pytest.approx(3 * 39 * looks[-1].epochs)
  _, other = run(pairs, SMALL, 1, seed=1)
  assert other[0].heldout is None and other[1].loss != looks[1].loss


@pytest.mark.ci
def test_a_loss_that_is_not_finite_stops():
  with pytest.raises(FloatingPointError, match=r"update [1-9].*learning rate"):
    run(some_pairs(), SMALL, 20, tx=optax.sgd(1e30))
