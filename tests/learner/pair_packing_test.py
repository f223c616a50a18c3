"""Tests of brorl_jax/learner/pair_packing.py."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from messages import refuses

from brorl_jax.learner import pair_packing
from brorl_jax.learner.pair_packing import Layout, Pair


def some_pairs(count=12, seed=0):
  rng = np.random.default_rng(seed)
  ids = lambda low, high: rng.integers(1, 16, rng.integers(low, high)).tolist()
  return [Pair(ids(1, 5), ids(1, 4)) for _ in range(count)]


def place_all(lengths, layout, order=None):
  return [*pair_packing.epoch(lengths, layout, order or range(len(lengths)))]


def test_pairs_go_into_the_first_row_with_room():
  layout = Layout(tokens=10, rows=2, microbatches=1)
  # 0 and 2 fill the first row, 1 and 3 the second; 4 fits nowhere, 5 does.
  assert place_all([6, 5, 4, 4, 3, 1], layout) == [[[0, 2], [1, 3, 5]], [[4]]]


def test_as_many_as_there_are_rows_may_wait():
  layout = Layout(tokens=10, rows=1, microbatches=2)
  # 2 and 3 wait, so that 4, which would fit, is not looked at.
  assert place_all([9, 9, 2, 2, 1], layout) == [[[0], [1]], [[2, 3, 4]]]
  # The next update begins with what waited, before what was not looked at.
  assert place_all([9, 9, 8, 8, 8, 8], layout) == [
    [[0], [1]], [[2], [3]], [[4], [5]],
  ]  # fmt: skip


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  strategies.lists(strategies.integers(2, 12), min_size=1, max_size=60),
  strategies.integers(1, 4),
  strategies.randoms(),
)
def test_every_pair_is_placed_once_and_no_row_is_too_long(lengths, rows, rng):
  layout = Layout(tokens=12, rows=rows, microbatches=2)
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
  layout = Layout(tokens=8, rows=1, microbatches=3)
  rows = pair_packing.pack(pairs, [[2, 0], [1]], layout)
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
  pairs, layout = some_pairs(40), Layout(tokens=16, rows=2, microbatches=1)

  def take(seed, epochs=3):
    out = [[] for _ in range(epochs)]
    for number, rows in pair_packing.updates(pairs, layout, seed=seed):
      if number == epochs:
        return out
      out[number] += [pair for row in rows for pair in row]

  assert take(0) == take(0)
  different = [*take(0), *take(1)]
  assert len({tuple(x) for x in different}) == 6
  assert all(sorted(x) == list(range(40)) for x in different)
  counts = [
    pair_packing.updates_in(pairs, layout, epochs=n, seed=0) for n in (1, 2, 3)
  ]
  assert 0 < counts[0] < counts[1] < counts[2]
  assert counts[0] >= sum(len(p) + len(r) for p, r in pairs) / 32
  whole = [Pair([1] * 9, [1] * 7)] * 5  # each fills a row
  for epochs in (1, 2, 3):
    found = pair_packing.updates_in(whole, layout, epochs=epochs, seed=0)
    assert found == 3 * epochs


def test_microbatches_without_a_pair_are_not_used():
  pairs, layout = [Pair([1], [2])], Layout(tokens=4, rows=2, microbatches=3)
  used = [
    int(pair_packing.pack(pairs, [[0]] * rows, layout).used)
    for rows in range(1, 7)
  ]
  assert used == [1, 1, 2, 2, 3, 3]


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
  layout = Layout(tokens=9, rows=1, microbatches=1)
  pair_packing.check([Pair([1] * 8, [1])], layout, ["a"])
  with refuses(ValueError, says):
    pair_packing.check([Pair([1], [1]), pair], layout, ["a", "b"])
