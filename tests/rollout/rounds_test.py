"""Tests of brorl_jax/rollout/rounds.py, through dynamic sampling."""

import random

import chex
import crowds
import numpy as np
import pytest
import scored
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.rollout.dynamic_sampling import (
  Chunk,
  OpenPrompts,
  RoundPlan,
  collect,
  with_first,
)
from brorl_jax.types import Groups, Prompts, Rollouts

CHUNK, MOST, T = 2, 8, 3


def prompts(numbers):
  index = np.array(numbers, np.int32)
  tokens = index[:, None]
  return Prompts(tokens, tokens >= 0, index)


def rate(p):
  """Of right rollouts: prompts 0, 5, 10, .. never, 4, 9, .. always."""
  return (p % 5) / 4


def made(some):
  """Rollout n of prompt p: a function of both, with its number as a token."""
  P = len(some.index)
  n = some.first[:, None] + np.arange(CHUNK)[None]
  length = 1 + (some.index[:, None] + n) % T
  mask = np.arange(T) < length[..., None]
  token = (100 * some.index[:, None] + n)[..., None]
  return Rollouts(
    tokens=np.where(mask, token, 0).astype(np.int32),
    logp=np.where(mask, -token / 7.0, 0.0).astype(np.float32),
    mask=mask,
    truncated=length == T,
    slot_steps=np.ones(P, np.float32),
  )


def score(some, rollouts):
  """As drawn from a generator of (p, n)."""
  n = rollouts.tokens[:, :, 0] % 100
  reward = np.array(
    [
      [np.random.default_rng([p, i]).random() < rate(p) for i in row]
      for p, row in zip(some.index, n, strict=True)
    ],
    np.float32,
  )
  return scored.scores(reward, n)


# Until one is right and one is wrong; and all 8, in the same rounds.
SUFFICES = RoundPlan((2, 4, 8), 1, 1)
ALWAYS = RoundPlan((2, 4, 8), 9, 0)


def informative(groups):
  reward, valid = groups.scores.reward, groups.scores.valid
  high = reward.max(axis=1, where=valid, initial=-1)
  return high > reward.min(axis=1, where=valid, initial=2)


def run(plan=SUFFICES, *, places=3, order=lambda held: held[:1], target=6):
  def sample(feed):
    held = []
    while True:
      room = places - len(held)
      more = feed(room, not held) if room else None
      if more is not None:
        assert len(more.index) <= room
        chunks = zip(more.index.tolist(), more.first.tolist(), strict=True)
        held += chunks
        continue
      if not held:
        return
      for chunk in order(list(held)):
        held.remove(chunk)
        some = with_first(prompts([chunk[0]]), [Chunk(*chunk)])
        yield some, made(some)

  return collect(
    sample, score, informative, prompts, range(40), target=target, plan=plan
  )


def drawn(sampled):
  counts = sampled.groups.rollouts.drawn.sum(axis=1).tolist()
  return dict(zip(sampled.groups.prompts.index.tolist(), counts, strict=True))


@pytest.mark.parametrize(
  "right, n, want",
  [
    (4, 16, 16),
    (3, 16, 64),
    (13, 16, 64),
    (12, 16, 16),
    (3, 64, 256),
    (4, 64, 64),
    (0, 256, 256),  # the last round
  ],
)
def test_a_prompt_goes_on_until_both_suffice(right, n, want):
  reward = np.where(np.arange(n) < right, 1.0, 0.9)  # nearly right is not right
  assert RoundPlan((16, 64, 256), 4, 4).further(reward) == want


def test_none_has_to_be_wrong_if_none_is_asked_for():
  assert RoundPlan((4, 8), 1, 0).further(np.ones(4)) == 4
  assert RoundPlan((4, 8), 1, 1).further(np.ones(4)) == 8


def test_a_prompt_gets_rounds_until_it_stops():
  sampled = run()
  counts = drawn(sampled)
  assert set(counts.values()) == {2, 4, 8}
  for p, count in counts.items():
    assert rate(p) not in (0.0, 1.0) or count == MOST
    # Only whole rounds decide, in the order of n.
    every = score(prompts([p]), made_of(p)).reward[0]
    n = CHUNK
    while (more := SUFFICES.further(every[:n])) > n:
      n = more
    assert n == count
  assert sampled.kept.sum() == 6


