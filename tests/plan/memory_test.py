"""What rollouts and updates need of a device, by hand and against XLA."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import tiers
from compiled import compiled, zeros_of
from configured import config
from loads import HALF, SMALL, TOY, load, on_gpu

from brorl_jax.learner import state as states
from brorl_jax.learner import theory, update
from brorl_jax.learner.objective import (
  Stats,
)
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import sharding
from brorl_jax.plan import functions, memory
from brorl_jax.rollout import program_spec, programs, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Prompts

# 40 of the embedding, 4 and 3 x 8 of norms, 3 x (16 + 8 + 8 + 16 + 72) others.
NUMBERS, NORMS = 428, 28


def test_every_part_by_hand():
  one = load()
  assert (one.columns, one.pages) == (64, 2)
  stages = one.stages(lanes=2, slots=3)
  always = {
    "training state": 1000,
    "weights": 4 * NUMBERS,
    # 12 numbers for a token: 3 layers, keys and values, 1 head of 2.
    "prompts": 5 * 7 * (12 * 4 + 1),
    "records": 8 * 5 * 6 * 70 + 12 * 6 * 6,
  }
  page = 2 * 3 * 64 * 12 * 4
  decoding = stages["decoding"]
  assert decoding.pop("work") > 0
  assert decoding == always | {"lanes": 2 * 2 * 7 * 12 * 4, "cache": 3 * page}
  # A quarter of the slots, but at least one of each lane: 3 of 6.
  assert stages["compacting"] == always | {"cache": 2 * page + page}
  results = 14 * 5 * 6 * 70
  assert stages["finishing"] == always | {"cache": 2 * page, "results": results}
  prefilling = stages["prefilling"]
  assert prefilling.pop("work") > 0
  assert prefilling == always
  assert one.need(2, 3) == max(
    sum(parts.values()) for parts in one.stages(2, 3).values()
  )


def test_a_stream_keeps_the_distribution_of_first_tokens():
  """A float32 for each of 5 prompts and each token of the vocabulary."""
  held = lambda **how: load(**how).stages(2, 3)["finishing"]["prompts"]
  assert held(streams=True) - held() == 4 * 5 * load().policy.vocab


def test_all_lanes_hold_their_prompt_once():
  lanes = lambda count: load().stages(count, 1)["decoding"]["lanes"]
  assert lanes(5) == 5 * 7 * 12 * 4
  assert lanes(4) == 2 * 4 * 7 * 12 * 4


def test_a_page_of_int8_is_widened_for_one_layer_at_a_time():
  """2 x 2 heads x 64 numbers of 256 tokens in float32; half the prompts'."""
  policy = dataclasses.replace(
    SMALL, vocab=16, width=16, mlp=16, heads=2, head_size=64, int8_cache=True
  )
  one = memory._Work(policy, Axes(), False)
  wide, prompts = 4 * 2 * 2 * 64 * (2 * 128), 4 * 2 * 2 * 2 * 64 * 10
  assert one.step(1, 2, 10, 3, 128) == int(memory._MORE * (wide + prompts // 2))


@pytest.mark.parametrize(
  "changes, on_cpu, token",
  [
    ({}, False, 12 * 4),
    ({"dtype": "bfloat16"}, False, 12 * 2),
    ({"dtype": "bfloat16"}, True, 12 * 4),  # see Policy.cache_dtype
    ({"int8_cache": True}, True, 12 + 6 * 4),
    ({"int8_cache": True, "dtype": "bfloat16"}, False, 12 + 6 * 4),
  ],
)
def test_bytes_of_a_token_in_the_cache(changes, on_cpu, token):
  policy = dataclasses.replace(TOY, **changes)
  if not on_cpu:
    policy = on_gpu(policy)
  one = load(policy, max_new_tokens=40)
  # A row has one page of 40 columns, or one block of 64.
  columns = 40 if on_cpu else 64
  assert (one.pages, one.columns) == (1, columns)
  assert one.stages(2, 3)["decoding"]["cache"] == 6 * columns * token
  make = policy.page if on_cpu else policy.pool
  held = jax.eval_shape(functools.partial(make, 6, columns))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
  assert size == 6 * columns * token
  half = policy.dtype == "bfloat16"
  assert one.weights == (4 * NUMBERS if not half else 2 * NUMBERS + 2 * NORMS)


@pytest.mark.parametrize(
  "mean, lanes, slots, blocks",
  [
    (0, 2, 3, 6 * 5),  # 300 tokens are 5 blocks
    (300, 2, 3, 6 * 5),  # never more
    (100, 2, 3, 18),  # 6 rows of 100 / 64 + 1/2 are 12.4; and one longest
    (9, 5, 6, 35),  # no row has less than one block
    (1, 1, 1, 5),  # one longest rollout has room
  ],
)
def test_blocks_of_a_pool_by_hand(mean, lanes, slots, blocks):
  one = load(on_gpu(TOY), max_new_tokens=300, mean_tokens=mean)
  assert one.blocks(lanes, slots) == blocks
  stages = one.stages(lanes, slots)
  for stage in ("decoding", "compacting", "finishing"):
    assert stages[stage]["cache"] == blocks * 64 * 12 * 4
  assert load(max_new_tokens=300, mean_tokens=mean).blocks(lanes, slots) == 0


def test_blocks_are_those_of_a_device():
  one = load(on_gpu(TOY, 2), n=8, prompts=6, axes=Axes(fsdp=2), mean_tokens=20)
  # 3 of 6 lanes, and 4 rows of one block each; 70 tokens are 2.
  assert one.blocks(6, 4) == 12 + 2
  # Half of the 8 rollouts of each of 3 prompts.
  one = load(on_gpu(TOY, 2), n=8, prompts=3, axes=Axes(fsdp=2), mean_tokens=20)
  assert one.blocks(3, 8) == 12 + 2


def test_what_is_spread_over_the_mesh():
  whole, apart = load(SMALL), load(SMALL, axes=Axes(tensor=2))
  norms = 4 * 128 * 5
  assert apart.weights - norms == (whole.weights - norms) // 2
  for name in ("prompts", "lanes", "cache"):
    mask = 35 if name == "prompts" else 0
    size = lambda one: one.stages(2, 3)["decoding"][name] - mask
    assert 2 * size(apart) == size(whole)
  spread = load(SMALL, axes=Axes(fsdp=5)).stages(5, 3)["decoding"]
  alone = load(SMALL, prompts=1).stages(1, 3)["decoding"]
  assert spread == alone


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("n, prompts", [(6, 5), (8, 3), (512, 16), (512, 4)])
def test_prompts_are_spread_as_the_sampler_does(n, prompts, devices):
  tokens = np.ones((prompts, 7), np.int32)
  index = np.arange(prompts, dtype=np.int32)
  batch, parts = sampler._spread(Prompts(tokens, tokens > 0, index), n, devices)
  one = load(n=n, prompts=prompts, axes=Axes(fsdp=devices))
  assert (one.parts, one.here) == (parts, len(batch.index) // devices)
  assert one.lanes(prompts) == one.here


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def needs(policy, n, P, S, T, slots, lanes, sampling):
  """Bytes that XLA needs: prefilling, and decoding into the last page."""
  C = program_spec.page_columns(T)
  spec = program_spec.ProgramSpec(
    policy, sampling, (0,), n, T, lanes, slots, C, None
  )
  zeros = lambda *shape, dtype=np.int32: np.zeros(shape, dtype)
  start = (
    jax.eval_shape(policy.init, jax.random.key(0)),
    programs.PrefillBatch(
      Prompts(zeros(P, S), zeros(P, S, dtype=bool), zeros(P)),
      zeros(P),
      np.ones(P, bool),
    ),
    jax.eval_shape(lambda: jax.random.key(0)),
  )
  fill = functools.partial(programs.start, spec)
  inputs, s, _ = zeros_of(fill, *start)
  page = policy.page(lanes * slots, C)
  older = (page,) * (spec.pages - 1)
  decode = functools.partial(programs.segment, spec)

  def total(program, *args, donated=()):
    m = compiled(program, *args, donated=donated).memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes
    return held + m.temp_size_in_bytes - m.alias_size_in_bytes

  bytes_ = lambda x: math.prod(x.shape) * x.dtype.itemsize
  dropped = sum(map(bytes_, jax.tree.leaves(page))) if older else 0
  state = sum(map(bytes_, jax.tree.leaves(start[0])))
  step = total(
    decode,
    inputs,
    older,
    np.int32(len(older)),
    page,
    s,
    True,
    np.int32(9),
    donated=(3, 4),
  )
  return state, {
    "prefilling": total(fill, *start),
    "decoding": state + dropped + step,
  }


@pytest.mark.ci
@pytest.mark.parametrize(
  "policy, sizes, top_p",
  tiers.some(
    [
      pytest.param(SMALL, (64, 8, 96, 128, 64, 4), 1.0, id="float32"),
      pytest.param(HALF, (32, 8, 96, 128, 32, 4), 1.0, id="bfloat16"),
      slow(
        dataclasses.replace(HALF, int8_cache=True),
        (64, 8, 96, 192, 64, 4),
        1.0,
        id="int8",
      ),
      slow(SMALL, (16, 3, 1100, 20, 16, 3), 1.0, id="long prompts"),
      pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 1.0, id="many prompts"),
      pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 0.95, id="an evaluation"),
      slow(
        dataclasses.replace(SMALL, vocab=2**15),
        (16, 8, 40, 6, 16, 8),
        0.95,
        id="an evaluation with a large vocabulary",
      ),
      pytest.param(
        dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp=128),
        (16, 8, 64, 32, 16, 8),
        1.0,
        id="experts",
      ),
    ],
    2,
    2,
  ),
)
def test_the_plan_is_never_below_and_seldom_above_what_xla_needs(
  policy, sizes, top_p
):
  n, P, S, T, slots, lanes = sizes
  state, needed = needs(policy, *sizes, SamplingParams(top_p=top_p))
  one = load(
    policy, resident_bytes=state, n=n, prompts=P, prompt_tokens=S,
    max_new_tokens=T, cut=top_p < 1.0,
  )  # fmt: skip
  stages = one.stages(lanes, slots)
  ratio = {k: sum(stages[k].values()) / v for k, v in needed.items()}
  assert min(ratio.values()) >= 1.0, ratio
  assert one.need(lanes, slots) <= 1.3 * max(needed.values()), ratio


