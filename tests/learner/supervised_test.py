"""Tests of brorl_jax/learner/supervised.py."""

import dataclasses
import functools
import itertools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies
from messages import refuses
from update_cases import POLICY

from brorl_jax.learner import supervised
from brorl_jax.learner.supervised import Pair, PairLayout
from brorl_jax.many import meshes
from brorl_jax.model import sharding


def some_pairs(count=12, seed=0):
  rng = np.random.default_rng(seed)
  ids = lambda low, high: rng.integers(1, 16, rng.integers(low, high)).tolist()
  return [Pair(ids(1, 5), ids(1, 4)) for _ in range(count)]


def place_all(lengths, layout, order=None):
  return [*supervised.epoch(lengths, layout, order or range(len(lengths)))]


def test_pairs_go_into_the_first_row_with_room():
  layout = PairLayout(tokens=10, rows=2, microbatches=1)
  # 0 and 2 fill the first row, 1 and 3 the second; 4 fits nowhere, 5 does.
  assert place_all([6, 5, 4, 4, 3, 1], layout) == [[[0, 2], [1, 3, 5]], [[4]]]
  layout = PairLayout(tokens=10, rows=1, microbatches=2)
  # 2 and 3 wait, so that 4, which would fit, is not looked at. The next update
  # begins with what waited.
  assert place_all([9, 9, 2, 2, 1], layout) == [[[0], [1]], [[2, 3, 4]]]


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
  strategies.lists(strategies.integers(2, 12), min_size=1, max_size=60),
  strategies.integers(1, 4),
  strategies.randoms(),
)
def test_every_pair_is_placed_once_and_no_row_is_too_long(lengths, rows, rng):
  layout = PairLayout(tokens=12, rows=rows, microbatches=2)
  order = list(range(len(lengths)))
  rng.shuffle(order)
  found = place_all(lengths, layout, order)
  placed = [pair for update in found for row in update for pair in row]
  assert sorted(placed) == sorted(order)
  assert all(1 <= len(update) <= 2 * rows for update in found)
  sums = [sum(lengths[p] for p in row) for update in found for row in update]
  assert 0 < min(sums) and max(sums) <= 12
  # An update is left only if what waits fits nowhere in it.
  for update, later in itertools.pairwise(found):
    filled = [sum(lengths[p] for p in row) for row in update]
    assert len(update) == 2 * rows
    assert lengths[later[0][0]] > 12 - min(filled)


def test_rows_by_hand():
  pairs = [Pair([1, 2], [3]), Pair([4], [5, 6]), Pair([7, 8, 9], [10])]
  layout = PairLayout(tokens=8, rows=1, microbatches=3)
  rows = supervised.pack(pairs, [[2, 0], [1]], layout)
  assert rows.tokens[:, 0].tolist() == [
    [7, 8, 9, 10, 1, 2, 3, 0], [4, 5, 6, 0, 0, 0, 0, 0], [0] * 8,
  ]  # fmt: skip
  assert rows.segment[:, 0].tolist() == [
    [1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0, 0, 0], [0] * 8,
  ]  # fmt: skip
  assert rows.counts[:, 0].astype(int).tolist() == [
    [0, 0, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0] * 8,
  ]  # fmt: skip
  assert rows.used == 2  # the third microbatch is not computed
  assert rows.tokens.dtype == rows.segment.dtype == np.int32


def test_the_order_is_that_of_seed_and_epoch():
  pairs, layout = some_pairs(40), PairLayout(tokens=16, rows=2, microbatches=1)

  def take(seed, epochs=3):
    out = [[] for _ in range(epochs)]
    for number, rows in supervised.updates(pairs, layout, seed=seed):
      if number == epochs:
        return out
      out[number] += [pair for row in rows for pair in row]

  assert take(0) == take(0)
  different = [*take(0), *take(1)]
  assert len({tuple(x) for x in different}) == 6
  assert all(sorted(x) == list(range(40)) for x in different)
  whole = [Pair([1] * 9, [1] * 7)] * 5  # each fills a row
  assert supervised.updates_in(whole, layout, epochs=2, seed=0) == 6


@pytest.mark.parametrize(
  "pair, says",
  [
    (Pair([], [1]), "b: the prompt has no tokens"),
    (Pair([1], []), "b: the response has no tokens"),
    (
      Pair([1] * 900, [1] * 200),
      "b: prompt and response have 1,100 tokens ... 9 of a row",
    ),
  ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(pair, says):
  layout = PairLayout(tokens=9, rows=1, microbatches=1)
  supervised.check([Pair([1] * 8, [1])], layout, ["a"])
  with refuses(ValueError, says):
    supervised.check([Pair([1], [1]), pair], layout, ["a", "b"])


@functools.cache
def start():
  return POLICY.init(jax.random.key(0))


def copy(tree):
  return jax.tree.map(jnp.copy, tree)


def by_hand(params, pairs):
  """Nats per response token, each pair alone in a row."""
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


SMALL = PairLayout(tokens=16, rows=2, microbatches=2)


@pytest.mark.ci
def test_losses_are_those_of_the_responses_alone():
  pairs, heldout = some_pairs(9), some_pairs(7, seed=1)
  one = PairLayout(
    tokens=16, rows=8, microbatches=2
  )  # all of them in an update
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
  want, _ = run(pairs, PairLayout(64, 1, 1), 1, tx=sgd)
  moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), want, start())
  assert max(jax.tree.leaves(moved)) > 0.01
  got, _ = run(pairs, PairLayout(24, 2, 3), 1, tx=sgd)
  chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.ci
def test_a_mesh_changes_no_update():
  pairs = some_pairs(9)
  mesh = meshes.make_mesh(fsdp=4, tensor=2)
  places = sharding.param_shardings(start(), mesh)
  want, _ = run(pairs, PairLayout(16, 4, 3), 1, heldout=pairs)
  got, looks = run(
    pairs,
    PairLayout(16, 4, 3),
    1,
    heldout=pairs,
    params=jax.device_put(start(), places),
    policy=dataclasses.replace(POLICY, mesh=mesh),
    mesh=mesh,
  )
  assert looks[1].heldout < looks[0].heldout
  chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-3)
  assert {len(x.sharding.device_set) for x in jax.tree.leaves(got)} == {8}


@pytest.mark.ci
def test_training_lowers_both_losses_and_is_deterministic():
  # What follows the prompt is its last token, repeated, and an end.
  pairs = [Pair([a, b], [b, b, 15]) for a in range(1, 8) for b in range(1, 8)]
  heldout, pairs = pairs[::5], [x for i, x in enumerate(pairs) if i % 5]
  one, looks = run(pairs, SMALL, 30, heldout=heldout)
  two, again = run(pairs, SMALL, 30, heldout=heldout)
  assert looks == again
  jax.tree.map(np.testing.assert_array_equal, one, two)
  assert [x.update for x in looks] == [0, *range(3, 31, 3)]
  assert looks[-1].heldout < 0.8 * looks[0].heldout
  assert looks[-1].loss < 0.9 * looks[1].loss
  assert looks[-1].tokens == pytest.approx(3 * 39 * looks[-1].epochs)
  _, other = run(pairs, SMALL, 1, seed=1)
  assert other[0].heldout is None and other[1].loss != looks[1].loss


@pytest.mark.ci
def test_a_loss_that_is_not_finite_stops():
  with pytest.raises(FloatingPointError, match=r"update [1-9].*learning rate"):
    run(some_pairs(), SMALL, 20, tx=optax.sgd(1e30))
