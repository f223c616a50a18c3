"""Tests of brorl_jax/learner/row_packing.py."""

import pytest
from update_cases import N, P, S, packed, rollouts, some_lengths

from brorl_jax.learner import row_packing
from brorl_jax.learner.layout import Layout

pytestmark = pytest.mark.usefixtures("three_lengths")


def distinct_of(out):
  return [out.distinct(p) for p in range(P)]


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
    assert (C, B, R) == (8, Layout(3, 2, 4, S).blocks_of(L, 3), 3)
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


def test_half_a_microbatch_keeps_its_length():
  source, distinct = some_lengths(1, 1, 1, 1, 4)  # 4 of 8 blocks
  plan = row_packing.plan(source, distinct, Layout(1, 2, 4, 0), 1)
  count = {x: len(blocks) for x, blocks in plan.by_length.items()}
  assert count == {1: 4, 4: 1}