def applying(policy, mesh, *, P, R, T, S):
  """Bytes that XLA needs for an update that measures the theorem.

  Also those of the state and of the gradients, which are arguments.
  """
  policy = dataclasses.replace(policy, mesh=mesh)
  tx, _ = functions.optimizer(config())
  _, state, places = states.state_places(
    jax.eval_shape(policy.init, jax.random.key(0)),
    tx,
    mesh,
    keep_reference=True,
    offload="nothing",
  )
  mass = theory.Mass(policy.response_logp, 1.0)
  zeros = lambda *shape, dtype=np.int32: np.zeros(shape, dtype)
  of_rows = zeros(P, R, dtype=np.float32), zeros(P, R, dtype=bool)
  found = theory.Probe(
    zeros(P, S), zeros(P, S, dtype=bool), zeros(P, R, T),
    zeros(P, R, T, dtype=bool), *of_rows, *of_rows,
    *[zeros(P, dtype=np.float32)] * 2,
  )  # fmt: skip
  placed = lambda tree, at: jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, at
  )
  grads = placed(state.params, places.params)  # all are float32
  # Of leaves, as in compiled.py.
  args = (placed(state, places), grads, found)
  flat, kinds = zip(*map(jax.tree.flatten, args), strict=True)

  def apply(*leaves):
    state, grads, found = map(jax.tree.unflatten, kinds, leaves)
    return jax.tree.leaves(
      update._apply.__wrapped__(
        state,
        (grads, Stats.zero(state.params)),
        jax.numpy.float32(np.inf),
        tx=tx,
        watch=jax.tree_util.Partial(mass.mean, found),
      )
    )

  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  out = jax.tree.leaves(places)
  out += [whole] * (len(jax.eval_shape(apply, *flat)) - len(out))
  program = jax.jit(apply, donate_argnums=0, out_shardings=out)
  m = program.lower(*flat).compile().memory_analysis()
  held = m.argument_size_in_bytes + m.output_size_in_bytes
  total = held + m.temp_size_in_bytes - m.alias_size_in_bytes
  size = lambda tree, at: sharding.shard_bytes(
    jax.tree.leaves(tree), jax.tree.leaves(at)
  )
  return total, size(state, places), size(grads, places.params)


