"""The stream, with the decoders of the sampler's tests."""

import functools
import threading
import time

import chex
import crowds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored
import tiers
from small_decoders import (
  DOWN,
  KEY,
  RECALL,
  Feed,
  Recall,
  Table,
  by_prompt,
  devices,
  numbered,
  spec,
)

from brorl_jax.rollout import dynamic_sampling, programs, sampler, stream
from brorl_jax.types import Prompts


def streamed(feed, *, places, params=RECALL, watch=lambda _: None, **changes):
  how = spec(**changes)
  return by_prompt(
    stream.stream(how, params, feed, KEY, places=places, watch=watch)
  )


def together(prompts, **changes):
  return jax.device_get(sampler.rollouts(spec(**changes), RECALL, prompts, KEY))


def same(got, want):
  assert sorted(got) == list(range(len(want.tokens)))
  for p, one in got.items():
    for name in ("tokens", "logp", "mask", "truncated"):
      np.testing.assert_array_equal(
        getattr(one, name)[0], getattr(want, name)[p], err_msg=f"{name} of {p}"
      )


@pytest.mark.parametrize("count, places, changes", tiers.some([
  (11, 8, {"lanes": 3, "slots": 5}),  # places whose prompts wait for a lane
  pytest.param(5, 1, {"slots": 5}, marks=pytest.mark.slow),
  pytest.param(3, 8, {}, marks=pytest.mark.slow),  # places without a prompt
  (9, 4, {"lanes": 2, "slots": 5, "max_new_tokens": 150}),  # pages, compacted
  (11, 8, {"lanes": 3, "slots": 5, "groups": 2}),
  (9, 4, {"lanes": 1, "slots": 5, "max_new_tokens": 150, "groups": 3}),
  (3, 1, {"groups": 2}),  # a place has one group
  (1, 1, {"max_new_tokens": 1}),  # no slot is ever used
], 1, 5))  # fmt: skip
def test_rollouts_are_those_of_all_prompts_together(count, places, changes):
  prompts = numbered(count)
  of_all = {k: v for k, v in changes.items() if k == "max_new_tokens"}
  got = streamed(Feed(prompts), places=places, **changes)
  same(got, together(prompts, **of_all))


@pytest.mark.ci
@pytest.mark.parametrize("late", [0, 1])
def test_what_a_group_decodes_depends_on_no_clock(late, monkeypatch):
  """Of prompts 0, 2, 4, ... and of 1, 3, 5, ..., in 2 places each."""
  real = sampler.advance

  def advance(decoding, *how):
    if threading.current_thread().name.endswith(f"_{late}"):
      time.sleep(0.05)
    return real(decoding, *how)

  monkeypatch.setattr(sampler, "advance", advance)
  how = {"max_new_tokens": 150, "lanes": 2, "slots": 5, "groups": 2}
  got = streamed(Feed(numbered(8)), places=4, **how)
  whole = {}
  for g in range(2):
    part = jax.tree.map(lambda x, g=g: x[g::2], numbered(8))
    whole |= streamed(Feed(part), places=2, **how | {"groups": 1, "lanes": 1})
  for p, one in whole.items():
    for name in ("tokens", "logp", "slot_steps"):
      np.testing.assert_array_equal(getattr(got[p], name), getattr(one, name))


@pytest.mark.ci
def test_a_place_is_free_as_soon_as_its_prompt_is_done():
  """Prompt 0 takes 40 steps; five short ones pass through the place beside."""
  endless = jnp.full((6, 6), -jnp.inf).at[3, 3].set(0.0)
  endless = endless.at[jnp.array([4, 5, 1]), jnp.array([5, 1, 0])].set(0.0)
  tokens = np.array([[3]] + [[4]] * 5, np.int32)
  prompts = Prompts(tokens, tokens > 0, np.arange(6, dtype=np.int32))
  told = []
  got = streamed(Feed(prompts), places=2, policy=Table(), params=endless,
    n=2, slots=2, max_new_tokens=40, watch=told.append)  # fmt: skip
  assert list(got) == [1, 2, 3, 4, 5, 0]
  assert [int(one.mask.sum()) for one in got.values()] == [6] * 5 + [80]
  # Two lanes of two slots; the last steps are those of prompt 0.
  assert told[-1].slot_steps == 39 * 4
  total = sum(float(one.slot_steps[0]) for one in got.values())
  assert total == told[-1].slot_steps


