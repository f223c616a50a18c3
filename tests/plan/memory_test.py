"""What rollouts and updates need of a device, by hand and against XLA."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest
import tiers
from compiled import compiled, zeros_of
from configured import config
from loads import GIB, HALF, SMALL, TOY, load, on_gpu, planned
from messages import mentions

from brorl_jax.many.meshes import Axes
from brorl_jax.plan import memory
from brorl_jax.rollout import programs, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.slots import ProgramSpec, page_columns
from brorl_jax.types import Prompts

# 40 of the embedding, 4 and 3 x 8 of norms, 3 x (16 + 8 + 8 + 16 + 72) others.
NUMBERS, NORMS = 428, 28


def test_every_part_by_hand():
  one = load()
  assert (one.columns, one.pages) == (64, 2)
  stages = one.stages(lanes=2, slots=3)
  always = {
    "training state": 1000, "weights": 4 * NUMBERS,
    # 12 numbers for a token: 3 layers, keys and values, 1 head of 2.
    "prompts": 5 * 7 * (12 * 4 + 1), "records": 8 * 5 * 6 * 70 + 12 * 6 * 6,
  }  # fmt: skip
  page = 2 * 3 * 64 * 12 * 4
  decoding = stages["decoding"]
  assert decoding.pop("work") > 0
  assert decoding == always | {"lanes": 2 * 2 * 7 * 12 * 4, "cache": 3 * page}
  # Four of six slots.
  assert stages["compacting"] == always | {"cache": 2 * page + page * 4 // 6}
  results = 14 * 5 * 6 * 70
  assert stages["finishing"] == always | {"cache": 2 * page, "results": results}
  prefilling = stages["prefilling"]
  assert prefilling.pop("work") > 0 and prefilling == always
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


@pytest.mark.parametrize("changes, on_cpu, token", [
  ({}, False, 12 * 4), ({"dtype": "bfloat16"}, False, 12 * 2),
  ({"dtype": "bfloat16"}, True, 12 * 4),  # see Policy.page
  ({"int8_cache": True}, True, 12 + 6 * 4),
  ({"int8_cache": True, "dtype": "bfloat16"}, False, 12 + 6 * 4),
])  # fmt: skip
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


@pytest.mark.parametrize("mean, lanes, slots, blocks", [
  (0, 2, 3, 6 * 5),  # 300 tokens are 5 blocks
  (300, 2, 3, 6 * 5),  # never more
  (100, 2, 3, 16),  # 6 rows of 85 / 64 + 1/2 are 10.97; and one longest
  (9, 5, 6, 35),  # no row has less than one block
  (1, 1, 1, 5),  # one longest rollout has room
])  # fmt: skip
def test_blocks_of_a_pool_by_hand(mean, lanes, slots, blocks):
  one = load(on_gpu(TOY), max_new_tokens=300, mean_tokens=mean)
  assert one.blocks(lanes, slots) == blocks
  stages = one.stages(lanes, slots)
  for stage in ("decoding", "compacting", "finishing"):
    assert stages[stage]["cache"] == blocks * 64 * 12 * 4
  assert load(max_new_tokens=300, mean_tokens=mean).blocks(lanes, slots) == 0


def test_programs_decode_beside_each_other_on_one_cpu_alone():
  plan = fit(2**34)
  assert plan.groups == 2 and fit(2**34, slots=1, lanes=1).groups == 1
  assert fit(2**34, axes=Axes(2, 1)).groups == 1
  gpu = dataclasses.replace(plan.load, policy=on_gpu())
  assert dataclasses.replace(plan, load=gpu).groups == 1


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
  assert spread == load(SMALL, prompts=1).stages(1, 3)["decoding"]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("n, prompts", [(6, 5), (8, 3), (512, 16), (512, 4)])
def test_prompts_are_spread_as_the_sampler_does(n, prompts, devices):
  tokens = np.ones((prompts, 7), np.int32)
  index = np.arange(prompts, dtype=np.int32)
  batch, parts = sampler._spread(Prompts(tokens, tokens > 0, index), n, devices)
  one = load(n=n, prompts=prompts, axes=Axes(fsdp=devices))
  assert (one.parts, one.here) == (parts, len(batch.index) // devices)
  assert one.lanes(prompts) == one.here


def fit(memory_bytes, *, slots=None, lanes=None, **changes):
  sizes = dict(n=24, prompts=8, prompt_tokens=8, max_new_tokens=400)
  sizes |= {"resident_bytes": 0, "axes": Axes(), **changes}
  one = memory.Load(SMALL, **sizes)
  return memory.rollouts(one, memory_bytes, slots=slots, lanes=lanes)


def needed(**changes) -> int:
  """Bytes of a plan for which there is memory enough."""
  return fit(memory_bytes=10**15, **changes).total_bytes


def least(total: int) -> int:
  """The least memory for a plan of these bytes."""
  return math.ceil(total / 0.9)


@pytest.mark.parametrize("field, low, high", [
  ("resident_bytes", 0, 1000), ("n", 24, 25), ("prompts", 8, 9),
  ("prompt_tokens", 8, 9), ("slots", 7, 8), ("lanes", 3, 4),
])  # fmt: skip
def test_more_of_anything_needs_more(field, low, high):
  both = {"slots": 8, "lanes": 4}
  assert needed(**both | {field: low}) < needed(**both | {field: high})


def test_longer_rollouts_need_more_whatever_their_pages():
  got = [needed(max_new_tokens=T, slots=8, lanes=4) for T in range(1, 1300, 13)]
  assert all(a < b for a, b in itertools.pairwise(got))


@pytest.mark.parametrize("slots, lanes, want",
  [(None, None, (24, 8)), (100, 100, (24, 8)), (5, 3, (5, 3))])  # fmt: skip
def test_everything_or_what_is_given_if_there_is_room(slots, lanes, want):
  got = fit(memory_bytes=10**15, slots=slots, lanes=lanes)
  assert (got.slots, got.lanes) == want


@pytest.mark.ci
def test_as_many_slots_as_fit():
  before = 0
  for share in np.linspace(0.01, 1.0, 12):
    smallest, largest = needed(slots=1, lanes=1), needed()
    memory_bytes = least(smallest + share * (largest - smallest))
    got = fit(memory_bytes=memory_bytes)
    limit = memory.limit_of(memory_bytes)
    assert got.total_bytes <= limit <= 0.9 * memory_bytes
    rows = got.slots * got.lanes
    assert 1.1 * rows >= before  # within what is not worth fewer slots
    before = max(rows, before)
    # No choice that is a tenth better was left.
    for slots, lanes in itertools.product((1, 2, 4, 8, 16, 24), range(1, 9)):
      if needed(slots=slots, lanes=lanes) <= limit:
        assert slots * lanes <= 1.1 * rows


def test_of_about_as_many_the_fewest_lanes():
  tight = max(needed(slots=24, lanes=5), needed(slots=16, lanes=8))
  assert needed(slots=24, lanes=6) > 1.01 * tight
  got = fit(memory_bytes=least(tight))
  assert (got.slots, got.lanes) == (24, 5)  # though 16 x 8 are 7 % more


def test_a_given_number_stays():
  tight = least(needed(slots=24, lanes=2))
  got = fit(memory_bytes=tight, slots=4)
  assert got.slots == 4 and got.lanes > 2
  got = fit(memory_bytes=tight, lanes=6)
  assert got.lanes == 6 and got.slots < 24


@pytest.mark.parametrize("tight, given, nearest", [
  ({"slots": 10, "lanes": 1}, {"slots": 20}, {"slots": 10}),
  ({"slots": 1, "lanes": 5}, {"lanes": 6}, {"lanes": 5}),
  ({"slots": 10, "lanes": 3}, {"slots": 20, "lanes": 3}, {"slots": 10}),
  ({"max_new_tokens": 1000, "slots": 1, "lanes": 1}, {"max_new_tokens": 2000},
    {"max_new_tokens": 1000}),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest(tight, given, nearest):
  tight = least(needed(**tight))
  with pytest.raises(memory.TooLarge) as e:
    fit(tight, **given)
  (line,) = str(e.value).splitlines()
  assert memory.size(memory.limit_of(tight)) in line
  assert mentions(line, "rollouts of 24 ... config.devices.memory_bytes")
  sizes = re.findall(
    r"(slots|lanes|max_new_tokens|prompts)[a-z ]* = (\d+)", line
  )
  found = {name: int(number) for name, number in sizes}
  assert found.items() >= nearest.items()
  for name, number in found.items():
    fit(tight, **given | {name: number})
    with pytest.raises(memory.TooLarge):
      fit(tight, **given | {name: number + 1})


def test_says_when_nothing_fits():
  with pytest.raises(memory.TooLarge, match="use larger devices"):
    fit(2**20, resident_bytes=3 * GIB, max_new_tokens=9)


def test_the_table_adds_up():
  got = fit(memory_bytes=2 * GIB)
  head, *lines = got.table().splitlines()
  assert head.startswith("8 lanes x 24 slots, 7 pages of 64 tokens, ")
  assert head.endswith(f"of 2.00 GiB per device, most while {got.stage}")
  assert len({len(line) for line in lines}) == 1  # aligned
  rows = {
    m[1].strip(): (float(m[2]), m[3], float(m[4]))
    for m in (re.match(r"  (\D+) +([\d.]+) (.iB) +([\d.]+)%", x) for x in lines)
  }
  assert list(rows)[: len(got.parts)] == list(got.parts)
  assert rows["memory"] == (2.0, "GiB", 100.0)
  assert rows["allowed"] == (1.8, "GiB", 90.0)
  parts = [rows[name] for name in got.parts]
  assert sum(x[2] for x in parts) == pytest.approx(rows["together"][2], abs=0.1)
  one = fit(memory_bytes=GIB, slots=1, lanes=1, max_new_tokens=1)
  assert one.line().startswith("1 lane x 1 slot, 1 page of 1 token, ")


def test_an_update_that_does_not_fit_is_refused_with_the_nearest_that_does():
  c = config(rows=8, blocks=2, max_new_tokens=4096, memory_bytes=10**12)
  whole = planned(c, on_gpu()).update
  fewer = lambda **sizes: dataclasses.replace(whole, **sizes).need
  limit = fewer(responses=5) / 0.9
  with pytest.raises(memory.TooLarge) as e:
    memory.check_update(whole, int(limit) + 1)
  line = str(e.value)
  assert "\n" not in line
  assert mentions(line, "optim.blocks = 2 ... optim.rows = 8 ... 4096 tokens")
  assert "nearest that fits: optim.rows = 5, or optim.blocks = 1" in line
  with pytest.raises(memory.TooLarge, match="or use larger devices"):
    memory.check_update(whole, whole.resident_bytes)
  memory.check_update(whole, int(whole.need / 0.9) + 1)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def needs(policy, n, P, S, T, slots, lanes, sampling):
  """Bytes that XLA needs: prefilling, and decoding into the last page."""
  C = page_columns(T)
  sizes = lanes, slots
  spec = ProgramSpec(policy, sampling, (0,), n, T, *sizes, sizes, C, None)
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
  step = total(decode, inputs, older, np.int32(len(older)), page, s, True,
    np.int32(9), donated=(3, 4))  # fmt: skip
  return state, {"prefilling": total(fill, *start),
    "decoding": state + dropped + step}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("policy, sizes, top_p", tiers.some([
  pytest.param(SMALL, (64, 8, 96, 128, 64, 4), 1.0, id="float32"),
  pytest.param(HALF, (32, 8, 96, 128, 32, 4), 1.0, id="bfloat16"),
  slow(dataclasses.replace(HALF, int8_cache=True), (64, 8, 96, 192, 64, 4), 1.0,
    id="int8"),
  slow(SMALL, (16, 3, 1100, 20, 16, 3), 1.0, id="long prompts"),
  pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 1.0, id="many prompts"),
  pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 0.95, id="an evaluation"),
  slow(dataclasses.replace(SMALL, vocab=2**15), (16, 8, 40, 6, 16, 8), 0.95,
    id="an evaluation with a large vocabulary"),
  pytest.param(
    dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp=128),
    (16, 8, 64, 32, 16, 8), 1.0, id="experts"),
], 2, 2))  # fmt: skip
def test_a_plan_is_never_below_seldom_above_xlas_needs(policy, sizes, top_p):
  n, P, S, T, slots, lanes = sizes
  state, needed = needs(policy, *sizes, SamplingParams(top_p=top_p))
  one = load(policy, resident_bytes=state, n=n, prompts=P, prompt_tokens=S,
    max_new_tokens=T, cut=top_p < 1.0)  # fmt: skip
  stages = one.stages(lanes, slots)
  ratio = {k: sum(stages[k].values()) / v for k, v in needed.items()}
  print("RATIO", ratio, one.need(lanes, slots) / max(needed.values()))
  assert min(ratio.values()) >= 1.0, ratio
  assert one.need(lanes, slots) <= 1.3 * max(needed.values()), ratio
