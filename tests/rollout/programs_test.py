"""The compiled programs: what they read at a time, and what they copy."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from compiled import compiled
from small_decoders import (
  DOWN,
  KEY,
  POLICY,
  RECALL,
  STOP,
  TABLE,
  Feed,
  Recall,
  Table,
  by_prompt,
  devices,
  policy_params,
  run,
  same,
)
from small_decoders import spec as spec_of

from brorl_jax.model import cache, sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope, Target
from brorl_jax.rollout import programs, sampler, slots, stream
from brorl_jax.rollout.slots import fold_in, unpack
from brorl_jax.types import Prompts

WIDE = Policy(vocab=320, width=32, layers=2, heads=8, kv_heads=2,
  head_size=16, mlp=32, rope=Rope(1e4), norm_eps=1e-6, tied=True)  # fmt: skip


def batch_of(P):
  tokens = np.zeros((P, 8), np.int32)
  some = Prompts(tokens, tokens == 0, np.arange(P))
  return programs.batch_of(some, np.ones(P, bool))


def lowered(spec, params, caches):
  """The newest cache, the state and the program of a step over these caches."""
  inputs, state, _ = programs.start(spec, params, batch_of(2), KEY)
  *older, newest = caches
  args = inputs, (*older,), np.int32(len(older)), newest, state, False
  step = functools.partial(programs.segment, spec)
  program = compiled(step, *args, np.int32(9), donated=(3, 4))
  return newest, state, program


def segment(pages, mesh=None, policy=WIDE):
  """The program of a step with so many pages, 2 lanes of 24 slots."""
  spec = spec_of(policy, n=24, max_new_tokens=512, mesh=mesh).program(2)
  params = policy.init(jax.random.key(0))
  if mesh is not None:
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
  page, _, program = lowered(spec, params, [programs.cache(spec)] * pages)
  return page, program


@pytest.mark.perf
def test_a_step_copies_no_page():
  page, program = segment(1)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  # Keys of one layer are the smallest copy there could be; scores are smaller.
  assert used.temp_size_in_bytes < page[0].k.nbytes


@pytest.mark.perf
def test_a_step_widens_int8_pages_layer_by_layer():
  policy = dataclasses.replace(WIDE, int8_cache=True, layers=4)
  page, program = segment(1, policy=policy)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  one = 4 * (page[0].k.nbytes + page[0].v.nbytes)
  assert used.temp_size_in_bytes < 2 * one  # of 4


def segment_over_pool(policy, params, T, blocks):
  spec = spec_of(policy, n=24, max_new_tokens=T, blocks=blocks).program(2)
  return lowered(spec, params, [programs.cache(spec)])


@pytest.mark.perf
def test_a_step_over_a_pool_copies_no_record():
  pool, state, program = segment_over_pool(
    Table(pool_columns=64), TABLE, 4096, 64
  )
  used = program.memory_analysis()
  records = state.packed.nbytes
  assert used.alias_size_in_bytes >= bytes_of(pool) + records
  assert used.temp_size_in_bytes < records / 2


@pytest.mark.perf
def test_a_step_over_a_pool_copies_no_pool():
  policy = dataclasses.replace(WIDE, target=Target("rocm", 1, 2**30))
  params = policy.init(jax.random.key(0))
  pool, _, program = segment_over_pool(policy, params, 512, 2048)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(pool)
  # The simple form gathers the tables of a layer, 48 rows of 8 blocks.
  assert used.temp_size_in_bytes < bytes_of(pool[0])


def test_each_device_has_its_own_pool_of_its_own_heads():
  policy = dataclasses.replace(
    WIDE, int8_cache=True, target=Target("rocm", 4, 2**30)
  )
  spec = spec_of(
    policy, n=4, max_new_tokens=9, blocks=5, mesh=devices(4, tensor=2)
  )
  pools = programs.cache(spec.program(2))
  assert len(pools) == policy.layers
  own = lambda x: x.sharding.shard_shape(x.shape)
  for each in pools:
    assert each.kv.shape == (10, 2, 2, 64, 16)
    assert (own(each.kv), own(each.scale)) == ((5, 2, 1, 64, 16), (5, 2, 1, 64))


def bytes_of(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_heads_and_vocabulary_stay_apart_on_a_mesh():
  mesh = devices(4, tensor=2)
  policy = dataclasses.replace(WIDE, kv_heads=4)
  page, program = segment(2, mesh, policy)
  keys = page[0].k
  B, G, K, C = keys.shape
  assert keys.sharding.shard_shape(keys.shape) == (B // 2, G // 2, K, C)
  text = program.as_text()
  rows = B // 2
  assert f"f32[{rows},{G // 2},{K},{C}]" in text
  assert f"f32[{rows},{G},{K},{C}]" not in text
  # What devices tell each other: sums over heads, best logits, sums of blocks
  # of probabilities and the block of each row's draw; never logits or keys.
  told = [
    math.prod(map(int, size.split(",")))
    for size in re.findall(
      r"= \w+\[([\d,]+)\][^=]* (?:all-|collective-|reduce-s)\S*\(", text
    )
  ]
  assert told and max(told) < rows * policy.vocab / 2


@pytest.mark.ci
def test_prompts_are_read_in_groups_that_fit(monkeypatch):
  monkeypatch.setattr(programs, "PREFILL_TOKENS", 53)
  assert programs.read_together(6, 16) == 3
  assert programs.read_together(7, 16) == 1  # 2 and 3 do not divide 7
  assert programs.read_together(6, 100) == 1
  assert programs.read_together(2, 16) == 2
  read = []

  class Reader(Recall):
    def prefill(self, params, tokens, mask):
      read.append(tokens.shape)
      return super().prefill(params, tokens, mask)

  prompts = [[1, 2, 3], [2, 2, 2], [3, 1, 5], [5, 4, 1], [1, 1, 1], [4, 5, 3]]
  settings = {"n": 8, "params": RECALL, "prompts": prompts}
  out = run(policy=Reader(), **settings)
  assert set(read) == {(3, 16)}
  same(out, run(policy=Recall(), **settings))


def queued(n, *, offset=0, real=True):
  """Of prompt 7, whose first token is 0, which ends a rollout, in half."""
  spec = spec_of(Table(), n=n).program(1)
  logits = jnp.log(jnp.array([[0.5, 0.0, 0.25, 0.25, 0.0, 0.0]]))
  one = lambda x: np.array([x], np.int32)
  chunk = programs.Chunks(one(7), one(offset), np.array([real]), one(3))
  return programs.queued(spec, logits, chunk, KEY)


def test_as_many_pages_as_the_longest_rollout_needs():
  """Pages of 3; the newest token of a rollout is not in the cache yet."""
  spec = dataclasses.replace(spec_of(Table()).program(1), columns=3)
  pages = ["a", "b", "c"]
  for longest, kept in ((1, []), (2, ["c"]), (4, ["c"]), (5, ["b", "c"])):
    *older, newest = programs.turn_pages(spec, pages, longest)
    assert older == kept and newest.shape == (16, 3)
  # Of four pages the oldest is written again.
  assert programs.turn_pages(spec, ["z", *pages], 12) == ["a", "b", "c", "z"]


def test_rollouts_that_ended_need_no_slot():
  queue, packed = queued(64)
  tokens, logp = unpack(packed[0])
  np.testing.assert_allclose(
    logp, np.where(tokens == 0, np.log(0.5), np.log(0.25)), rtol=1e-6
  )
  goes = np.flatnonzero(np.asarray(tokens) != 0)
  assert 16 < len(goes) < 48 and queue.waiting.tolist() == [len(goes)]
  np.testing.assert_array_equal(queue.order[0, : len(goes)], goes)
  np.testing.assert_array_equal(queue.first[0], tokens)
  assert (queue.offset.tolist(), queue.row.tolist()) == ([0], [3])
  assert queued(64, real=False)[0].waiting.tolist() == [0]


def test_first_tokens_of_a_chunk_are_those_of_the_whole():
  _, whole = queued(64)
  _, part = queued(16, offset=48)
  np.testing.assert_array_equal(part[0], whole[0, 48:])


def test_the_prompt_that_is_none_has_no_rollouts_and_no_row():
  queue = programs.with_none(queued(4)[0], KEY)
  assert queue.sizes == (1, 4)
  assert queue.waiting[1] == 0 and queue.row.tolist() == [3, 1]
  assert queue.key[0] == fold_in(KEY, 7)


T = 24
# Longer than those of the other tests: half of them have 9 tokens or more.
LONG = RECALL.at[..., STOP].add(-1.0)
POOLED = Recall(pool_columns=3)


def prompts(count=3):
  tokens = np.arange(2 * count, dtype=np.int32).reshape(count, 2) % 5
  return Prompts(tokens, tokens >= 0, np.arange(count, dtype=np.int32))


def rolled(policy=POOLED, params=LONG, *, count=3, given=None, **changes):
  told = []
  if mesh := changes.pop("mesh", None):
    changes["mesh"] = devices(**mesh)
  spec = spec_of(policy, **{"n": 20, "max_new_tokens": T} | changes)
  out = sampler.rollouts(
    spec, params, given or prompts(count), KEY, watch=told.append
  )
  return jax.device_get(out), told[-1]


@functools.cache
def over_pages():
  return rolled(Recall())[0]


def near(got, want, atol, at=...):
  for name in ("tokens", "mask", "truncated"):
    both = (getattr(x, name)[at] for x in (got, want))
    np.testing.assert_array_equal(*both, err_msg=name)
  np.testing.assert_allclose(got.logp[at], want.logp[at], atol=atol)


CASES = {
  "a window of two prompts": {"slots": 7, "lanes": 1},
  "blocks of one token": {"policy": Recall(pool_columns=1), "slots": 9},
  "one block": {"policy": Recall(pool_columns=64)},
  "8 devices": {"mesh": {"count": 8, "tensor": 2}, "slots": 9},
  "tight, 2 devices": {"mesh": {"count": 2}, "slots": 9, "blocks": 20},
}


@pytest.mark.parametrize(
  "changes", tiers.some([pytest.param(x, id=k) for k, x in CASES.items()], 1, 2)
)
def test_rollouts_over_a_pool_are_those_over_pages(changes):
  got, told = rolled(**changes)
  near(got, over_pages(), atol=1e-6)
  if "blocks" not in changes:  # enough for everyone
    assert not told.stalled and not told.restarted


@pytest.mark.parametrize("blocks", tiers.some([8, 12], 1, 1))
def test_a_pool_that_is_too_small_changes_no_rollout(blocks):
  """The longest rollout has 8 blocks; 60 rollouts begin at once."""
  got, told = rolled(blocks=blocks)
  near(got, over_pages(), atol=1e-6)
  assert told.stalled and told.restarted and not told.busy + told.waiting
  # The loop looks in every 16th step whether it ends.
  assert told.slot_steps % 16 == 0


def test_no_row_begins_again_where_another_one_ends():
  """Two rollouts of 5 tokens and one of 3, in blocks of one token.

  The short one takes two blocks and gives them back after step 2. In step 4 the
  others want a fourth block each, of 7 - 6. The first gets it and ends.
  """
  start = np.array([[5], [5], [3]], np.int32)
  got, told = rolled(
    Table(pool_columns=1), DOWN, n=1, slots=1, max_new_tokens=5, blocks=7,
    given=Prompts(start, start > 0, np.arange(3, dtype=np.int32)),
  )  # fmt: skip
  assert got.mask.sum(axis=2).ravel().tolist() == [5, 5, 3]
  assert (told.stalled, told.restarted) == (1, 0)


@dataclasses.dataclass(frozen=True)
class Unsteady(Recall):
  """Each step draws from another distribution: nothing comes out twice."""

  def pool(self, blocks, columns):
    return super().pool(blocks, columns), jnp.zeros((1,), jnp.int32)

  def pool_step(self, weights, shared, pools, *rest):
    pools, steps = pools
    weights = jnp.roll(weights, steps[0], axis=0)
    logits, pools = super().pool_step(weights, shared, pools, *rest)
    return logits, (pools, steps + 1)


@pytest.mark.ci
def test_what_is_recorded_stays_and_is_what_a_row_that_begins_again_reads():
  policy = Unsteady(pool_columns=3)
  spec = spec_of(policy, n=8, max_new_tokens=T, blocks=9).program(3)
  spec = dataclasses.replace(spec, unchecked=2)
  batch = programs.batch_of(prompts(), np.ones(3, bool))
  inputs, state, progress = programs.start(spec, LONG, batch, KEY)
  progress = sampler.on_host(progress)
  decoding = sampler.OpenRollouts(spec, spec, inputs, (), state, progress, 8)
  before = programs.finish(spec, decoding.state)
  begun = 0
  while decoding.progress.busy + decoding.progress.waiting:
    decoding = sampler.advance(decoding, 6)
    now = programs.finish(decoding.spec, decoding.state)
    kept = np.asarray(before.mask)
    assert not (kept & ~np.asarray(now.mask)).any()
    for name in ("tokens", "logp"):
      old, new = getattr(before, name), getattr(now, name)
      np.testing.assert_array_equal(old, np.where(kept, new, 0))
    # A row that begins again has fewer tokens than are recorded.
    state = decoding.state
    tokens, made = np.asarray(now.tokens), np.asarray(now.mask).sum(axis=2)
    for rollout, token, length in zip(
      *(np.ravel(x) for x in (state.rollout, state.token, state.length)),
      strict=True,
    ):
      if rollout < 24:
        p, n = divmod(int(rollout), 8)
        assert tokens[p, n, length - 1] == token
        begun += length < made[p, n]
    before = now
  assert begun > 0 and decoding.progress.restarted > 0
  lengths = np.asarray(now.mask).sum(axis=2)
  last = np.take_along_axis(
    np.asarray(now.tokens), lengths[..., None] - 1, axis=2
  )[..., 0]
  assert ((last == STOP) | (lengths == T)).all()


@pytest.mark.ci
def test_rows_that_stay_keep_their_blocks_when_slots_are_dropped():
  """The last rollouts decode in a quarter of the slots, or fewer."""
  shapes = set()
  resize = programs.resize

  def spy(spec, state):
    shapes.add((spec.lanes, spec.slots))
    return resize(spec, state)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(programs, "resize", spy)
    patch.setattr(programs, "moved", None)  # no page follows
    patch.setattr(slots, "_UNCHECKED", 2)
    patch.setattr(sampler, "SPAN", 6)
    got, told = rolled(blocks=20)
  near(got, over_pages(), atol=1e-6)
  assert len(shapes) > 1 and told.restarted


@pytest.mark.ci
@pytest.mark.parametrize("changes", tiers.some([
  {"places": 2, "lanes": 2, "slots": 5, "blocks": 12},
  {"places": 4, "lanes": 4, "blocks": 9, "mesh": {"count": 2}},
], 1, 1))  # fmt: skip
def test_prompts_are_streamed_over_a_pool(changes):
  settings = {"n": 20, "max_new_tokens": T} | changes
  places = settings.pop("places")
  if "mesh" in changes:
    settings["mesh"] = devices(**changes["mesh"])
  want, told = over_pages(), []
  found = by_prompt(stream.stream(
    spec_of(POOLED, **settings), LONG, Feed(prompts(), 1), KEY, places=places,
    watch=told.append,
  ))  # fmt: skip
  assert sorted(found) == [0, 1, 2]
  for p, got in found.items():
    near(got, jax.tree.map(lambda x, p=p: x[p : p + 1], want), atol=1e-6)
  assert told[-1].restarted


SLIDING = dict(window=5, sliding=(True, False))
POLICIES = {"plain": {}, "sliding": SLIDING,
  "sliding int8": {**SLIDING, "int8_cache": True}}  # fmt: skip


@pytest.mark.parametrize(
  "changes",
  tiers.some([pytest.param(x, id=k) for k, x in POLICIES.items()], 1, 1),
)
@pytest.mark.parametrize("how", tiers.some([
  {"slots": 5, "blocks": 30},
  {"slots": 9, "mesh": {"count": 8, "tensor": 2}, "blocks": 12},
], 1, 1))  # fmt: skip
def test_a_policy_draws_the_same_tokens_from_a_pool(changes, how, monkeypatch):
  monkeypatch.setattr(cache, "pool_columns", lambda target: 4)
  policy = dataclasses.replace(POLICY, **changes)
  # Not "gpu": a CPU cannot run its kernels.
  pooled = dataclasses.replace(policy, target=Target("rocm", 8, 2**33))
  args = dict(params=policy_params(), **how)
  got, told = rolled(pooled, **args)
  want, _ = rolled(policy, **args | {"blocks": None})
  assert bool(told.restarted) == ("blocks" in how)
  if not policy.int8_cache:
    near(got, want, atol=2e-5)
    return
  # Rounding may make another integer of a key: that rollout's
  # probabilities then differ by up to an integer's worth (2e-4 was seen), and
  # a token may be another. Which rollouts it meets depends on the processor.
  equal = (got.tokens == want.tokens).all(axis=2)
  assert (~equal).sum() <= 1
  near(got, want, atol=2e-3, at=equal)
