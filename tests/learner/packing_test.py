"""Tests of brorl_jax/learner/packing.py."""

import numpy as np
import pytest
from update_cases import N, P, S, T, packed, prompts, rollouts

from brorl_jax.learner import packing, row_packing
from brorl_jax.learner.layout import Layout, Source
from brorl_jax.types import Prompts, Rollouts


def distinct_of(out):
  return [out.distinct(p) for p in range(P)]


pytestmark = pytest.mark.usefixtures("three_lengths")


def test_pack_keeps_one_of_identical_rollouts_with_its_count():
  out, advantage = rollouts(kinds=3)
  batches = packed(roll=(out, advantage))
  for p in range(P):
    weight = {}
    for n in range(N):
      key = (*out.tokens[p, n], int(out.mask[p, n].sum()))
      weight[key] = weight.get(key, 0) + 1
    got = {}
    for batch in batches:
      rows = batch.weight > 0
      mine = rows & (batch.prompt == prompts().tokens[p]).all(-1)[..., None]
      for tokens, mask, count in zip(
        batch.response[mine], batch.mask[mine], batch.weight[mine], strict=True
      ):
        padded = np.pad(tokens, (0, T - len(tokens)))
        got[(*padded, int(mask.sum()))] = count
    assert got == weight
  assert sum(batch.weight.sum() for batch in batches) == P * N


def test_pack_tells_a_real_zero_token_from_padding():
  out, advantage = rollouts()
  out.tokens[0, :2] = [[3, 0, 0, 0], [3, 0, 0, 0]]
  out.mask[0, :2] = [[1, 0, 0, 0], [1, 1, 0, 0]]
  found = []
  for batch in packed(roll=(out, advantage)):
    start = np.array([3, 0, 0, 0])[: batch.response.shape[-1]]
    same = (batch.response == start).all(-1) & (batch.weight > 0)
    found += batch.mask[same].sum(-1).tolist()
  assert sorted(found)[:2] == [1, 2]


def test_split_is_a_shuffled_partition_of_whole_groups():
  parts = packing.split(12, 3, (0, 5))
  assert parts.shape == (3, 4)
  assert sorted(parts.ravel().tolist()) == list(range(12))
  assert not np.array_equal(parts, packing.split(12, 3, (0, 6)))
  np.testing.assert_array_equal(parts, packing.split(12, 3, (0, 5)))


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
def test_lengths_by_hand(length, blocks, monkeypatch):
  monkeypatch.undo()
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


