"""Dynamic sampling, with samplers and verifiers of a few lines."""

import dataclasses
import random
import threading
import time

import chex
import crowds
import numpy as np
import pytest
import scored
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions, refuses

from brorl_jax.many import processes
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.rollout.dynamic_sampling import (
  Chunk,
  RoundPlan,
  TooManyInvalid,
  check_invalid,
  collect,
  with_first,
)
from brorl_jax.types import Interrupted, Prompts, Rollouts

N = 4


def prompts(numbers):
  index = np.array(numbers, np.int32)
  tokens = index[:, None]
  return Prompts(tokens, tokens >= 0, index)


def rollouts(some):
  """Their number is in the tokens, so that mixed up ones are seen."""
  return scored.rollouts(np.tile(some.index[:, None, None], (1, N, 1)))


def scores_of(good):
  def score(some, rolled):
    np.testing.assert_array_equal(rolled.tokens[:, 0, 0], some.index)
    reward = np.zeros((len(some.index), N), np.float32)
    reward[np.isin(some.index, list(good)), 0] = 1.0
    return scored.scores(reward, np.tile(some.index[:, None], N))

  return score


def informative(groups):
  reward, valid = groups.scores.reward, groups.scores.valid
  high = reward.max(axis=1, where=valid, initial=-1)
  return high > reward.min(axis=1, where=valid, initial=2)


def sampler_of(places, order=lambda held: held[:1], log=None, make=rollouts):
  """Holds so many (p, first); `order` says which are done next."""

  def sample(feed):
    held = []
    while True:
      more = feed(places - len(held), not held)
      if more is not None:
        assert len(more.index) <= places - len(held)
        held += zip(more.index.tolist(), more.first.tolist(), strict=True)
        if log is not None:
          log.append([*held])
        continue
      if not held:
        return
      for chunk in order(list(held)):
        held.remove(chunk)
        some = with_first(prompts([chunk[0]]), [Chunk(*chunk)])
        yield some, make(some)

  return sample


def run(good, target, *, places=3, candidates=range(20), order=None, **more):
  sample = sampler_of(places, *([order] if order else []))
  return collect(more.pop("sample", sample),
    more.pop("score", scores_of(good)), informative, prompts, candidates,
    target=target, plan=more.pop("plan", RoundPlan((N,))), **more)  # fmt: skip


def test_keeps_the_first_that_pass_and_generates_nothing_beyond_the_last():
  sampled = run({1, 4, 5, 9, 10}, target=4)
  assert sampled.groups.prompts.index.tolist() == list(range(10))
  assert np.flatnonzero(sampled.kept).tolist() == [1, 4, 5, 9]
  kept = sampled.kept_groups()
  assert kept.prompts.index.tolist() == [1, 4, 5, 9]
  assert kept.rollouts.tokens[:, 0, 0].tolist() == [1, 4, 5, 9]
  assert kept.scores.answer[:, 0].tolist() == [1, 4, 5, 9]
  np.testing.assert_array_equal(kept.scores.reward, [[1, 0, 0, 0]] * 4)


@pytest.mark.parametrize(
  "usual, want", [(None, 5), (1.0, 5), (0.7, 7), (0.1, 8)]
)
def test_as_many_are_on_the_way_as_will_be_needed(usual, want):
  log = []
  run({*range(20)}, target=5, sample=sampler_of(8, log=log), usual=usual)
  assert len(log[0]) == want == max(map(len, log))  # of at most 8


@pytest.mark.parametrize("last", [True, False])
def test_what_was_begun_behind_the_last_that_is_needed_is_dropped(last):
  """Prompts 3 and 4 never end, or end first: they are a surplus."""
  order = lambda held: (
    held[:1] if last else [x for x in held if x[0] > 2] or held
  )
  sampled = run({0, 2, 3, 4}, target=2, places=5, usual=0.3, order=order)
  assert sampled.groups.prompts.index.tolist() == [0, 1, 2]
  assert sampled.kept.tolist() == [True, False, True] and sampled.surplus >= 2


def test_chunks_on_several_devices_make_the_group_of_one_place():
  """In any order; verdicts are made of whole prompts."""
  whole, apart = RoundPlan((MOST,)), RoundPlan((MOST,), 0, CHUNK)
  sizes = set()

  def score(some, rollouts):
    sizes.add(rollouts.mask.shape[1])
    return drawn_score(some, rollouts)

  make = lambda some: made(some, MOST)
  of = [
    in_rounds(whole, sample=sampler_of(3, make=make)),
    in_rounds(apart, order=lambda held: [random.choice(held)], score=score),
  ]
  assert sizes == {MOST} and len({len(x.kept) for x in of}) == 1
  of = [(x.groups.rollouts.tokens, x.groups.rollouts.logp, x.kept) for x in of]
  chex.assert_trees_all_equal(*of)


