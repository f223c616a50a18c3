"""Tests of brorl_jax/learner/packing.py."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
import tiers
from update_cases import (
  POLICY,
  Blocks,
  N,
  P,
  S,
  SmallTrees,
  T,
  assert_close,
  gradient,
  packed,
  params,
  placed,
  plan_of,
  prompts,
  rollouts,
)

from brorl_jax.learner import packing, update
from brorl_jax.learner.packing import Layout, Source
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.types import Prompts, Rollouts


@pytest.mark.parametrize("length, blocks", [
  (6, {6: 3}), (130, {33: 11, 65: 6, 98: 3, 130: 3}),
  (256, {32: 24, 64: 12, 96: 8, 128: 6, 192: 4, 256: 3}),
])  # fmt: skip
def test_lengths_by_hand(length, blocks):
  some = Layout(8, 3, length, 0)
  assert some.lengths == [*blocks]
  assert {x: some.blocks_of(x) for x in some.lengths} == blocks


def test_a_long_response_keeps_a_device_busy_for_long_enough():
  some = Layout(2, 4, 15360, 1024, devices=4)
  got = {x: some.blocks_of(x) // 4 for x in some.lengths[:8]}
  want = {480: 8, 720: 6, 960: 5, 1440: 4, 1920: 3, 2880: 2, 3840: 1, 4800: 1}
  assert got == want and len(some.lengths) == 19
  assert np.all(np.diff(some.lengths[9:]) == 960)
  assert Layout(8, 3, 2048, 0).lengths[-4:] == [1280, 1536, 1792, 2048]
  assert packing.most_rows(256, 1024, 15360) == 4  # sqrt(17.1)
  assert packing.most_rows(32, 1024, 15360) == 2  # sqrt(2.1)
  assert packing.most_rows(32, 64, 1024) == 8  # as many tokens as it takes


def test_no_microbatch_has_more_positions_than_the_longest():
  some = Layout(16, 8, 256, 100, devices=4)
  most = 8 * (100 + 16 * 256)
  for length in some.lengths:
    blocks, each = some.blocks_of(length), 100 + 16 * length
    assert blocks % 4 == 0 and blocks * each <= most < (blocks + 4) * each


@pytest.mark.parametrize("layout, want", [
  # 16 (40 + 192) = 3,712 positions; a quarter: 7 x 128, 3 x 256, 1 x 512.
  (Layout(32, 16, 6, 40), [(7, 128), (3, 256), (1, 512)]),
  (Layout(32, 16, 6, 40, devices=4), [(4, 128), (4, 256), (4, 512)]),
  (Layout(32, 16, 6, 40, devices=8), [(8, 128), (8, 256)]),  # 464 for each
  (Layout(32, 16, 101, 412), []),
  (Layout(7, 1, 44, 204), [(1, 256), (1, 512)]),  # 512
])  # fmt: skip
def test_rows_of_trees_by_hand(layout, want):
  assert layout.trees == want


def distinct_of(out):
  return [(p, out.distinct(p)) for p in range(len(out.tokens))]


@pytest.mark.usefixtures("three_lengths")
def test_a_block_has_rollouts_of_one_prompt_and_similar_length():
  out, advantage = rollouts(kinds=12)
  batches = packed(rows=3, blocks=2, roll=(out, advantage))
  lengths = [batch.mask.shape[-1] for batch in batches]
  assert lengths == sorted(lengths) and set(lengths) == {1, 2, 4}
  for p in range(P):
    first, _ = out.distinct(p)
    mine = []
    every = distinct_of(out)
    length = [out.mask[p, first].sum(axis=1) for p, (first, _) in every]
    for block in packing.blocks(every, length, 3):
      if block.prompt == p:
        length = out.mask[p, block.rollout].sum(axis=1).tolist()
        assert block.length == max(length) and len(length) <= 3
        mine += length
    assert mine == sorted(out.mask[p, first].sum(axis=1).tolist())[::-1]
  every = []  # the longest of each block, as they are computed together
  for batch in batches[::-1]:
    C, B, R, L = batch.mask.shape
    assert (C, B, R) == (8, Layout(3, 2, 4, S).blocks_of(L), 3)
    rows, longest = batch.weight.sum(-1) > 0, batch.mask.sum(-1).max(-1)
    assert (longest.max(-1)[: batch.used] > L // 2).all() or L == 1
    every += longest[rows].tolist()
    assert rows.reshape(-1)[: (int(batch.used) - 1) * B + 1].all()
    assert not rows[int(batch.used) :].any()
  assert every == sorted(every)[::-1]


@pytest.mark.usefixtures("three_lengths")
def test_more_microbatches_than_a_batch_holds_make_another(monkeypatch):
  monkeypatch.setattr(packing, "MICROBATCHES", 2)
  out, advantage = rollouts(kinds=12)
  few = packed(rows=1, blocks=1, roll=(out, advantage))
  used = [(batch.mask.shape[-1], int(batch.used)) for batch in few]
  assert [x for x in used if x[1] < 2].__len__() <= 3
  assert all(1 <= n <= 2 for _, n in used) and len(used) > 6
  assert sum(batch.weight.sum() for batch in few) == P * N


@pytest.mark.parametrize("layout", [Blocks, SmallTrees])
def test_a_host_makes_the_blocks_of_its_own_devices(layout):
  layout = functools.partial(layout, devices=4)
  plan = plan_of(rows=1, blocks=4, roll=rollouts(kinds=12), layout=layout)
  for later, whole in zip(plan.later, plan.batches(), strict=True):
    mine = jax.tree.map(lambda x: x[:, 1:3] if x.ndim else x, whole)
    chex.assert_trees_all_equal(later.make(slice(1, 3)), mine)


@pytest.mark.usefixtures("three_lengths")
def test_a_microbatch_has_the_longest_that_are_left():
  # Of 1 row: 8 blocks of up to 1 token in a microbatch, 4 of 2, 2 of 4.
  lengths = enumerate([1, 1, 2, 2, 2, 2, 2, 4])
  one = alone([[[i + 1] * n + [NO] * (4 - n) for i, n in lengths]], prompt=3)
  plan = packing.plan_blocks(one, distinct_of(one.rollouts), Layout(1, 2, 4, 0))
  # 4 and a 2; four of 2; 1 and 1, where with the prompt's 3 tokens 2 blocks of
  # 4 have the fewest positions.
  batches = plan.batches()
  count = {b.mask.shape[-1]: int((b.weight > 0).sum()) for b in batches}
  assert count == {2: 4, 4: 4}
  assert plan.positions == 4 * (3 + 2) + 2 * 2 * (3 + 4)
  assert plan.positions == sum(
    int(b.used) * (b.prompt[0].size + b.mask[0].size) for b in batches
  )


NO = -1


def test_a_tree_by_hand():
  # Prompt 7 8; the responses 1 2 9, 1 2 5, 1 3, 1, 4.
  text = np.array([[1, NO, NO], [1, 2, 5], [1, 2, 9], [1, 3, NO], [4, NO, NO]])
  tree = packing.grow(np.array([7, 8]), text)
  # Last tokens are not read: 7 8 and of the responses 1 and 1 2.
  assert tree["token"].tolist() == [7, 8, 1, 2]
  assert tree["end"].tolist() == [4, 4, 4, 4]
  # Targets in the order in which they first occur: 1, 2, 5, 9, 3, 4.
  assert tree["target"].tolist() == [1, 2, 5, 9, 3, 4]
  assert tree["parent"].tolist() == [1, 2, 3, 3, 2, 1]
  assert tree["at"].tolist() == [
    [0, 0, 0], [0, 1, 2], [0, 1, 3], [0, 4, 0], [5, 0, 0],
  ]  # fmt: skip


def random_text(seed, rows=12, T=5, V=3):
  rng = np.random.default_rng(seed)
  text = rng.integers(0, V, (rows, T))
  length = rng.integers(1, T + 1, (rows, 1))
  text = np.unique(np.where(np.arange(T) < length, text, NO), axis=0)
  return text[np.lexsort(text.T[::-1])]


@pytest.mark.parametrize("seed", range(2))
def test_a_token_sees_its_prefix_and_every_prefix_is_there_once(seed):
  prompt, text = np.array([8, 9]), random_text(seed)
  tree = packing.grow(prompt, text)
  sees = lambda i: [j for j in range(i + 1) if tree["end"][j] > i]
  seen = [tuple(tree["token"][sees(i)]) for i in range(len(tree["token"]))]
  words = [tuple(row[row >= 0]) for row in text]
  start = tuple(prompt)
  inputs = {start + w[:t] for w in words for t in range(1, len(w))}
  assert sorted(seen) == sorted(inputs | {start[:1], start})
  targets = {w[:t] for w in words for t in range(1, len(w) + 1)}
  assert len(tree["target"]) == len(targets)
  for m, word in enumerate(words):
    for t, token in enumerate(word):
      e = tree["at"][m, t]
      assert tree["target"][e] == token
      assert seen[tree["parent"][e]] == start + word[:t]


def trees_of(out, advantage, tokens):
  one, room = Source(prompts(), out, advantage), packing.room_of(tokens, T)
  return list(packing.trees(one, distinct_of(out), room))


@pytest.mark.parametrize("tokens", [S + T, 1000])
def test_every_distinct_rollout_is_in_one_tree_that_fits(tokens):
  out, advantage = rollouts(kinds=12)
  found = trees_of(out, advantage, tokens)
  assert all(tree.size[0] <= tokens for tree in found)
  for p in range(P):
    first, count = out.distinct(p)
    own = [tree for tree in found if tree.prompt == p]
    assert (len(own) > 1) == (tokens == S + T)
    got = sorted((int(n), int(c)) for tree in own
      for n, c in zip(tree.rollout, tree.count, strict=True))  # fmt: skip
    assert got == sorted(zip(first.tolist(), count.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_is_cut_where_one_more_response_would_not_fit(seed):
  random = np.random.default_rng(seed)
  text = random.integers(0, 2, (64, 5))  # many common prefixes
  text[np.arange(5) >= random.integers(1, 6, (64, 1))] = -1
  text = np.unique(text, axis=0)
  text = text[text[:, 0] >= 0]
  prompt, room = np.array([7, 8]), tuple(random.integers(8, 20, 3).tolist())

  def size(part):
    grown = packing.grow(prompt, text[part])
    return len(grown["token"]), len(grown["target"]), len(part)

  real, none = text[None] >= 0, np.zeros((1, len(text)))
  out = Rollouts(np.int32(text[None]), real * 0.0, real, none > 0, np.zeros(1))
  asked = Prompts(np.int32(prompt[None]), prompt[None] > 0, np.zeros(1, int))
  every = [(0, (order := np.arange(len(text)), np.ones_like(order)))]
  cut = list(packing.trees(Source(asked, out, none), every, room))
  parts = [tree.rollout for tree in cut]
  assert [tree.size for tree in cut] == [size(part) for part in parts]
  assert np.concatenate(parts).tolist() == order.tolist()
  for part in parts:
    assert np.all(np.array(size(part)) <= room)
    following = np.arange(part[0], part[-1] + 2)
    if following[-1] < len(text):
      assert not np.all(np.array(size(following)) <= room)


def test_the_room_of_a_row_follows_from_the_longest_response():
  # 32 * 16 // 160 = 3: a loss of 480 terms and not of 5,120.
  assert packing.room_of(32, 160) == (32, 35, 3)
  assert packing.room_of(32, 6) == (32, 64, 32)  # no more than tokens
  assert packing.room_of(128, 4096) == (128, 129, 1)  # and at least one


def test_rollouts_without_tokens_are_in_no_tree():
  out, advantage = rollouts(kinds=3)
  mask = out.mask.copy()
  mask[0] = False
  mask[1, :2] = False
  tokens = out.tokens.copy()
  tokens[2, :, 0] = 0  # a token like any other
  cut = dataclasses.replace(out, mask=mask, tokens=tokens)
  found = trees_of(cut, advantage, 1000)
  counts = [(tree.prompt, int(tree.count.sum())) for tree in found]
  assert counts == [(1, N - 2), (2, N), (3, N)]
  assert not {0, 1} & {*found[0].rollout.tolist()}


def test_rows_hold_what_fits_and_are_packed_closely():
  out, advantage = rollouts(kinds=12)
  one = Source(prompts(), out, advantage)
  plan = packing.plan_trees(one, distinct_of(out), (3, 32))
  (batch,) = plan.batches()
  assert batch.trees is not None
  tokens = (batch.trees.end > 0).sum(axis=-1)
  assert (tokens > 0).sum() <= 2 * tokens.sum() / 32 + 1  # as first fit
  assert plan.positions == batch.used * 3 * 32
  shapes = batch.trees.token, batch.trees.target, batch.weight
  assert [x.shape[1:] for x in shapes] == [(3, 32), (3, 64), (3, 32)]


@pytest.mark.parametrize("slides", [True, tiers.at_night(False)])
def test_trees_have_the_gradient_of_blocks(slides):
  how = dict(sliding=(True, False), window=3) if slides else {}
  policy = dataclasses.replace(POLICY, **how)
  roll, total = rollouts(1, kinds=12), {}
  for layout in (Blocks, SmallTrees):
    batches = packed(roll=roll, layout=layout, unit="token", mean="sequence")
    assert all((b.trees is not None) == (layout is SmallTrees) for b in batches)
    total[layout] = gradient(batches, policy=policy)
  (want, stats), (got, more) = total[Blocks], total[SmallTrees]
  assert_close(got, want)
  for name in ("loss", "entropy", "kl_old", "logp_gap", "clip_fraction"):
    a, b = getattr(more, name), getattr(stats, name)
    np.testing.assert_allclose(a.value, b.value, rtol=1e-5, atol=1e-7)
    assert a.count == b.count


@pytest.mark.ci
def test_a_mesh_does_not_change_the_scores_of_trees():
  layout = functools.partial(SmallTrees, devices=8)
  batches = packed(roll=rollouts(kinds=12), layout=layout)
  score = lambda at, policy, batch: update.logp_of(
    at, batch, 1.0, response_logp=policy.response_logp
  )
  want = [score(params(), POLICY, batch) for batch in batches]
  mesh = meshes.make_mesh(data=2, fsdp=4)
  at = jax.device_put(params(), sharding.param_shardings(params(), mesh))
  policy = dataclasses.replace(POLICY, mesh=mesh)
  there = placed(mesh, roll=rollouts(kinds=12), layout=layout)
  for batch, expected in zip(there, want, strict=True):
    np.testing.assert_allclose(score(at, policy, batch), expected, atol=1e-5)


def alone(text, prompt=1):
  """Prompts of `prompt` tokens with the responses of `text`, -1 behind each."""
  text, ones = np.array(text), np.ones((len(text), prompt), np.int32)
  out = Rollouts(text, np.zeros(text.shape, np.float32),
    text > 0, text[..., 0] < 0, np.ones(len(text), np.float32))  # fmt: skip
  asked = Prompts(ones, ones > 0, np.arange(len(text)))
  return Source(asked, out, np.zeros(text.shape[:2], np.float32))


def test_the_largest_trees_are_placed_first():
  # Trees of 3, 3, 5 and 5 tokens in rows of 8: 5 + 3 twice, not 3 + 3, 5, 5.
  one = alone([[[3] * n + [NO] * (5 - n)] for n in (3, 3, 5, 5)])
  distinct = distinct_of(one.rollouts)
  (batch,) = packing.plan_trees(one, distinct, (1, 8)).batches()
  assert batch.trees is not None
  ends = batch.trees.end.reshape(8, 8)
  assert ends[ends > 0].tolist() == [5, 5, 5, 5, 5, 8, 8, 8] * 2


@pytest.mark.parametrize("count, sizes, want", [
  # 2 responses of two tokens: a block has 4 + 2 x 2 positions. The tree has 4
  # tokens of the prompt and one of each response.
  (2, [6], 6), (2, [7], None),
  # Of 10: 5 blocks, 3 trees of at most 8 tokens, or one of 14.
  (10, [8, 16], 16), (10, [8, 20], 8),
])  # fmt: skip
def test_a_form_must_save_a_fifth_of_the_positions(count, sizes, want):
  one = alone([[[i + 1, i + 1] for i in range(count)]], prompt=4)

  class Sized(Layout):
    trees = tuple((1, size) for size in sizes)

  layout = Sized(rows=2, blocks=1, length=2, prompt=4)
  (batch,) = packing.pack(one, layout).batches()
  assert (None if batch.trees is None else batch.trees.token.shape[-1]) == want


def test_padding_of_trees_is_what_no_prefix_fills():
  out, advantage = rollouts(kinds=1)
  plan = plan_of(roll=(out, advantage), layout=SmallTrees)
  tokens = prompts().mask.sum() + (out.mask[:, 0].sum(axis=1) - 1).sum()
  places = sum(int(b.used) * 32 for b in plan.batches())
  assert packing.padding_fraction([plan]) == 1 - tokens / places


@pytest.mark.usefixtures("three_lengths")
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


def test_pack_knows_the_tokens_of_earlier_steps():
  out, advantage = rollouts(kinds=3)
  assert all(batch.old is None for batch in packed(roll=(out, advantage)))
  out = dataclasses.replace(out, age=(out.tokens % 3).astype(np.int8))
  for batch in packed(roll=(out, advantage)):
    want = (batch.response % 3 > 0) & (batch.weight > 0)[..., None]
    np.testing.assert_array_equal(batch.old & batch.mask, want & batch.mask)
    assert (batch.old & batch.mask).any()


@pytest.mark.usefixtures("three_lengths")
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


@pytest.mark.usefixtures("three_lengths")
def test_padding_by_hand():
  out, advantage = rollouts(kinds=1)
  out.mask[:] = np.arange(T) < 3
  plan = plan_of(rows=2, blocks=3, roll=(out, advantage))
  # 4 blocks of 1 of 2 rows, 3 of 4 tokens: 2 microbatches of 3 blocks with
  # 5 places for the prompt and 2 x 4 for responses.
  tokens = prompts().mask.sum() + 4 * 3
  want = 1 - tokens / (2 * 3 * (5 + 2 * 4))
  np.testing.assert_allclose(packing.padding_fraction([plan]), want)


@pytest.mark.parametrize("unit, mean, want", [
  ("token", "token", None),
  # 6 tokens in 3 rollouts of 2 prompts; two rollouts have none.
  ("token", "sequence", [[1, 2, 0], [2 / 3, 0, 0]]),
  ("token", "prompt", [[1, 1, 0], [1, 0, 0]]),
  ("token", "constant", [[0.5, 0.5, 0], [0.5, 0, 0]]),
  ("sequence", "token", [[2, 2, 0], [2, 0, 0]]),
  ("sequence", "sequence", [[2, 2, 0], [2, 0, 0]]),
  ("sequence", "prompt", [[1.5, 1.5, 0], [3, 0, 0]]),
])  # fmt: skip
def test_factors_of_the_loss_by_hand(unit, mean, want):
  length = np.array([[2, 1, 0], [3, 0, 0]])
  got = packing.loss_scale(length, unit=unit, mean=mean, constant=4)
  if want is None:
    assert got is None
  else:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
