"""Tests of brorl_jax/rollout/compaction.py, by hand."""

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


@pytest.mark.parametrize(
  "busy, want",
  [
    ((16, 64), (16, 64)),
    ((5, 17), (16, 64)),
    ((4, 16), (4, 16)),
    ((3, 5), (4, 16)),
    ((1, 16), (1, 16)),
    ((1, 1), (1, 4)),
    ((0, 0), (1, 4)),
  ],
)
def test_the_smallest_sizes_that_hold_what_is_busy(busy, want):
  got = compaction.shrunk(spec(16, 64), progress(*busy))
  assert (got.lanes, got.slots) == want


@pytest.mark.parametrize(
  "busy, slots", [(64, 64), (33, 64), (32, 32), (16, 16), (5, 8), (2, 4)]
)
def test_slots_of_a_single_lane_shrink_to_a_half(busy, slots):
  assert compaction.shrunk(spec(1, 64), progress(1, busy)).slots == slots


def test_over_a_pool_slots_shrink_to_a_quarter():
  got = compaction.shrunk(spec(16, 64, blocks=99), progress(16, 1))
  assert (got.lanes, got.slots) == (16, 1)
  got = compaction.shrunk(spec(16, 64, blocks=99), progress(16, 17))
  assert got.slots == 64


def test_nothing_shrinks_while_rollouts_wait_or_for_one_page():
  for one, waiting in ((spec(16, 64), 1), (spec(16, 64, pages=1), 0)):
    assert compaction.shrunk(one, progress(1, 1, waiting)) == one


def test_how_many_sizes_there_are():
  # 16 or 4 lanes of 64, 16, 4 slots; one of 64, 32, 16, 8, 4.
  assert compaction.sizes(spec(16, 64)) == 2 * 3 + 5
  assert compaction.sizes(spec(8, 16)) == 2 * 2 + 3
  assert compaction.sizes(spec(1, 512)) == 8
  assert compaction.sizes(spec(1, 64, blocks=99)) == 4
  assert compaction.sizes(spec(16, 64, pages=1)) == 1
