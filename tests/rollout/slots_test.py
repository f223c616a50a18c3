"""Slots are refilled in the same step, and lanes go on to their next prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from messages import refuses
from small_decoders import DOWN, Table, V, devices, run, spec

from brorl_jax.rollout import programs, sampler, slots
from brorl_jax.rollout.slots import Blocks, page_columns


@pytest.mark.parametrize(
  "prompts, n, slots, limit, slot_steps, written", tiers.some([
  # Length 3: rollouts 0 and 1 take two steps, then rollout 2 takes two
  # beside an idle slot. Length 2: one step each. Length 1: never in one.
  ([3, 1, 2], 3, 2, 9, 3 * 8, 6 + 0 + 3),
  # Two slots end in one step and take a rollout each: 3 rounds, not more.
  ([3, 1, 2], 5, 2, 9, 3 * 12, 10 + 0 + 5),
  ([3, 1, 2], 1, 1, 9, 3 * 2, 2 + 0 + 1),
  ([3, 1, 2], 3, 2, 2, 3 * 4, 3 + 0 + 3),
  ([1, 1, 1], 3, 2, 9, 0, 0),  # every slot idles from the start
], 1, 3))  # fmt: skip
def test_slot_steps_by_hand(prompts, n, slots, limit, slot_steps, written):
  out = run(
    [[v] for v in prompts], params=DOWN, n=n, slots=slots, max_new_tokens=limit
  )
  for p, start in enumerate(prompts):
    want = np.zeros(limit)
    length = min(start, limit)
    want[:length] = np.arange(start)[::-1][:length]
    for r in range(n):
      np.testing.assert_array_equal(out.tokens[p, r], want)
      assert out.mask[p, r].sum() == length and out.mask[p, r, 0]
      assert out.truncated[p, r] == (start > limit)
  np.testing.assert_allclose(out.slot_steps, [slot_steps / 3] * 3, rtol=1e-6)
  assert out.slot_occupancy() == pytest.approx(written / max(slot_steps, 1))
  assert not np.any(out.logp)


# After 4 rollouts end with their third token; after 3 none does.
ENDLESS = jnp.full((V, V), -jnp.inf).at[3, 3].set(0.0)
ENDLESS = ENDLESS.at[jnp.array([4, 5, 1]), jnp.array([5, 1, 0])].set(0.0)


@pytest.mark.parametrize("columns", tiers.some([40, 8], 1, 1))
def test_lanes_go_on_in_the_middle_of_a_page(columns, monkeypatch):
  for where in (sampler, slots):
    monkeypatch.setattr(where, "page_columns", lambda T: columns)
  out = run([[3], *[[4]] * 18],
    params=ENDLESS, n=2, slots=2, lanes=2, max_new_tokens=40)  # fmt: skip
  length = np.asarray(out.mask).sum(axis=2)
  np.testing.assert_array_equal(length, [[40] * 2, *[[3] * 2] * 18])
  # One lane has 39 steps of the first prompt and then 2 of the next, which was
  # in its window; the other has all the rest meanwhile.
  written = 2 * 39 + 2 * 2 * 18
  assert out.slot_occupancy() >= written / (2 * 2 * 41) - 1e-6


def test_lanes_go_through_all_prompts_in_one_program(monkeypatch):
  told, segment = [], programs.segment

  def spy(*args):
    told.append(args)
    return segment(*args)

  monkeypatch.setattr(programs, "segment", spy)
  run([[3], *[[4]] * 19],
    params=ENDLESS, n=2, slots=2, lanes=2, max_new_tokens=40)  # fmt: skip
  assert len(told) == 1


GIVE = jax.jit(slots.give_blocks, static_argnums=3)
TAKE_BACK = jax.jit(slots.return_blocks)
SHORTEST = jax.jit(slots.shortest_row)


def made(held, free, most):
  count, table = sum(held), np.zeros((len(held), most), np.int32)
  ids = iter(range(count))
  for row, n in zip(table, held, strict=True):
    row[:n] = [next(ids) for _ in range(n)]
  spare = [*range(count, count + free), *[0] * count]
  one = lambda x: jnp.asarray([x], jnp.int32)
  return Blocks(jnp.asarray(spare, jnp.int32), one(free), jnp.asarray(table),
    jnp.asarray(held, jnp.int32), one(0), one(0))  # fmt: skip


def given(held, free, length, *, most=4, busy=None, columns=2):
  """How many blocks each row gets, who goes on, and who is stalled."""
  before = made(held, free, most)
  busy = jnp.asarray([True] * len(held) if busy is None else busy)
  length = jnp.asarray(length, jnp.int32)
  after, goes, stalled = GIVE(before, length, busy, columns)
  got = np.asarray(after.held - before.held).tolist()
  assert free - int(after.count[0]) == sum(got)
  assert int(after.stalled[0]) == int(stalled.sum())
  return got, goes.tolist(), stalled.tolist()


def test_a_row_gets_a_block_when_its_next_token_begins_one():
  # With 2 columns: tokens 1 and 2 fill block 0, tokens 3 and 4 block 1.
  got, goes, stalled = given([1, 1, 2, 2, 0], 9, [2, 3, 4, 5, 1])
  assert got == [0, 1, 0, 1, 1]
  assert goes == [True] * 5 and stalled == [False] * 5


def test_a_row_without_a_rollout_gets_nothing():
  got, goes, stalled = given([0, 0], 9, [1, 1], busy=[False, True])
  assert (got, goes, stalled) == ([0, 1], [False, True], [False, False])


def test_longer_rows_are_first_then_earlier_ones():
  length = [3, 5, 3, 7]
  held = [1, 2, 1, 3]
  assert given(held, 1, length)[0] == [0, 0, 0, 1]
  assert given(held, 2, length)[0] == [0, 1, 0, 1]
  assert given(held, 3, length)[0] == [1, 1, 0, 1]
  _, goes, stalled = given(held, 3, length)
  assert goes == [True, True, False, True]
  assert stalled == [False, False, True, False]


@pytest.mark.parametrize("held, free, length, most, begin", [
  # One that may want another block: two free, one begins.
  ([1, 0, 0], 2, [2, 1, 1], 4, [1, 0]),
  # The first to begin leaves 3 blocks for 2 rows that may want them.
  ([1, 0, 0], 4, [2, 1, 1], 4, [1, 1]), ([1, 0, 0], 3, [2, 1, 1], 4, [1, 0]),
  # A row that has all it can have wants no more.
  ([4, 0, 0], 1, [8, 1, 1], 4, [1, 0]),
  # What a longer row takes now is not free, and it may want one more.
  ([1, 0, 0], 2, [3, 1, 1], 4, [0, 0]),
  # Its last block: it may not.
  ([3, 0, 0], 2, [7, 1, 1], 4, [1, 0]),
  # A rollout of one block never wants another.
  ([0, 0, 0], 3, [1, 1, 1], 1, [1, 1]),
])  # fmt: skip
def test_a_row_begins_while_there_is_room(held, free, length, most, begin):
  got, goes, stalled = given(held, free, length, most=most)
  assert got[1:] == begin
  # Who has not begun waits, and is not stalled.
  assert goes[1:] == [bool(x) for x in begin] and not any(stalled[1:])


def test_the_shortest_row_that_holds_blocks():
  find = lambda held, length: SHORTEST(
    made(held, 0, 4), jnp.asarray(length, jnp.int32)
  ).tolist()
  assert find([2, 1, 0], [4, 2, 1]) == [False, True, False]
  assert find([1, 2, 1], [2, 3, 2]) == [False, False, True]  # the last in order
  assert find([0, 0], [1, 1]) == [False, False]


def test_blocks_come_back_from_the_rows_that_are_named():
  after = TAKE_BACK(made([2, 0, 3], 1, 4), jnp.asarray([False, True, True]))
  assert after.held.tolist() == [2, 0, 0] and after.count.tolist() == [4]
  assert after.free.tolist()[:4] == [5, 2, 3, 4]


def simple(length, held, busy, free, most, columns):
  """`give`, row by row: which rows get a block."""
  got = np.zeros(len(length), bool)
  order = sorted(np.flatnonzero(busy), key=lambda b: (-length[b], b))
  need = [b for b in order if held[b] * columns < length[b]]
  for b in need:
    if held[b] and free:
      got[b], free = True, free - 1
  for b in need:
    running = [r for r in order if held[r] + got[r] and held[r] + got[r] < most]
    if not held[b] and free > len(running):
      got[b], free = True, free - 1
  return got


@pytest.mark.parametrize("seed", tiers.some(range(6), 1, 2))
def test_rows_of_random_length_never_share_or_lose_a_block(seed):
  """Rollouts follow each other in 7 rows; each ends, whatever the pool."""
  rng = np.random.default_rng(seed)
  B, columns, most = 7, (1, 2, 3)[seed % 3], (1, 4, 5)[seed // 2]
  longest = most * columns  # tokens that may be in the pool
  total = most + int(rng.integers(0, 2 * most + 1))
  state = slots.none_held(total, B, most)
  left = [int(n) for n in rng.integers(2, longest + 2, 30)]
  goal = np.zeros(B, int)  # tokens of the row's rollout; 0: idle
  length = np.ones(B, int)
  done, restarted = 0, 0
  for _ in range(20_000):
    for b in np.flatnonzero(goal == 0)[: len(left)]:
      goal[b], length[b] = left.pop(), 1
    busy = goal > 0
    if not busy.any():
      break
    held, free = np.asarray(state.held), int(state.count[0])
    state, goes, stalled = GIVE(
      state, jnp.asarray(length, jnp.int32), jnp.asarray(busy), columns
    )
    want = simple(length, held, busy, free, most, columns)
    np.testing.assert_array_equal(np.asarray(state.held) - held, want)
    length = length + np.asarray(goes)
    over = np.asarray(goes) & (length >= goal)
    again = np.zeros(B, bool)
    if stalled.any() and not over.any():
      again = np.asarray(SHORTEST(state, jnp.asarray(length, jnp.int32)))
      # The longest of those that hold blocks is not the one.
      first = max(np.flatnonzero(state.held > 0), key=lambda b: (length[b], -b))
      assert again.sum() == 1 and not again[first]
    state = TAKE_BACK(state, jnp.asarray(over | again))
    length[over | again] = 1
    goal[over] = 0
    done, restarted = done + over.sum(), restarted + again.sum()
    own = [
      *np.asarray(state.free)[: int(state.count[0])],
      *(i for b in range(B) for i in state.table[b, : state.held[b]].tolist()),
    ]
    assert sorted(own) == list(range(total))
    assert not np.asarray(state.held)[goal == 0].any()
  assert done == 30 and not left
  if total >= B * most:
    assert restarted == 0


@pytest.mark.parametrize("limit, columns, pages", [
  (6, 6, 1),  # shorter than a page
  (65, 64, 2), (512, 64, 8),
  (513, 128, 5),  # never more than 8 pages
  (8192, 1024, 8),
])  # fmt: skip
def test_pages_by_hand(limit, columns, pages):
  assert page_columns(limit) == columns
  assert spec(Table(), max_new_tokens=limit).program(1).pages == pages


def test_a_rollout_ends_with_any_of_its_stop_ids():
  ends = spec(Table(), stop_ids=(0, 4)).program(1)
  token = jnp.array([[0, 1], [3, 4]])
  assert ends.ended(token).tolist() == [[True, False], [False, True]]
  assert not spec(Table(), stop_ids=()).program(1).ended(token).any()


def cached(blocks=None, **policy):
  """20 tokens in 2 lanes of 3 slots."""
  how = dict(n=3, max_new_tokens=20, blocks=blocks)
  return spec(Table(**policy), **how).program(2)


def test_the_policy_says_whether_there_is_a_pool():
  pages = cached()
  assert cached(99) == pages
  assert (pages.blocks, pages.unchecked, pages.turns) == (0, 1, False)
  pool = cached(pool_columns=6)
  # 20 tokens are 4 blocks of 6.
  assert (pool.columns, pool.pages, pool.blocks) == (6, 4, 24)
  assert pool.unchecked > 1 and not pool.turns
  assert cached(7, pool_columns=6).blocks == 7


def test_a_pool_has_room_for_one_longest_rollout():
  assert cached(4, pool_columns=6).blocks == 4
  with refuses(ValueError, "blocks = 3 ... at least 4 ... 20 tokens"):
    cached(3, pool_columns=6)


def test_several_pages_turn_and_a_single_one_does_not():
  turns = lambda T: spec(Table(), max_new_tokens=T).program(1).turns
  assert turns(65) and not turns(64)


@pytest.mark.parametrize("places, lanes, count, each",
  [(5, None, 1, 5), (5, 3, 1, 3), (6, 3, 2, 2), (6, 9, 2, 3)])  # fmt: skip
def test_prompts_decode_on_the_lanes_asked_for(places, lanes, count, each):
  """Of one device; at most one for each of its places."""
  one = spec(Table(), lanes=lanes, mesh=devices(count))
  assert one.program(places).lanes == each
  halves = one.program(2 * places, parts=2)
  assert (halves.chunk, halves.slots) == (8, 8)


def crowd(seed, lanes=3, R=4, P=6, N=8):
  """A state whose lanes work on two prompts each, of which some are done."""
  rng = np.random.default_rng(seed)
  window = rng.permutation(P)[: 2 * lanes].reshape(lanes, 2)
  rollout = np.full((lanes, R), P * N)
  for a, own in enumerate(window):
    busy = rng.integers(0, R + 1)
    all_of = np.concatenate([p * N + np.arange(N) for p in own])
    rollout[a, rng.permutation(R)[:busy]] = rng.permutation(all_of)[:busy]
  some = lambda: jnp.asarray(rng.integers(1, 9, (lanes, R)), jnp.int32)
  one = jnp.zeros((1,), jnp.int32)
  return slots.DecodeState(column=one, slot_steps=one,
    todo=jnp.full(P + 1, P), next=one, window=jnp.asarray(window),
    home=jnp.arange(lanes, dtype=jnp.int32), started=jnp.full(lanes, 2 * N),
    rollout=jnp.asarray(rollout), token=some(), length=some(),
    packed=jnp.zeros((P * N, 5, 2), jnp.int32), blocks=None)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_slots_in_narrow_lanes_and_back(seed):
  """Each rollout keeps its token, and its lane has its prompt."""
  P, N, state = 6, 8, crowd(seed)
  full = spec(n=N, slots=4, policy=Table()).program(6)
  full = dataclasses.replace(full, lanes=3, full=(3, 4))
  ravel = lambda x: np.ravel(x).tolist()
  each = lambda x: zip(*map(ravel, (x.rollout, x.token, x.length)), strict=True)
  held = lambda state: {r: rest for r, *rest in each(state) if r < P * N}
  want, homes = held(state), np.asarray(state.rollout // N)
  home = {int(p): a for a, own in enumerate(homes) for p in own if p < P}
  for lanes, narrow in ((6, 2), (12, 1), (3, 4)):
    rows = np.ravel(state.rollout)
    row, state = programs.resize(
      dataclasses.replace(full, lanes=lanes, slots=narrow), state
    )
    assert held(state) == want
    now = np.ravel(state.rollout)
    stays = rows[np.minimum(row, len(rows) - 1)]
    moved = np.where(row < len(rows), stays, P * N)
    np.testing.assert_array_equal(now, moved)
    for a, own in enumerate(np.asarray(state.rollout)):
      prompts = {int(r) // N for r in own if r < P * N}
      assert prompts <= {*np.asarray(state.window[a]).tolist()}
      if prompts and lanes != 3:
        assert {home[p] for p in prompts} == {int(state.home[a])}
    # Parts that are done with the first prompt of a lane go on to its second.
    first = jnp.any(state.rollout // N == state.window[:, :1], axis=1)
    after = jnp.stack([state.window[:, 1], jnp.full(lanes, P)], axis=1)
    state = dataclasses.replace(
      state, window=jnp.where(first[:, None], state.window, after),
      started=jnp.where(first, state.started, state.started - N),
    )  # fmt: skip
  assert state.home.tolist() == [0, 1, 2]