def made_of(p):
  chunks = [Chunk(p, n) for n in range(0, MOST, CHUNK)]
  some = [with_first(prompts([p]), [chunk]) for chunk in chunks]
  parts = [made(x) for x in some]
  join = lambda name: np.concatenate([getattr(x, name) for x in parts], axis=1)
  return Rollouts(
    join("tokens"), join("logp"), join("mask"), join("truncated"),
    np.full(1, 4.0, np.float32),
  )  # fmt: skip


@pytest.mark.parametrize("plan", [SUFFICES, ALWAYS])
def test_an_extended_prompt_has_the_rollouts_of_a_fixed_number(plan):
  sampled = run(plan)
  out = sampled.groups.rollouts
  for i, (p, count) in enumerate(drawn(sampled).items()):
    whole = made_of(p)
    for name in ("tokens", "logp", "mask", "truncated"):
      got, want = getattr(out, name)[i], getattr(whole, name)[0]
      np.testing.assert_array_equal(got[:count], want[:count])
      assert not got[count:].any()
    assert out.slot_steps[i] == count / CHUNK
    scores = score(prompts([p]), whole)
    np.testing.assert_array_equal(
      sampled.groups.scores.reward[i, :count], scores.reward[0, :count]
    )
    assert not sampled.groups.scores.valid[i, count:].any()
    assert all(x is None for x in sampled.groups.scores.responses[i, count:])
    assert all(
      x is not None for x in sampled.groups.scores.responses[i, :count]
    )


@pytest.mark.parametrize("places", tiers.some([1, 2, 5, 16], 2))
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 999))
def test_neither_the_order_of_finishing_nor_the_places_matter(places, seed):
  rng = random.Random(seed)

  def order(held):
    rng.shuffle(held)
    return held[: rng.randint(1, len(held))]

  want, got = run(), run(places=places, order=order)
  assert got.kept.tolist() == want.kept.tolist()
  # Objects compare by what they say.
  told = lambda x: [
    [one and one.verdict for one in row] for row in x.groups.scores.responses
  ]
  assert told(got) == told(want)
  plain = lambda x: x.groups._replace(
    scores=x.groups.scores._replace(responses=np.zeros(1))
  )
  chex.assert_trees_all_equal(plain(got), plain(want))


def test_further_rounds_come_before_new_prompts():
  """Of two places one is free while the other decodes a chunk of prompt 1."""
  fed = []

  def sample(feed):
    held = []
    while (more := feed(2 - len(held), not held)) is not None or held:
      if more is not None:
        chunks = [*zip(more.index.tolist(), more.first.tolist(), strict=True)]
        fed.extend(chunks)
        held += chunks
        continue
      p, first = held.pop(0)
      some = with_first(prompts([p]), [Chunk(p, first)])
      yield some, made(some)

  collect(
    sample, score, informative, prompts, [5, 10], target=2,
    plan=SUFFICES,
  )  # fmt: skip
  assert sorted(fed) == [(p, n) for p in (5, 10) for n in (0, 2, 4, 6)]
  assert [n for p, n in fed if p == 5] == [0, 2, 4, 6]


def test_a_fixed_number_is_one_chunk():
  gathered = OpenPrompts(RoundPlan((MOST,)))
  assert gathered.begin(7) == Chunk(7, 0)
  whole = made_of(7)
  group = Groups(prompts([7]), whole, score(prompts([7]), whole))
  chex.assert_trees_all_equal(gathered.add(group).rollouts, whole)


@pytest.mark.ci
@pytest.mark.parametrize("count", [2, 3])
def test_processes_draw_together_what_one_draws(count, monkeypatch):
  """A prompt's rounds are made by who claimed it."""
  want = run(target=9)
  crowd = crowds.Crowd(count, monkeypatch)
  many = crowd.run(lambda i: run(target=9, places=1 + i))
  for got in many:
    assert got.kept.tolist() == want.kept.tolist()
    chex.assert_trees_all_equal(
      got.groups.rollouts.tokens, want.groups.rollouts.tokens
    )
    assert drawn(got) == drawn(want)