@pytest.mark.ci
@pytest.mark.parametrize(
  "policy, sizes",
  tiers.some(
    [
      pytest.param(SMALL, dict(P=2, R=16, T=128, S=96), id="float32"),
      slow(HALF, dict(P=2, R=16, T=128, S=96), id="bfloat16"),
      slow(SMALL, dict(P=2, R=16, T=6, S=40), id="short"),
      slow(
        dataclasses.replace(SMALL, layers=6, tied=False),
        dict(P=3, R=5, T=64, S=500),
        id="a head of its own",
      ),
      slow(
        dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp=128),
        dict(P=2, R=16, T=128, S=96),
        id="experts",
      ),
    ],
    1,
    1,
  ),
)
@pytest.mark.parametrize(
  "axes", tiers.some([meshes.ONE, Axes(fsdp=8), Axes(fsdp=4, tensor=2)], 0, 1)
)
def test_an_update_that_measures_the_theorem_is_planned(policy, sizes, axes):
  devices = jax.devices()[: axes.devices]
  mesh = meshes.over([devices], axes)
  total, state, gradient = applying(policy, mesh, **sizes)
  P, R, T, S = sizes.values()
  found = memory.Gradient(policy, state, gradient, P, R, S, T, axes)
  assert total <= found.need <= 1.4 * total, found.need / total