@pytest.mark.parametrize(
  "count, steps",
  # Three at a time are admitted. Of 9 prompts 5, 3 and 1 wait for a lane, which
  # is less than one for each. Of 10 there are 6, 4, 2 and 0.
  [(9, [0, 0, 0, 6, 8, 10]), (10, [0, 0, 0, 0, 8, 10])],
)
def test_the_feed_is_asked_before_lanes_run_out_of_prompts(count, steps):
  """Prompts of two steps each in 2 lanes, which hold two prompts each."""
  params = jnp.full((6, 6), -jnp.inf)
  params = params.at[jnp.array([4, 5, 1]), jnp.array([5, 1, 0])].set(0.0)
  tokens = np.full((count, 1), 4, np.int32)
  prompts = Prompts(tokens, tokens > 0, np.arange(count, dtype=np.int32))
  told = []
  got = streamed(Feed(prompts), places=12, policy=Table(), params=params,
    n=2, slots=2, lanes=2, max_new_tokens=40, watch=told.append)  # fmt: skip
  assert len(got) == count
  assert [one.slot_steps // 4 for one in told] == steps


@pytest.mark.ci
def test_nothing_is_asked_for_without_room_and_idle_means_idle():
  feed = Feed(numbered(6), most=1)
  streamed(feed, places=2, policy=Table(), params=DOWN)
  rooms, idle = zip(*(x for x in feed.asked if x[0]), strict=True)
  assert all(room <= 2 for room in rooms) and len(rooms) < len(feed.asked)
  assert idle[0] and feed.asked[-1][1]  # at the start, and at the end
  assert not idle[1]  # one prompt was given and is not done


def test_ends_when_nothing_is_to_be_had():
  assert streamed(Feed(numbered(0)), places=2) == {}


def test_prompts_go_to_the_emptiest_device():
  places = stream.Places(3, 3)
  places.visited = 2
  held = [{0: numbered(1), 2: numbered(1)}, {}, {1: numbered(1)}]
  places.chunks = [dict(own) for own in held]
  units, at = places.put(numbered(4))
  # The device with three free places is first, then those with two in order.
  new = [{i: int(x.index[0]) for i, x in own.items() if i not in before}
    for own, before in zip(places.chunks, held, strict=True)]  # fmt: skip
  assert new == [{1: 3}, {0: 0, 1: 1}, {0: 2}]
  assert units.real.tolist() == [True, False, True, True, True, False]
  assert at.tolist() == [1, 0, 0, 1, 0, 0]
  assert units.prompts.index[units.real].tolist() == [3, 0, 1, 2]
  assert places.room == 2  # one each of the first and the last
  chosen = np.array([[0, 0, 1], [1, 0, 1], [1, 1, 1]], bool)
  assert places.among(chosen) == [[2], [0], [0, 1]]


@pytest.mark.ci
def test_kept_groups_are_the_same_on_many_devices():
  """What is rejected, or gets another round, hangs on the rollouts alone."""
  plan = dynamic_sampling.RoundPlan((*range(4, 33, 4),), 1)

  def score(prompts, rollouts):
    first = rollouts.tokens[..., 0]
    reward = (first == 1) & (rollouts.mask.sum(axis=2) > 3)
    return scored.scores(reward, first)

  def informative(groups):
    reward, drawn = groups.scores.reward, groups.rollouts.drawn
    most = reward.max(axis=1, where=drawn, initial=0.0)
    return most > reward.min(axis=1, where=drawn, initial=1.0)

  every = numbered(64)
  found = []
  several = devices(4, data=2, expert=2)
  for mesh, places in ((None, 3), (several, 4)):
    sampled = dynamic_sampling.collect(functools.partial(stream.stream,
        spec(n=plan.chunk, mesh=mesh), RECALL, key=KEY, places=places), score,
      informative, lambda some: jax.tree.map(lambda x: x[list(some)], every),
      range(64), target=6, plan=plan)  # fmt: skip
    assert sampled.kept.sum() == 6 and 6 < len(sampled.kept) < 64
    assert len({*sampled.groups.rollouts.drawn.sum(axis=1).tolist()}) > 1
    found.append((sampled.kept, sampled.kept_groups()))
  np.testing.assert_array_equal(found[0][0], found[1][0])
  for a, b in zip(*(jax.tree.leaves(g) for _, g in found), strict=True):
    if a.ndim > 1:  # not how many slots there were
      np.testing.assert_array_equal(a, b)


class Chunks:
  """Gives (p, first) in a mixed order, two at a time."""

  def __init__(self, prompts, n, chunk, seed=0):
    every = [dynamic_sampling.Chunk(p, first) for p in range(len(prompts.index))
      for first in range(0, n, chunk)]  # fmt: skip
    order = np.random.default_rng(seed).permutation(len(every))
    self.prompts, self.left = prompts, [every[i] for i in order]

  def __call__(self, room, idle):
    some, self.left = self.left[: min(room, 2)], self.left[min(room, 2) :]
    if not some:
      return None
    at = [chunk.p for chunk in some]
    prompts = jax.tree.map(lambda x: x[at], self.prompts)
    return dynamic_sampling.with_first(prompts, some)


def joined(make, prompts, n, chunk, places=4):
  """Rollouts of each prompt, from chunks that `make` finishes in any order."""
  found = {}
  for some, rollouts in make(
    feed=Chunks(prompts, n, chunk), key=KEY, places=places
  ):
    for i, chunk_of in enumerate(zip(some.index, some.first, strict=True)):
      found[tuple(map(int, chunk_of))] = jax.tree.map(
        lambda x, i=i: x[i : i + 1], rollouts
      )
  assert len(found) == len(prompts.index) * n // chunk
  return lambda name: np.stack([
    np.concatenate(
      [getattr(found[p, f], name)[0] for f in range(0, n, chunk)]
    )
    for p in range(len(prompts.index))
  ])  # fmt: skip


@pytest.mark.parametrize(
  "chunk, mesh", tiers.some([(8, None), (12, 2), (1, None)], 1, 2)
)
def test_chunks_are_the_rollouts_of_a_prompt_bit_for_bit(chunk, mesh):
  """24 of each of 5 prompts, in 4 places, whatever comes first."""
  prompts, n = numbered(5), 24
  of = joined(functools.partial(stream.stream,
      spec(n=chunk, slots=min(chunk, 5), mesh=mesh and devices(mesh)), RECALL),
    prompts, n, chunk)  # fmt: skip
  want = together(prompts, n=n)
  for name in ("tokens", "logp", "mask", "truncated"):
    np.testing.assert_array_equal(of(name), getattr(want, name), err_msg=name)


def batch(*index):
  """Prompts p of two tokens, 10 p and 10 p + 1; None is padding."""
  real = np.array([p is not None for p in index])
  index = np.array([p or 0 for p in index], np.int32)
  tokens = np.stack([10 * index, 10 * index + 1], axis=1).astype(np.int32)
  prompts = Prompts(tokens, tokens >= 0, index)
  return programs.PrefillBatch(prompts, np.zeros(len(index), np.int32), real)


def test_2048_tokens_are_read_together_or_as_many_as_there_are_places():
  assert stream.prompts_together(100, 80) == 25
  assert stream.prompts_together(3, 80) == 3
  assert stream.prompts_together(100, 5000) == 1


def test_each_device_reads_what_it_has_not_read(monkeypatch):
  """2 devices of 3 rows, which read 2 prompts at a time."""
  monkeypatch.setattr(stream, "_TOKENS_TOGETHER", 4)
  held = stream.Shelf(2, 3)
  rows, parts = held.rows(batch(4, 5, 6, 5, None, None), [{4, 5, 6}, {5}])
  assert rows.tolist() == [0, 1, 2, 0, 0, 0]
  (a, b) = parts
  # 3 is no row. Padding reads whatever is first.
  assert a.to.tolist() == [0, 1, 0, 3]
  assert b.to.tolist() == [2, 3, 3, 3]
  assert a.tokens[[0, 1, 2], 0].tolist() == [40, 50, 50]
  assert b.tokens[0].tolist() == [60, 61]
  assert a.mask.all()
  # Both have prompt 5, and nobody 7, for which 4 goes: it was used before 6,
  # and 5 is used again.
  rows, parts = held.rows(batch(5, 7, None, 5, 5, None), [{5, 6, 7}, {5}])
  assert rows.tolist() == [1, 0, 0, 0, 0, 0]
  (a,) = parts
  assert a.to.tolist() == [0, 3, 3, 3] and a.tokens[0, 0] == 70
  # Prompt 6 was used before, but it is in use.
  rows, parts = held.rows(batch(8, None, None, None, None, None), [{6, 8}, {5}])
  assert rows[0] == 1 and parts[0].to.tolist() == [1, 3, 3, 3]
  # Prompt 6 is older than 7 and 8, but it is used once more.
  rows, _ = held.rows(batch(6, None, None, None, None, None), [{6}, {5}])
  assert rows[0] == 2
  rows, parts = held.rows(batch(9, None, None, None, None, None), [{9}, {5}])
  assert rows[0] == 0 and parts[0].to.tolist() == [0, 3, 3, 3]
  # Prompt 5 is gone from the first device, and is read again there alone.
  rows, parts = held.rows(batch(5, None, None, 5, None, None), [{5, 6}, {5}])
  assert [part.to.tolist() for part in parts] == [[1, 3, 3, 3]]


@pytest.mark.ci
@pytest.mark.parametrize("places", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prompt_is_read_once_if_there_is_room(monkeypatch, places):
  """5 prompts, 8 chunks of each; whatever is read again changes nothing."""
  found = []
  for name in ("open_shelf", "read_more"):
    real = getattr(stream, name)

    def seen(*args, real=real, **how):
      (part,) = [x for x in args if isinstance(x, stream.PromptPart)]
      found.append(int((part.to < places).sum()))
      return real(*args, **how)

    monkeypatch.setattr(stream, name, seen)
  make = functools.partial(stream.stream, spec(n=4, lanes=2), RECALL)
  of = joined(make, numbered(5), 32, 4, places=places)
  want = together(numbered(5), n=32)
  np.testing.assert_array_equal(of("tokens"), want.tokens)
  assert sum(found) == 5 if places == 8 else 5 < sum(found) <= 40


def test_prompts_that_come_when_few_slots_are_left_compile_nothing(monkeypatch):
  """4 lanes of 8 are compacted to fewer before the last prompts come."""
  left, told, shapes = [*range(8)], [], []
  read = stream.read_more

  def seen(*args, **how):
    shapes.append([np.shape(x) for x in jax.tree.leaves((args, how))])
    return read(*args, **how)

  monkeypatch.setattr(stream, "read_more", seen)

  def feed(room, idle):
    late = len(left) <= 2 and not (told and told[-1].busy <= 4)
    some = [] if late and not idle else [left.pop(0) for _ in left[:room][:2]]
    if not some:
      return None
    tokens = np.array(some, np.int32)[:, None] % 6
    return Prompts(tokens, tokens >= 0, np.array(some, np.int32))

  endless = RECALL.at[:, :, 0].add(-3.0)
  out = [*stream.stream(
    spec(n=8, max_new_tokens=200), endless, feed, KEY, places=4,
    watch=told.append,
  )]  # fmt: skip
  assert sum(len(prompts.index) for prompts, _ in out) == 8 and len(shapes) > 2
  assert all(x == shapes[0] for x in shapes)


def crossing(
  seed, params, *, places, max_age=1, steps=3, target=3, usual=1.0, **changes
):
  """Steps of a run, whose verdicts come late by chance; not with seed 0."""
  every, rng = numbered(64), np.random.default_rng(seed)
  plan = dynamic_sampling.RoundPlan((8,), 0, 4)
  how = spec(**{"n": plan.chunk} | changes)

  def score(prompts, rollouts):
    time.sleep(rng.random() * 0.2 * bool(seed))
    assert rollouts.whole.all() and rollouts.age is not None
    first = rollouts.tokens[..., 0]
    return scored.scores(1.0 * (first == 1), first)

  found, begin, before = [], 0, None
  for step in range(steps):

    def sample(feed, crosses, step=step):
      of = how, params[step % len(params)], feed, KEY
      return stream.stream(*of, places=places, crossing=crosses)

    sampled = dynamic_sampling.collect(
      sample, score, lambda groups: groups.scores.reward.any(axis=1),
      lambda some: jax.tree.map(lambda x: x[list(some)], every),
      range(begin, 64), target=target, plan=plan, max_age=max_age,
      before=before, usual=usual,
    )  # fmt: skip
    assert sampled.kept.sum() == target
    begin, before = begin + len(sampled.kept), sampled.unfinished
    found.append(sampled)
  return found


def same_steps(a, b):
  for one, other in zip(a, b, strict=True):
    chex.assert_trees_all_equal(one.unfinished, other.unfinished)
    for field in ("tokens", "logp", "age", "truncated"):
      x, y = (getattr(s.groups.rollouts, field) for s in (one, other))
      np.testing.assert_array_equal(x, y, err_msg=field)


CROSSING = tiers.some([
  {"places": 8, "lanes": 3, "slots": 2},
  {"places": 6, "lanes": 2, "slots": 2, "max_new_tokens": 150, "groups": 2},
  {"places": 6, "lanes": 2, "slots": 2, "policy": Recall(pool_columns=4)},
], desk=1)  # fmt: skip


@pytest.mark.parametrize("changes", CROSSING)
def test_what_crosses_a_step_hangs_on_no_clock(changes, monkeypatch):
  """Also if no device waits for verdicts, and much is decoded for nothing."""
  monkeypatch.setattr(dynamic_sampling.Candidates, "behind", False)
  a, b = (crossing(i, [RECALL, RECALL[::-1]], **changes) for i in (0, 1))
  same_steps(a, b)
  ages = [int(s.groups.rollouts.age.max()) for s in a]
  assert ages[0] == 0 and max(ages) == 1
  # Of rollouts that have tokens and no end: what this is for.
  assert any(not x.whole.all() for x in a[0].unfinished.values())


@pytest.mark.ci
def test_nor_with_two_processes(monkeypatch):
  """One of them is slower, and its verdicts come later."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def both(seed):
    with monkeypatch.context() as patch:
      crowd = crowds.Crowd(2, patch)
      index = lambda: crowd._here.index
      patch.setattr(jax, "process_index", index)
      of = {"places": 4, "lanes": 2, "slots": 2, "target": 4}
      each = lambda i: crossing(seed + i, [RECALL, RECALL[::-1]], **of)
      return crowd.run(each)

  a, b = both(0), both(5)
  for one, other in zip(a, b, strict=True):
    same_steps(one, other)
  for one, other in zip(*a, strict=True):  # both train on the same
    chex.assert_trees_all_equal(
      one.kept_groups().rollouts.tokens, other.kept_groups().rollouts.tokens
    )
    mine = [{c.p % 2 for c in x.unfinished} for x in (one, other)]
    assert mine == [{0}, {1}]


@pytest.mark.parametrize("changes", CROSSING)
def test_rollouts_that_cross_a_step_are_the_same_under_the_same_policy(changes):
  found = crossing(0, [RECALL], max_age=2, **changes)
  rollouts = [s.groups.rollouts for s in found]
  count = sum(len(s.kept) for s in found)
  how = spec(**{k: v for k, v in changes.items() if k != "places"} | {"n": 8})
  prompts = jax.tree.map(lambda x: x[:count], numbered(64))
  want = jax.device_get(sampler.rollouts(how, RECALL, prompts, KEY))
  for name in ("tokens", "mask", "logp", "truncated"):
    got = np.concatenate([getattr(x, name) for x in rollouts])
    np.testing.assert_array_equal(got, getattr(want, name), err_msg=name)


@pytest.mark.ci
def test_no_token_is_older_than_it_may_be():
  """Many places: what was begun early is needed late, and begun again."""
  of = {"places": 32, "lanes": 8, "slots": 2, "target": 1, "steps": 4}
  of |= {"usual": None}  # so much is begun that some must wait
  for most in (1, 2):
    found = crossing(0, [RECALL], max_age=most, **of)
    left = [x.age.max() for s in found for x in s.unfinished.values()]
    assert max(left) == max(s.groups.rollouts.age.max() for s in found) == most
