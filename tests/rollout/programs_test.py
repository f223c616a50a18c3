"""The compiled programs: what they read at a time, and what they copy."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from small_decoders import KEY, TABLE, Table, devices

from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.model.target import Target
from brorl_jax.rollout import prefill, program_spec, programs
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.types import Prompts

WIDE = Policy(
  vocab=320, width=32, layers=2, heads=8, kv_heads=2, head_size=16, mlp=32,
  rope=Rope(1e4), norm_eps=1e-6, tied=True,
)  # fmt: skip


def segment(pages, mesh=None, policy=WIDE):
  """The program of a step with so many pages, 2 lanes of 24 slots."""
  P, N, T, C = 2, 24, 512, 64
  A = P if mesh is None else P // meshes.of(mesh).rows
  spec = ProgramSpec(policy, SamplingParams(), (0,), N, T, A, N, C, mesh)
  params = policy.init(jax.random.key(0))
  if mesh is not None:
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
  prompts = Prompts(
    np.zeros((P, 8), np.int32), np.ones((P, 8), bool), np.arange(P)
  )
  start = functools.partial(programs.start, spec)
  batch = prefill.PrefillBatch(prompts, np.zeros(P, np.int32), np.ones(P, bool))
  inputs, s, _ = start(params, batch, KEY)
  step = functools.partial(programs.segment, spec)
  some = np.int32(9)
  newest = programs.page(spec)
  older = (newest,) * (pages - 1)
  args = inputs, older, np.int32(len(older)), newest, s, False, some
  return newest, compiled(step, *args, donated=(3, 4))


@pytest.mark.perf
def test_a_step_copies_no_page():
  page, program = segment(1)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  # Keys of one layer are the smallest copy there could be; scores are smaller.
  assert used.temp_size_in_bytes < page[0].k.nbytes


@pytest.mark.perf
def test_a_step_widens_int8_pages_layer_by_layer():
  policy = dataclasses.replace(WIDE, int8_cache=True, layers=8)
  page, program = segment(1, policy=policy)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  one = 4 * (page[0].k.nbytes + page[0].v.nbytes)
  assert used.temp_size_in_bytes < 4 * one  # of 8


def segment_over_pool(policy, params, T, blocks):
  """Pool, state and program of a step of 2 lanes of 24 slots."""
  P, N = 2, 24
  pages = ProgramSpec(policy, SamplingParams(), (0,), N, T, P, N, T, None)
  spec = program_spec.with_cache(pages, blocks)
  prompts = Prompts(
    np.zeros((P, 8), np.int32), np.ones((P, 8), bool), np.arange(P)
  )
  batch = prefill.PrefillBatch(prompts, np.zeros(P, np.int32), np.ones(P, bool))
  inputs, state, _ = programs.start(spec, params, batch, KEY)
  pool = programs.pool(spec)
  program = compiled(
    functools.partial(programs.segment, spec),
    inputs, (), np.int32(0), pool, state, False, np.int32(9), donated=(3, 4),
  )  # fmt: skip
  return pool, state, program


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
  policy = dataclasses.replace(WIDE, layers=8, target=Target("rocm", 1, 2**30))
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
  spec = ProgramSpec(
    policy, SamplingParams(), (0,), 4, 9, 1, 4, 9, devices(4, tensor=2)
  )
  pools = programs.pool(program_spec.with_cache(spec, 5))
  assert len(pools) == policy.layers
  own = lambda x: x.sharding.shard_shape(x.shape)
  for pool in pools:
    assert pool.kv.shape == (10, 2, 2, 64, 16)
    assert (own(pool.kv), own(pool.scale)) == ((5, 2, 1, 64, 16), (5, 2, 1, 64))


def test_blocks_follow_their_slots_and_new_slots_hold_none():
  """2 lanes of 3 slots, of which (0, 1), (1, 0) and (1, 2) are busy."""
  pages = ProgramSpec(Table(), SamplingParams(), (0,), 4, 9, 2, 3, 9, None)
  spec = dataclasses.replace(pages, columns=3, blocks=9)
  prompts = Prompts(
    np.zeros((2, 8), np.int32), np.ones((2, 8), bool), np.arange(2)
  )
  batch = prefill.PrefillBatch(prompts, np.zeros(2, np.int32), np.ones(2, bool))
  _, state, _ = programs.start(spec, TABLE, batch, KEY)
  table = jnp.arange(18, dtype=jnp.int32).reshape(6, 3)
  state = dataclasses.replace(
    state,
    rollout=jnp.asarray([[8, 1, 8], [4, 8, 6]], jnp.int32),
    blocks=state.blocks._replace(
      table=table, held=jnp.asarray([0, 2, 0, 3, 0, 1], jnp.int32)
    ),
  )
  for lanes, slots, rows in (
    (2, 2, [1, None, 3, 5]),
    (3, 4, [1, None, None, None, 3, 5, *[None] * 6]),
  ):
    # From the full slots down, and from there up again.
    smaller = dataclasses.replace(spec, lanes=lanes, slots=slots)
    _, state = programs.resize(smaller, state)
    held = state.blocks.held.tolist()
    assert held == [0 if r is None else (0, 2, 0, 3, 0, 1)[r] for r in rows]
    for row, was in enumerate(rows):
      if was is not None:
        np.testing.assert_array_equal(state.blocks.table[row], table[was])
    assert state.blocks.count.tolist() == [9]  # as it was


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
