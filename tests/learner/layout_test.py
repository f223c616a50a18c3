"""Tests of brorl_jax/learner/layout.py."""

import pytest

from brorl_jax.learner.layout import Layout


@pytest.mark.parametrize(
  "length, blocks",
  [
    (6, {6: 3}),
    (63, {63: 3}),
    (64, {32: 6, 64: 3}),
    (127, {32: 11, 64: 5, 127: 3}),
    (130, {33: 11, 65: 6, 98: 3, 130: 3}),
    (256, {32: 24, 64: 12, 96: 8, 128: 6, 192: 4, 256: 3}),
    (4096, {128: 96, 192: 64, 256: 48, 384: 32, 512: 24, 768: 16, 1024: 12}
     | {1536: 8, 2048: 6, 3072: 4, 4096: 3}),
  ],
)  # fmt: skip
def test_lengths_by_hand(length, blocks):
  some = Layout(8, 3, length, 0)
  assert some.lengths == [*blocks]
  assert {x: some.blocks_of(x, 8) for x in some.lengths} == blocks
  assert all(some.blocks_of(x, 2) >= 4 * n for x, n in blocks.items())


def test_no_microbatch_has_more_positions_than_the_longest():
  some = Layout(16, 8, 256, 100, devices=4)
  most = 8 * (100 + 16 * 256)
  for rows in (some.rows, some.fewer):
    for length in some.lengths:
      blocks = some.blocks_of(length, rows)
      each = 100 + rows * length
      assert blocks % 4 == 0 and blocks * each <= most < (blocks + 4) * each


@pytest.mark.parametrize(
  "layout, want",
  [
    # 16 (40 + 192) = 3,712 positions; a quarter: 7 x 128, 3 x 256, 1 x 512.
    (Layout(32, 16, 6, 40), [(7, 128), (3, 256), (1, 512)]),
    (Layout(8, 1, 6, 40), [(1, 128)]),  # 88 positions
    (Layout(32, 16, 6, 40, devices=4), [(4, 128), (4, 256), (4, 512)]),
    (Layout(32, 16, 6, 40, devices=8), [(8, 128), (8, 256)]),  # 464 for each
    (Layout(32, 16, 100, 200), [(26, 512)]),
    (Layout(32, 16, 100, 412), [(28, 512)]),
    (Layout(32, 16, 101, 412), []),
    (Layout(8, 1, 40, 200), [(1, 256), (1, 512)]),  # 520 positions
    (Layout(7, 1, 44, 203), [(1, 256)]),  # 511
    (Layout(7, 1, 44, 204), [(1, 256), (1, 512)]),  # 512
  ],
)
def test_rows_of_trees_by_hand(layout, want):
  assert layout.trees == want