def test_a_rejected_one_is_replaced_while_others_go_on():
  """Prompt 0 is done last; all others pass by in the meantime."""
  passed = []

  def order(held):
    time.sleep(0.001)
    if len(held) > 1:
      assert held[0] == (0, 0)
      passed.append(held[1][0])
      return held[1:]
    return held if passed[-1] == 6 else []

  sampled = run({0, 6}, target=2, places=2, order=order)
  assert sampled.kept.tolist() == [True, *[False] * 5, True]
  assert passed == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rewards, said", [
  ([0.0, 0.0], "all rewards are 0 ... easier prompts"),
  ([1.0, 1.0], "all rewards are 1 ... harder prompts"),
  ([0.25, 0.25], "all rewards are 0.25 ... easier prompts"),
  ([0.0, 1.0], "config.filter.keep ... easier or harder prompts"),
])  # fmt: skip
def test_a_shortage_names_the_reward_that_all_have(rewards, said):
  sampled = run(set(), target=1, candidates=range(2))
  scores = sampled.groups.scores
  value = np.repeat(np.float32(rewards)[:, None], scores.reward.shape[1], 1)
  # A verifier that failed says nothing.
  valid = np.ones(value.shape, bool)
  valid[0, 0], value[0, 0] = False, 0.5
  scores = scores._replace(reward=value, valid=valid)
  groups = sampled.groups._replace(scores=scores)
  found = dataclasses.replace(sampled, groups=groups).shortage()
  assert mentions(found, said) and "only 0 of 2 prompts" in found
  kept = dataclasses.replace(
    sampled, groups=groups, kept=np.array([False, True]), target=2
  )
  assert f"all other rewards are {rewards[0]:g} " in kept.shortage()


@pytest.mark.parametrize("multiple, want", [(1, 5), (2, 4), (3, 3), (6, 0)])
def test_of_too_few_groups_the_first_that_are_a_multiple(multiple, want):
  sampled = run({0, 2, 3, 5, 6}, target=6, candidates=range(7))
  kept = sampled.kept_groups(multiple).prompts.index.tolist()
  assert kept == [0, 2, 3, 5, 6][:want]


def test_verdicts_are_made_beside_the_sampler():
  """The verifier waits for the sampler to go on: on one thread it could not."""
  on = threading.Event()

  def score(some, rolled):
    assert threading.current_thread() is not threading.main_thread()
    if some.index[0] == 0:
      assert on.wait(10)
    return scores_of({0, 1, 2})(some, rolled)

  def order(held):
    if (0, 0) not in held:
      on.set()
    return held[:1]

  assert run({0, 1, 2}, target=3, score=score, order=order).kept.all()


def test_what_a_verifier_raises_is_raised():
  with pytest.raises(KeyError, match="broken"):
    run({1}, target=1, score=lambda *_: {}["broken"])


def test_where_the_time_went():
  def slow(seconds, function):
    def called(*args):
      time.sleep(seconds)
      return function(*args)

    return called

  sampled = run({2}, target=1, places=1, order=slow(0.05, lambda held: held),
    score=slow(0.1, scores_of({2})))  # fmt: skip
  # Three prompts one after the other, each of them judged before the next.
  spent = sampled.spent
  assert spent["score"] >= 0.3 and spent["rollout"] >= 0.15
  assert spent["score_wait"] >= 0.29 and spent["rollout_wait"] >= 0.15


@pytest.mark.parametrize("right, stops", [(198, False), (197, True)])
def test_one_in_a_hundred_may_fail_and_no_more(right, stops):
  """2 of 200 are 1 %, 2 of 199 more."""
  some = scored.scores(np.ones((1, right)), task="gcd").responses
  failed = scored.scores([[0.0] * 2], valid=[[False] * 2], task="gcd").responses
  every = [*some.flat, *failed.flat]
  if stops:
    with refuses(TooManyInvalid, "2 of 199 ... 1% ... (2) on gcd"):
      check_invalid(every)
  else:
    check_invalid(every)


def test_a_step_that_cannot_be_judged_is_not_called_starved():
  """Its groups are not kept, but not for want of prompts."""

  def score(some, rolled):
    reward = np.ones((len(some.index), N))
    return scored.scores(reward, valid=np.zeros(reward.shape, bool))

  with refuses(TooManyInvalid, "80 of 80"):
    run(set(), target=4, score=score)


