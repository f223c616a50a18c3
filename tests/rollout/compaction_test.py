"""Tests of brorl_jax/rollout/compaction.py, by hand."""

import dataclasses

import numpy as np
import pytest
from small_decoders import Table

from brorl_jax.rollout import compaction
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.slots import DecodeProgress


def spec(lanes, slots, pages=3, blocks=0):
  return ProgramSpec(
    Table(), SamplingParams(), (0,), slots, 5 * pages, lanes, slots, 5, None,
    blocks=blocks,
  )  # fmt: skip


def progress(lanes, slots, waiting=0):
  return DecodeProgress(
    slots, lanes, 9, lanes * slots, waiting, 1, 0, 0, 0, np.zeros(1, bool)
  )


def shrunk(full, *busy):
  got = compaction.shrunk(full, full, progress(*busy))
  return got.lanes, got.slots


@pytest.mark.parametrize(
  "lanes, slots, pool, by_lanes",
  [
    (16, 64, False, {16: [64, 16], 4: [64, 16], 1: [64, 16, 4]}),
    (64, 128, False, {64: [128, 24], 8: [128, 24], 1: [128, 24, 4]}),
    (32, 4, False, {32: [4], 6: [4], 1: [4]}),
    (4, 2, False, {4: [2], 1: [2]}),
    (1, 64, False, {1: [64, 32, 16, 8, 4]}),
    (1, 512, False, {1: [512, 232, 104, 48, 24, 12, 4]}),
    (1, 64, True, {1: [64, 16, 4, 1]}),
    (1, 3, False, {1: [3]}),
  ],
)
def test_the_sizes(lanes, slots, pool, by_lanes):
  want = {(a, r) for a, own in by_lanes.items() for r in own}
  assert set(compaction.sizes(lanes, slots, pool=pool)) == want


@pytest.mark.parametrize("pool", [False, True])
def test_there_are_at_most_seven_sizes_of_any_number(pool):
  for lanes in (1, 2, 3, 7, 32, 100, 1024):
    for slots in (1, 2, 5, 48, 512, 16384):
      got = compaction.sizes(lanes, slots, pool=pool)
      assert got[0] == (lanes, slots) and len(got) == len(set(got)) <= 7
      assert all(1 <= a <= lanes and 1 <= r <= slots for a, r in got)


@pytest.mark.parametrize(
  "busy, want",
  [
    ((16, 64), (16, 64)), ((5, 17), (16, 64)), ((5, 16), (16, 16)),
    ((4, 16), (4, 16)), ((3, 5), (4, 16)), ((3, 17), (4, 64)),
    ((1, 16), (1, 16)), ((1, 1), (1, 4)), ((0, 0), (1, 4)),
  ],
)  # fmt: skip
def test_the_smallest_size_that_holds_what_is_busy(busy, want):
  assert shrunk(spec(16, 64), *busy) == want


@pytest.mark.parametrize(
  "busy, slots", [(64, 64), (33, 64), (32, 32), (16, 16), (5, 8), (2, 4)]
)
def test_slots_of_a_single_lane_shrink_to_a_half(busy, slots):
  assert shrunk(spec(1, 64), 1, busy) == (1, slots)


def test_over_a_pool_slots_shrink_to_one():
  assert shrunk(spec(1, 64, blocks=99), 1, 1) == (1, 1)
  assert shrunk(spec(16, 64, blocks=99), 16, 1) == (16, 8)


def test_what_was_dropped_does_not_come_back():
  full = spec(16, 64)
  now = dataclasses.replace(full, lanes=4, slots=16)
  for busy in ((4, 16), (2, 3), (1, 1)):
    got = compaction.shrunk(full, now, progress(*busy))
    assert got.lanes <= 4 and got.slots <= 16
  assert (got.lanes, got.slots) == (1, 4)


def test_nothing_shrinks_while_rollouts_wait_or_for_one_page():
  for one, waiting in ((spec(16, 64), 1), (spec(16, 64, pages=1), 0)):
    assert shrunk(one, 1, 1, waiting) == (16, 64)
