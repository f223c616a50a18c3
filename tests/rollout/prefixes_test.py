"""Tests of brorl_jax/rollout/prefixes.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simple_sampler
import tiers
from loads import on_gpu
from small_decoders import (
  KEY,
  POLICY,
  RECALL,
  STOP,
  Feed,
  Recall,
  devices,
  numbered,
  policy_params,
  spec,
)

from brorl_jax.rollout import prefixes, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Prompts


def both(prompts, n, T, *, params=RECALL, mesh=None, groups=1, **cut):
  how = dict(n=n, max_new_tokens=T, sampling=SamplingParams(**cut), mesh=mesh)
  one = spec(Recall(), groups=groups, **how)
  alone = dataclasses.replace(one, mesh=None, groups=1)
  want = jax.device_get(sampler.rollouts(alone, params, prompts, KEY))
  return prefixes.rollouts(one, params, prompts, KEY), want


def made(count, n, T, **cut):
  one = spec(n=n, max_new_tokens=T, sampling=SamplingParams(**cut))
  return prefixes.rollouts(one, RECALL, numbered(count), KEY)


def same(got, want, atol=1e-6):
  for name in ("tokens", "mask", "truncated"):
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
  np.testing.assert_allclose(got.logp, want.logp, atol=atol)


@pytest.mark.parametrize("count, n, T, rows, groups", tiers.some([
  (5, 50, 6, 35, 1),  # several passes, of which the last is not full
  (20, 8, 6, 256, 2),  # more prompts than go together
  (2, 16, 1, 256, 1),  # no row is ever decoded
  (3, 7, 6, 3, 2),  # one row: a pass for every prefix
  (1, 40, 6, 3, 2),
], 2, 3))  # fmt: skip
def test_rollouts_are_those_of_slots(count, n, T, rows, groups, monkeypatch):
  monkeypatch.setattr(prefixes, "_ROWS", rows)
  got, want = both(numbered(count), n, T, groups=groups)
  assert got.tokens.shape == (count, n, T)
  same(got, want)
  if T > 1:
    assert 0 < got.truncated.mean() < 1 and len(np.unique(got.tokens)) == 6


def test_rollouts_of_a_policy_are_those_without_a_cache():
  policy, params = POLICY, policy_params()
  rng = np.random.default_rng(0)
  mask = np.arange(7) >= 7 - np.array([3, 7, 1, 5])[:, None]
  tokens = np.where(mask, rng.integers(1, 24, (4, 7)), 0).astype(np.int32)
  prompts = Prompts(tokens, mask, np.arange(4, dtype=np.int32))
  how = dict(temperature=0.7, top_k=15)
  one = spec(policy, n=96, max_new_tokens=6, sampling=SamplingParams(**how))
  got = prefixes.rollouts(one, params, prompts, KEY)
  want, logp, _ = simple_sampler.sample(
    policy, params, [row[real] for row, real in zip(tokens, mask, strict=True)],
    KEY, n=96, max_new_tokens=6, stop_ids=(STOP,), **how,
  )  # fmt: skip
  # A uniform number may fall between two roundings of one sum.
  differ = (got.tokens != want).any(axis=2)
  assert differ.mean() < 0.01
  np.testing.assert_allclose(got.logp[~differ], logp[~differ], atol=2e-5)


@pytest.mark.ci
def test_a_mesh_makes_the_same_rollouts():
  same(*both(numbered(5), 24, 5, mesh=devices(4)))


def test_a_row_for_each_distinct_prefix_and_no_more():
  """Greedy: all rollouts of a prompt are one row, whatever N is."""
  few, many = (made(4, n, 6, temperature=0.0) for n in (4, 64))
  levels = few.mask.sum(axis=2).max() - 1
  # 256 rows for 4 prompts: 64 each, but no more than there are rollouts.
  assert few.slot_steps.tolist() == [4 * levels] * 4
  assert many.slot_steps.tolist() == [64 * levels] * 4
  assert many.slot_occupancy() <= 1.0
  assert prefixes._program(spec(n=99, groups=2), 8).slots == 32
  assert made(4, 512, 6).slot_occupancy() > 2.0


def test_numbers_of_prefixes_by_hand():
  token = jnp.array([[3, 1, 3, 3, 1, 2]])
  row = jnp.array([[0, 0, 0, 1, 0, 0]])
  going = jnp.array([[True, True, True, True, True, False]])
  group, parent, last, count = prefixes._grouped(token, row, going, 5)
  # In order: 0 1, 0 3, 1 3; the last rollout has ended.
  assert count.tolist() == [3]
  assert group[0, :5].tolist() == [1, 0, 1, 2, 0]
  assert parent[0, :3].tolist() == [0, 0, 1]
  assert last[0, :3].tolist() == [1, 3, 3]


@pytest.mark.parametrize("groups, sizes", [
  (1, [4, 4, 3]), (2, [2, 2, 2, 2, 2, 1]),
])  # fmt: skip
def test_a_stream_takes_what_the_feed_gives_until_it_has_no_more(groups, sizes):
  prompts, feed = numbered(11), Feed(numbered(11), 3)
  how = spec(max_new_tokens=5)
  shared = dataclasses.replace(how, groups=groups)
  out = list(prefixes.stream(shared, RECALL, feed, KEY, places=4))
  assert [len(p.index) for p, _ in out] == sizes
  assert feed.asked[:3] == [(4, True), (1, False), (4, True)]
  assert feed.asked[-1] == (4, True)
  want = jax.device_get(sampler.rollouts(how, RECALL, prompts, KEY))
  for some, got in out:
    same(got, jax.tree.map(lambda x, i=some.index: x[i], want))


# 2 layers x 16 tokens x 2 heads x 4 x 2 x 4 bytes for each of 512 rollouts,
# twice; three arrays of 24 tokens for 256 rows, and of blocks of 6 for draws.
ROWS, EACH = 4 * 3 * 256 * 24, 512 * (2 * 2048 + 4 * 3 * 6)


@pytest.mark.parametrize("change, T, memory, count", [
  (lambda p: p, 16, 2**34, 16),
  (lambda p: p, 17, 2**34, 0),
  (on_gpu, 6, 2**34, 0),
  # All of it is to be 1/16 of the memory.
  (lambda p: p, 16, (ROWS + 3 * EACH) * 16, 3),
  (lambda p: p, 16, (ROWS + 3 * EACH) * 16 - 1, 2),
  (lambda p: p, 16, (ROWS + EACH) * 16 - 1, 0),
  (lambda p: p, 16, 16, 0),
  (lambda p: dataclasses.replace(p, vocab=2**22 - 1), 16, 2**60, 16),
  (lambda p: dataclasses.replace(p, vocab=2**22), 16, 2**60, 0),
])  # fmt: skip
def test_short_responses_share_rows_if_memory_allows(change, T, memory, count):
  policy = change(POLICY)
  ask = functools.partial(prefixes.together, policy, n=512)
  assert ask(max_new_tokens=T, memory_bytes=memory) == count


def test_every_pass_counts_its_rows(monkeypatch):
  """One row for each prompt: as many passes as the prompt with most needs."""
  monkeypatch.setattr(prefixes, "_ROWS", 3)
  got = made(3, 7, 4)
  going = lambda t: got.mask.sum(axis=2) > t
  most = lambda t: max(
    len({tuple(x[:t]) for x in got.tokens[p][going(t)[p]]}) for p in range(3)
  )
  assert got.slot_steps.tolist() == [sum(map(most, (1, 2, 3)))] * 3


def test_places_without_a_prompt_make_no_rows(monkeypatch):
  # 5 prompts go as 4 and 1: the 3 empty places of the second repeat its prompt.
  monkeypatch.setattr(prefixes, "_PROMPTS", 4)
  monkeypatch.setattr(prefixes, "_ROWS", 4)
  found = []
  sampled = prefixes._sampled
  spy = lambda *args: found.append(sampled(*args)) or found[-1]
  monkeypatch.setattr(prefixes, "_sampled", spy)
  made(5, 6, 4)
  mask = np.asarray(found[1].mask)
  assert mask[0].sum() > 6 and (mask[1:].sum(axis=2) == 1).all()
