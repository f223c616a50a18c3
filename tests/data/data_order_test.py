import collections
import random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refuses

from brorl_jax.data.data_order import Order, refuse_changes

FIRST = [("code", 3), ("gym", 0), ("math", 1), ("code", 5), ("math", 5),
  ("gym", 1), ("code", 2), ("math", 3), ("math", 7), ("math", 8)]  # fmt: skip
LATER = [("code", 6), ("gym", 200_000_000), ("math", 0), ("code", 2)]
SIZES = {"math": 10, "code": 7, "gym": None}
WEIGHTS = {"math": 5, "code": 3, "gym": 2}


def drawn(order, start, stop):
  return [order[i] for i in range(start, stop)]


def elements(order, source, stop):
  return [e for name, e in drawn(order, 0, stop) if name == source]


def test_the_order_never_changes():
  # Recorded once, with grain 0.2.18. A change here, by a grain that shuffles
  # or mixes in another way, changes the data of every resumed run.
  order = Order(SIZES, WEIGHTS, seed=3)
  assert drawn(order, 0, 10) == FIRST
  assert drawn(order, 10**9, 10**9 + 4) == LATER


@pytest.mark.parametrize("size", [1, 2, 10, 1_000])
def test_every_epoch_has_each_example_once_in_a_new_order(size):
  order = Order({"a": size}, {"a": 1}, seed=0)
  epochs = [
    [e for _, e in drawn(order, k * size, (k + 1) * size)] for k in range(3)
  ]
  assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
  if size >= 10:
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(range(size)) not in epochs


def test_sources_of_a_mixture():
  order = Order({**SIZES, "none": 3}, {**WEIGHTS, "none": 0}, seed=1)
  seen = elements(order, "code", 100)
  assert len(seen) == 30  # 4 epochs of 7, and 2
  for k in range(4):
    assert sorted(seen[7 * k : 7 * k + 7]) == list(range(7))
  # What is made as it goes counts up; weight 0 is never drawn.
  assert elements(order, "gym", 100) == list(range(20))
  assert elements(order, "none", 100) == []
  backwards = Order(
    dict(reversed(SIZES.items())), dict(reversed(WEIGHTS.items())), seed=1
  )
  assert drawn(order, 0, 99) == drawn(backwards, 0, 99)


@pytest.mark.ci
@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 100),
    min_size=1, max_size=5), st.integers(0, 10**6))  # fmt: skip
def test_any_stretch_has_the_sources_by_weight(weights, start):
  order = Order(dict.fromkeys(weights, 50), weights, seed=0)
  length = 150
  counts = collections.Counter(
    source for source, _ in drawn(order, start, start + length)
  )
  for name, weight in weights.items():
    share = length * weight / sum(weights.values())
    # A prompt or two at the ends of the stretch, and what grain rounds.
    assert abs(counts[name] - share) < 2 + 0.01 * share


@pytest.mark.ci
def test_a_resumed_run_goes_on_where_it_stopped():
  whole = drawn(Order(SIZES, WEIGHTS, seed=5), 0, 300)
  order = Order(SIZES, WEIGHTS, seed=5)
  places = random.Random(0).sample(range(300), 300)
  assert {i: order[i] for i in places} == dict(enumerate(whole))


@pytest.mark.ci
def test_seeds_and_sources_are_shuffled_apart():
  sizes, weights = {"a": 50, "b": 50}, {"a": 1, "b": 1}
  seen = []
  for seed in range(6):
    order = Order(sizes, weights, seed=seed)
    for source in sizes:
      epochs = elements(order, source, 300)
      seen += [tuple(epochs[k : k + 50]) for k in (0, 50, 100)]
  # No epoch of a seed is an epoch of its neighbour, which grain's own seeds,
  # seed + epoch, would make it.
  assert len(set(seen)) == len(seen) == 36


@pytest.mark.parametrize("seed", [0, 2**32, 2**70])
def test_any_seed_from_zero_will_do(seed):
  assert Order({"a": 3}, {"a": 0.5}, seed=seed)[10**15][1] in range(3)


@pytest.mark.parametrize("sizes, weights, said", [
  ({"a": 0}, {"a": 1}, "'a' ... 0 examples"),
  ({"a": 2**31}, {"a": 1}, "'a' ... 2147483648"),
  ({"a": 3}, {"a": 0}, "no weight ... positive"),
])  # fmt: skip
def test_refusals(sizes, weights, said):
  with refuses(ValueError, said):
    Order(sizes, weights, seed=0)


DATA = {"math": "aa", "code": "bb", "gym": "cc"}


@pytest.mark.parametrize(
  "change, said",
  tiers.some([
    ({"seed": 4}, "seed was 3 ... 4"),
    ({"data": {**DATA, "code": "xx"}},
      "source code was 7 examples ... digest bb ... digest xx"),
    ({"sizes": {**SIZES, "math": 11}}, "source math was 10 examples"),
    ({"sizes": {**SIZES, "gym": 5}}, "source gym was unbounded, weight 2.0"),
    ({"weights": {**WEIGHTS, "gym": 2.5}},
      "source gym ... weight 2.0 ... weight 2.5"),
    ({"sizes": {"math": 10, "code": 7}, "weights": {"math": 5, "code": 3}},
      "source gym was unbounded ... missing"),
    ({"sizes": {**SIZES, "new": 1}, "weights": {**WEIGHTS, "new": 1},
      "data": {**DATA, "new": "dd"}}, "source new was missing ... 1 examples"),
  ], 1),
)  # fmt: skip
def test_a_change_is_refused_by_name(change, said):
  start = Order(SIZES, WEIGHTS, seed=3).fingerprint(DATA)
  now = Order(
    change.get("sizes", SIZES), change.get("weights", WEIGHTS),
    seed=change.get("seed", 3),
  ).fingerprint(change.get("data", DATA))  # fmt: skip
  refuse_changes(start, start)
  with refuses(ValueError, said):
    refuse_changes(start, now)


def test_a_grain_that_orders_otherwise_is_seen(monkeypatch):
  order = Order(SIZES, WEIGHTS, seed=3)
  start = order.fingerprint(DATA)
  other = [order[i] for i in range(64)]
  other[40], other[41] = other[41], other[40]
  monkeypatch.setattr(Order, "__getitem__", lambda self, i: other[i])
  with pytest.raises(ValueError, match="changed: order was"):
    refuse_changes(start, order.fingerprint(DATA))
