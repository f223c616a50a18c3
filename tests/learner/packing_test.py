"""Tests of brorl_jax/learner/packing.py."""

import numpy as np
import pytest
from update_cases import N, P, T, packed, prompts, rollouts

from brorl_jax.learner import packing
from brorl_jax.learner.packing import Layout

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
  "length, lengths",
  [
    (6, [6]),
    (63, [63]),
    (64, [32, 64]),
    (130, [33, 65, 130]),
    (15360, [480, 960, 1920, 3840, 7680, 15360]),
  ],
)
def test_lengths_by_hand(length, lengths, monkeypatch):
  monkeypatch.undo()
  layout = Layout(8, 3, length)
  assert layout.lengths == lengths
  blocks = [layout.blocks_of(x) for x in lengths]
  assert blocks == [3 * 2**i for i in range(len(lengths))][::-1]


def test_a_block_has_rollouts_of_one_prompt_and_similar_length():
  out, advantage = rollouts(kinds=12)
  batches = packed(rows=3, blocks=2, roll=(out, advantage))
  lengths = [batch.mask.shape[-1] for batch in batches]
  assert lengths == sorted(lengths) and set(lengths) == {1, 2, 4}
  for p in range(P):
    first, _ = out.distinct(p)
    mine = []
    for block in packing.blocks(out, 3):
      if block.prompt == p:
        length = out.mask[p, block.rollout].sum(axis=1).tolist()
        assert block.length == max(length) and len(length) <= 3
        mine += length
    assert mine == sorted(out.mask[p, first].sum(axis=1).tolist())[::-1]
  for batch in batches:
    C, B, R, L = batch.mask.shape
    assert (C, B, R) == (8, 2 * 4 // L, 3)
    rows = batch.weight.sum(-1) > 0
    longest = batch.mask.sum(-1).max(-1)
    assert (longest[rows] > L // 2).all() or L == 1
    assert rows.reshape(-1)[: (int(batch.used) - 1) * B + 1].all()
    assert not rows[int(batch.used) :].any()


def test_more_microbatches_than_a_batch_holds_make_another(monkeypatch):
  monkeypatch.setattr(packing, "MICROBATCHES", 2)
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
  # 4 blocks of 1 of 2 rows, 3 of 4 tokens: 2 microbatches of 3 x 2 x 4 places.
  assert packing.padding_fraction(batches) == 1 - 4 * 3 / (2 * 3 * 2 * 4)


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