@pytest.mark.parametrize("count", tiers.some([3, 1, 5], 1, 1))
def test_processes_keep_and_generate_what_one_does(count, monkeypatch):
  rng = np.random.default_rng(count)
  for _ in range(3):
    candidates = (100 + rng.permutation(60)).tolist()
    good = {int(p) for p in candidates if rng.random() < 0.5}
    alone = run(good, target=9, candidates=candidates)
    with monkeypatch.context() as patch:
      crowd = crowds.Crowd(count, patch)
      draw = lambda i: run(
        good, target=9, candidates=candidates, places=1 + i % 3
      )
      crowd.run(draw)
      many = crowd.run(draw)  # the second step finds nothing of the first
      assert len(crowd.boards) == (2 if count > 1 else 0)
      for board in crowd.boards.values():
        assert board.cleared == count and len(board.notes) == len(alone.kept)
    for sampled in many:
      chex.assert_trees_all_equal(
        [sampled.kept, sampled.groups.prompts, sampled.groups.rollouts],
        [alone.kept, alone.groups.prompts, alone.groups.rollouts],
      )


def test_no_more_candidates_are_open_than_may_be_needed():
  for target, want in ((9, [[(7, 0), (3, 0)], [(5, 0)]]), (1, [[(7, 0)]])):
    plan = RoundPlan((4, 16), 1)
    of = dynamic_sampling.Candidates(prompts, [7, 3, 5], target, plan)
    seen = []
    while (more := of.feed(2, False)) is not None:
      seen.append([*zip(more.index.tolist(), more.first.tolist(), strict=True)])
    assert seen == want


def test_candidates_are_claimed_in_order_while_they_are_needed(monkeypatch):
  """The other claims 0 and 2, and rejects 0."""
  board = crowds.Board()
  board.claims |= {0: "other", 2: "other"}
  monkeypatch.setattr(processes, "Board", lambda name: board)
  pending = dynamic_sampling.SharedCandidates(
    prompts, [*range(9)], 4, RoundPlan((N,))
  )

  def claims(room):
    more = pending.feed(room, False)
    assert more is not None
    return [*more.index]

  assert claims(1) == [1]
  assert claims(5) == [3]  # 0 to 3 may all pass
  assert pending.feed(5, False) is None
  board.write(0, "0 0.0")
  assert claims(5) == [4]
  pending.publish(1, True)
  pending.publish(4, False)
  assert board.notes == {0: "0 0.0", 1: "1 0.0", 4: "0 0.0"}
  board.claims[5] = "other"
  board.write(5, "1 0.0")  # its claim was not seen
  assert pending.feed(5, False) is None  # 1, 2, 3 and 5
  board.write(2, "0 0.0")
  assert claims(5) == [6]
  for i in (3, 6):
    board.write(i, "1 0.0")
  with pytest.raises(dynamic_sampling.Enough):  # 1, 3, 5 and 6
    pending.feed(0, True)


def test_one_process_that_is_to_stop_stops_all(monkeypatch):
  """All hand in what had ended; a next start samples only the rest."""
  ended = threading.Event()

  def stopped(i):
    def order(held):
      ended.set() if i else ended.wait(30)
      return held[:1]

    stopping = lambda: i == 1 and ended.is_set()
    with pytest.raises(Interrupted) as e:
      run({1, 2}, 2, places=1, order=order, stopping=stopping)
    return e.value.finished

  with monkeypatch.context() as patch:
    first, second = crowds.Crowd(2, patch).run(stopped)
  before = first | second
  log = []
  whole = run({1, 2}, 2, sample=sampler_of(3, log=log), before=before)
  assert before and not {*before} & {c for held in log for c in held}
  assert whole.kept.tolist() == [False, True, True]


def test_chunks_of_another_mesh_are_sampled_again():
  of = lambda p, n: rollouts(prompts([p])).tokens[:, :n]
  before = {Chunk(p, 0): scored.rollouts(of(p, n)) for p, n in ((0, 2), (1, N))}
  log = []
  run({0, 1}, 2, sample=sampler_of(3, log=log), before=before)
  assert log == [[(0, 0)]]


def test_a_slow_process_is_seen_by_all(monkeypatch):
  both = threading.Barrier(2, timeout=30)

  def slow(index):
    inner = sampler_of(1)

    def sample(feed):
      for done in inner(feed):
        both.wait()
        time.sleep(0.2 * index)
        yield done

    return sample

  one, other = crowds.Crowd(2, monkeypatch).run(
    lambda i: run({0, 1}, target=2, candidates=range(9), sample=slow(i))
  )
  assert one.rollout_s == other.rollout_s
  assert one.rollout_s[0] < 0.15 < 0.19 <= one.rollout_s[1]
  assert one.spent["process_wait"] >= 0.1 > other.spent["process_wait"]
  assert one.spent["rollout"] == one.rollout_s[0]


# Rounds: chunks of 2 of at most 8 rollouts of at most 3 tokens.
CHUNK, MOST, T = 2, 8, 3


