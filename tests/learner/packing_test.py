"""Tests of brorl_jax/learner/packing.py."""

import numpy as np
import pytest
from update_cases import N, P, T, packed, prompts, rollouts, some_lengths

from brorl_jax.learner import packing
from brorl_jax.learner.layout import Layout

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


def test_padding_by_hand():
  out, advantage = rollouts(kinds=1)
  out.mask[:] = np.arange(T) < 3
  batches = packed(rows=2, blocks=3, roll=(out, advantage))
  # 4 blocks of 1 of 2 rows, 3 of 4 tokens: 2 microbatches of 3 blocks with
  # 5 places for the prompt and 2 x 4 for responses.
  tokens = prompts().mask.sum() + 4 * 3
  want = 1 - tokens / (2 * 3 * (5 + 2 * 4))
  np.testing.assert_allclose(packing.padding_fraction(batches), want)


@pytest.mark.parametrize("count, rows", [(16, 16), (17, 4)])
def test_fewer_rows_where_they_make_less_padding(count, rows):
  source, _ = some_lengths(*[16] * count)
  # 17 rows: 2 blocks of 16 are 518 positions, 6 blocks of 4 are 402.
  (batch,) = packing.pack(
    source.prompts, source.rollouts, source.advantage, Layout(16, 1, 16, 3)
  )
  assert batch.mask.shape[2] == rows
  assert batch.mask.sum() == 16 * count


def test_a_small_saving_is_not_worth_another_program():
  source, _ = some_lengths(*[4] * 17)
  # 2 blocks of 16 are 134 positions, 6 of 4 are 114: .85 of them.
  (batch,) = packing.pack(
    source.prompts, source.rollouts, source.advantage, Layout(16, 1, 4, 3)
  )
  assert batch.mask.shape[2] == 16


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