def test_a_block_has_rollouts_of_one_prompt_and_similar_length():
  out, advantage = rollouts(kinds=12)
  batches = packed(rows=3, blocks=2, roll=(out, advantage))
  lengths = [batch.mask.shape[-1] for batch in batches]
  assert lengths == sorted(lengths) and set(lengths) == {1, 2, 4}
  for p in range(P):
    first, _ = out.distinct(p)
    mine = []
    for block in row_packing.blocks(out, distinct_of(out), 3):
      if block.prompt == p:
        length = out.mask[p, block.rollout].sum(axis=1).tolist()
        assert block.length == max(length) and len(length) <= 3
        mine += length
    assert mine == sorted(out.mask[p, first].sum(axis=1).tolist())[::-1]
  for batch in batches:
    C, B, R, L = batch.mask.shape
    assert (C, B, R) == (8, Layout(3, 2, T, S).blocks_of(L, 3), 3)
    rows = batch.weight.sum(-1) > 0
    longest = batch.mask.sum(-1).max(-1)
    assert (longest[rows] > L // 2).all() or L == 1
    assert rows.reshape(-1)[: (int(batch.used) - 1) * B + 1].all()
    assert not rows[int(batch.used) :].any()


def test_more_microbatches_than_a_batch_holds_make_another(monkeypatch):
  monkeypatch.setattr(row_packing, "MICROBATCHES", 2)
  out, advantage = rollouts(kinds=12)
  few = packed(rows=1, blocks=1, roll=(out, advantage))
  used = [(batch.mask.shape[-1], int(batch.used)) for batch in few]
  assert [x for x in used if x[1] < 2].__len__() <= 3
  assert all(1 <= n <= 2 for _, n in used) and len(used) > 6
  assert sum(batch.weight.sum() for batch in few) == P * N


def test_padding_by_hand():
  out, advantage = rollouts(kinds=1)
  out.mask[:] = np.arange(T) < 3
  batches = packed(rows=2, blocks=3, roll=(out, advantage))
  # 4 blocks of 1 of 2 rows, 3 of 4 tokens: 2 microbatches of 3 blocks with
  # 5 places for the prompt and 2 x 4 for responses.
  tokens = prompts().mask.sum() + 4 * 3
  want = 1 - tokens / (2 * 3 * (5 + 2 * 4))
  np.testing.assert_allclose(packing.padding_fraction(batches), want)


def some_lengths(*lengths):
  """One prompt's distinct rollouts of these lengths, and what is packed."""
  T, N = max(lengths), len(lengths)
  mask = np.arange(T) < np.array(lengths)[:, None]
  tokens = np.where(mask, 1 + np.arange(N)[:, None], 0).astype(np.int32)
  out = Rollouts(
    tokens[None],
    np.zeros((1, N, T), np.float32),
    mask[None],
    np.zeros((1, N), bool),
    np.ones(1, np.float32),
  )
  one = Prompts(
    np.ones((1, 3), np.int32), np.ones((1, 3), bool), np.zeros(1, np.int32)
  )
  return Source(one, out, np.zeros((1, N), np.float32), None), [out.distinct(0)]


def test_what_fills_less_than_half_a_microbatch_goes_to_the_next_length():
  # Of 1 row: 8 blocks of up to 1 token in a microbatch, 4 of 2, 2 of 4.
  source, distinct = some_lengths(1, 1, 1, 2, 2, 2, 2, 2, 2, 4, 4)
  some = Layout(1, 2, 4, 0)
  plan = row_packing.plan(source, distinct, some, 1)
  # The 3 of one token join the 6 of two: 9 are 2 microbatches and one block,
  # which joins the 2 of four tokens.
  count = {x: len(blocks) for x, blocks in plan.by_length.items()}
  assert count == {2: 8, 4: 3}
  assert plan.positions == 2 * 4 * (3 + 2) + 2 * 2 * (3 + 4)
  assert plan.positions == sum(
    int(b.used) * (b.prompt[0].size + b.mask[0].size)
    for b in row_packing.batches(source, plan, some)
  )


@pytest.mark.parametrize("count, rows", [(16, 16), (17, 4)])
def test_fewer_rows_where_they_make_less_padding(count, rows):
  source, _ = some_lengths(*[16] * count)
  # 17 rows: 2 blocks of 16 are 518 positions, 6 blocks of 4 are 402.
  (batch,) = packing.pack(
    source.prompts, source.rollouts, source.advantage, Layout(16, 1, 16, 3)
  )
  assert batch.mask.shape[2] == rows
  assert batch.mask.sum() == 16 * count


@pytest.mark.parametrize(
  "unit, mean, want",
  [
    ("token", "token", None),
    # 6 tokens in 3 rollouts of 2 prompts; two rollouts have none.
    ("token", "sequence", [[1, 2, 0], [2 / 3, 0, 0]]),
    ("token", "prompt", [[1, 1, 0], [1, 0, 0]]),
    ("token", "constant", [[0.5, 0.5, 0], [0.5, 0, 0]]),
    ("sequence", "token", [[2, 2, 0], [2, 0, 0]]),
    ("sequence", "sequence", [[2, 2, 0], [2, 0, 0]]),
    ("sequence", "prompt", [[1.5, 1.5, 0], [3, 0, 0]]),
  ],
)
def test_factors_of_the_loss_by_hand(unit, mean, want):
  length = np.array([[2, 1, 0], [3, 0, 0]])
  got = packing.loss_scale(length, unit=unit, mean=mean, constant=4)
  if want is None:
    assert got is None
  else:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_factors_of_nothing_are_0():
  nothing = np.zeros((2, 3), int)
  for mean in ("sequence", "prompt", "constant"):
    got = packing.loss_scale(nothing, unit="token", mean=mean, constant=4)
    np.testing.assert_array_equal(got, 0.0)