def rate(p):
  """Of right rollouts: prompts 0, 5, 10, .. never, 4, 9, .. always."""
  return (p % 5) / 4


def made(some, count=CHUNK):
  """Rollout n of prompt p: a function of both, with its number as a token."""
  n = some.first[:, None] + np.arange(count)[None]
  length = 1 + (some.index[:, None] + n) % T
  mask = np.arange(T) < length[..., None]
  token = (100 * some.index[:, None] + n)[..., None]
  token = np.broadcast_to(token, mask.shape)
  return scored.rollouts(token, mask, -token / 7.0, length == T)


def drawn_score(some, rollouts):
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


# Until one is right; and all 8, in the same rounds.
SUFFICES = RoundPlan((2, 4, 8), 1)
ALWAYS = RoundPlan((2, 4, 8), 9)


def in_rounds(
  plan=SUFFICES, *, places=3, order=lambda held: held[:1], target=6, **more
):
  more = {"sample": sampler_of(places, order, make=made)} | more
  return run({}, target, candidates=more.pop("candidates", range(40)),
    score=more.pop("score", drawn_score), plan=plan, **more)  # fmt: skip


def drawn(sampled):
  counts = sampled.groups.rollouts.drawn.sum(axis=1).tolist()
  return dict(zip(sampled.groups.prompts.index.tolist(), counts, strict=True))


@pytest.mark.parametrize("right, n, want", [
  (4, 16, 16), (3, 16, 64), (16, 16, 16), (3, 64, 256), (4, 64, 64),
  (0, 256, 256),  # the last round
])  # fmt: skip
def test_a_prompt_goes_on_until_enough_are_right(right, n, want):
  reward = np.where(np.arange(n) < right, 1.0, 0.9)  # nearly right is not right
  assert RoundPlan((16, 64, 256), 4).further(reward) == want


def test_a_prompt_gets_rounds_until_it_stops():
  sampled = in_rounds()
  counts = drawn(sampled)
  assert set(counts.values()) == {2, 4, 8}
  for p, count in counts.items():
    assert rate(p) != 0.0 or count == MOST
    assert rate(p) != 1.0 or count == CHUNK
    # Only whole rounds decide, in the order of n.
    every = drawn_score(prompts([p]), made_of(p)).reward[0]
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
  return Rollouts(join("tokens"), join("logp"),
    join("mask"), join("truncated"), np.full(1, 4.0, np.float32))  # fmt: skip


@pytest.mark.parametrize("plan", [SUFFICES, ALWAYS])
def test_an_extended_prompt_has_the_rollouts_of_a_fixed_number(plan):
  sampled = in_rounds(plan)
  out = sampled.groups.rollouts
  for i, (p, count) in enumerate(drawn(sampled).items()):
    whole = made_of(p)
    for name in ("tokens", "logp", "mask", "truncated"):
      got, want = getattr(out, name)[i], getattr(whole, name)[0]
      np.testing.assert_array_equal(got[:count], want[:count])
      assert not got[count:].any()
    assert out.slot_steps[i] == count / CHUNK
    scores = drawn_score(prompts([p]), whole)
    np.testing.assert_array_equal(
      sampled.groups.scores.reward[i, :count], scores.reward[0, :count]
    )
    assert not sampled.groups.scores.valid[i, count:].any()
    assert all(x is None for x in sampled.groups.scores.responses[i, count:])
    assert None not in [*sampled.groups.scores.responses[i, :count]]


@pytest.mark.parametrize("places", tiers.some([2, 5], 1))
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 999))
def test_neither_the_order_of_finishing_nor_the_places_matter(places, seed):
  rng = random.Random(seed)

  def order(held):
    rng.shuffle(held)
    return held[: rng.randint(1, len(held))]

  want, got = in_rounds(), in_rounds(places=places, order=order)
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
  log = []
  sample = sampler_of(2, log=log, make=made)
  in_rounds(sample=sample, candidates=[5, 10], target=2)
  fed = [*dict.fromkeys(chunk for held in log for chunk in held)]
  assert sorted(fed) == [(p, n) for p in (5, 10) for n in (0, 2, 4, 6)]
  assert [n for p, n in fed if p == 5] == [0, 2, 4, 6]


@pytest.mark.ci
def test_processes_make_the_rounds_of_what_they_claimed(monkeypatch, count=2):
  """A prompt's rounds are made by who claimed it."""
  want = in_rounds(target=9)
  crowd = crowds.Crowd(count, monkeypatch)
  many = crowd.run(lambda i: in_rounds(target=9, places=1 + i))
  for got in many:
    assert got.kept.tolist() == want.kept.tolist()
    chex.assert_trees_all_equal(
      got.groups.rollouts.tokens, want.groups.rollouts.tokens
    )
    assert drawn(got) == drawn(want)
