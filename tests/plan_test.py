"""Tests of brorl_jax/memory.py, brorl_jax/plan.py and main/planning.py."""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from compiled import compiled, zeros_of

from brorl_jax import (
  architectures,
  hf,
  memory,
  plan,
  sampler,
  sharding,
  theory,
  tokenizer,
  update,
)
from brorl_jax.attention import Rope
from brorl_jax.main import (
  evaluating,
  learning,
  planning,
  sampling,
  settings,
  training,
)
from brorl_jax.main.examples import Examples
from brorl_jax.main.scoring import Judge
from brorl_jax.policy import Policy
from brorl_jax.types import Prompts
from configs import base, n16, n512

ROOT = pathlib.Path(__file__).parents[1]
TOY = Policy(
  vocab=10, width=4, layers=3, heads=2, kv_heads=1, head_size=2, mlp=6,
  rope=Rope(100.0), norm_eps=1e-6, tied=True,
)  # fmt: skip
# 40 of the embedding, 4 and 3 x 8 of norms, 3 x (16 + 8 + 8 + 16 + 72) others.
NUMBERS, NORMS = 428, 28
SMALL = Policy(
  vocab=2048, width=128, layers=2, heads=8, kv_heads=2, head_size=16, mlp=512,
  rope=Rope(1e4), norm_eps=1e-6, tied=True,
)  # fmt: skip
HALF = dataclasses.replace(SMALL, dtype="bfloat16")
GIB = 2**30


def load(policy=TOY, **changes) -> memory.Load:
  sizes = dict(n=6, prompts=5, prompt_tokens=7, max_new_tokens=70)
  sizes |= dict(data=1, model=1, on_cpu=True)
  return memory.Load(policy, **{"resident_bytes": 1000, **sizes, **changes})


# ---------------------------------------------------------------------- sizes


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
  assert stages["finishing"] == always | {
    "cache": 2 * page,
    "results": results,
  }
  prefilling = stages["prefilling"]
  assert prefilling.pop("work") > 0
  assert prefilling == always
  assert one.need(2, 3) == max(
    sum(parts.values()) for parts in one.stages(2, 3).values()
  )


def test_all_lanes_hold_their_prompt_once():
  lanes = lambda count: load().stages(count, 1)["decoding"]["lanes"]
  assert lanes(5) == 5 * 7 * 12 * 4
  assert lanes(4) == 2 * 4 * 7 * 12 * 4


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
  one = load(policy, on_cpu=on_cpu, max_new_tokens=40)
  assert one.pages == 1
  assert one.stages(2, 3)["decoding"]["cache"] == 2 * 3 * 40 * token
  if on_cpu:
    page = jax.eval_shape(functools.partial(policy.page, 6, 40))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page))
    assert held == 6 * 40 * token
  half = policy.dtype == "bfloat16"
  assert one.weights == (4 * NUMBERS if not half else 2 * NUMBERS + 2 * NORMS)


def test_what_is_spread_over_the_mesh():
  whole, apart = load(SMALL), load(SMALL, model=2)
  norms = 4 * 128 * 5
  assert apart.weights - norms == (whole.weights - norms) // 2
  for name in ("prompts", "lanes", "cache"):
    mask = 35 if name == "prompts" else 0
    size = lambda one: one.stages(2, 3)["decoding"][name] - mask
    assert 2 * size(apart) == size(whole)
  spread = load(SMALL, data=5).stages(5, 3)["decoding"]
  alone = load(SMALL, prompts=1).stages(1, 3)["decoding"]
  assert spread == alone


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("n, prompts", [(6, 5), (8, 3), (512, 16), (512, 4)])
def test_prompts_are_spread_as_the_sampler_does(n, prompts, devices):
  tokens = np.ones((prompts, 7), np.int32)
  index = np.arange(prompts, dtype=np.int32)
  units, parts = sampler._spread(Prompts(tokens, tokens > 0, index), n, devices)
  one = load(n=n, prompts=prompts, data=devices)
  assert (one.parts, one.here) == (parts, len(units.index) // devices)
  assert one.lanes(prompts) == one.here


@pytest.mark.parametrize("offload", ["nothing", "reference", "moments"])
@pytest.mark.parametrize("second_moment", ["full", "factored"])
@pytest.mark.parametrize("reference", [True, False])
def test_training_state_is_what_training_makes(
  reference, second_moment, offload
):
  mesh = sharding.make_mesh(data=4, model=2)
  c = base.get_config()
  c.second_moment, c.offload = second_moment, offload
  c.kl_weight = 1e-4 * reference
  tx, _ = learning.optimizer(c)
  state = learning.initial_state(
    SMALL.init(jax.random.key(0)),
    tx,
    mesh,
    keep_reference=reference,
    offload=offload,
  )
  device = jax.devices()[0]
  held = sum(
    shard.data.nbytes
    for x in jax.tree.leaves(state)
    for shard in x.addressable_shards
    if shard.device == device
  )
  state_bytes = functools.partial(
    learning.state_bytes, c, SMALL, data=4, model=2, keep_reference=reference
  )
  assert held == state_bytes(on_cpu=True)
  on_device = sum(
    shard.data.nbytes
    for x in jax.tree.leaves(state)
    for shard in x.addressable_shards
    if shard.device == device and x.sharding.memory_kind == "device"
  )
  assert on_device == state_bytes(on_cpu=False)
  copies = (offload == "nothing") * reference + 2 * (offload != "moments")
  if second_moment == "full":
    params = state_bytes(on_cpu=True) // (3 + reference)
    assert round(on_device / params, 2) == 1 + copies


def test_a_policy_that_does_not_spread_is_refused():
  with pytest.raises(ValueError, match="does not divide over the 4 devices"):
    learning.state_bytes(
      base.get_config(),
      SMALL,
      data=1,
      model=4,
      on_cpu=True,
      keep_reference=True,
    )


def test_memory_of_a_device(monkeypatch):
  class Device:
    def memory_stats(self):
      return {"bytes_limit": 7 * GIB}

  host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  assert 0 < memory.device_bytes() <= host // 8
  monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
  assert memory.device_bytes() == 7 * GIB


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
  limit, none = tmp_path / "limit", tmp_path / "none"
  limit.write_text(f"{8 * 10**6}\n")
  none.write_text("max\n")
  paths = (str(none), str(limit), str(tmp_path / "missing"))
  monkeypatch.setattr(memory, "_LIMITS", paths)
  assert memory.device_bytes() == 10**6


# ------------------------------------------------------------ against the truth


def needs(policy, n, P, S, T, slots, lanes, behaviour):
  """Bytes that XLA needs: prefilling, and decoding into the last page."""
  C = sampler.page_columns(T)
  job = sampler.Job(policy, behaviour, (0,), n, T, lanes, slots, C, None)
  zeros = lambda *shape, dtype=np.int32: np.zeros(shape, dtype)
  start = (
    jax.eval_shape(policy.init, jax.random.key(0)),
    sampler.Unit(
      Prompts(zeros(P, S), zeros(P, S, dtype=bool), zeros(P)),
      zeros(P),
      np.ones(P, bool),
    ),
    jax.eval_shape(lambda: jax.random.key(0)),
  )
  prefill = functools.partial(sampler.start, job)
  fixed, s, _ = zeros_of(prefill, *start)
  page = policy.page(lanes * slots, C)
  older, newest = (page,) * (job.pages - 1), page if job.pages > 1 else None
  decode = functools.partial(sampler._segment, job)

  def total(program, *args, donated=()):
    m = compiled(program, *args, donated=donated).memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes
    return held + m.temp_size_in_bytes - m.alias_size_in_bytes

  bytes_ = lambda x: math.prod(x.shape) * x.dtype.itemsize
  dropped = sum(map(bytes_, jax.tree.leaves(newest)))
  state = sum(map(bytes_, jax.tree.leaves(start[0])))
  step = total(decode, fixed, older, newest, s, True, donated=(2, 3))
  return state, {
    "prefilling": total(prefill, *start),
    "decoding": state + dropped + step,
  }


@pytest.mark.parametrize(
  "policy, sizes, top_p",
  [
    pytest.param(SMALL, (64, 8, 96, 128, 64, 4), 1.0, id="float32"),
    pytest.param(HALF, (32, 8, 96, 128, 32, 4), 1.0, id="bfloat16"),
    pytest.param(
      dataclasses.replace(HALF, int8_cache=True),
      (64, 8, 96, 192, 64, 4),
      1.0,
      id="int8",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      SMALL,
      (16, 3, 1100, 20, 16, 3),
      1.0,
      id="long prompts",
      marks=pytest.mark.slow,
    ),
    pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 1.0, id="many prompts"),
    pytest.param(SMALL, (16, 64, 40, 6, 16, 64), 0.95, id="an evaluation"),
    pytest.param(
      dataclasses.replace(SMALL, vocab=2**15),
      (16, 8, 40, 6, 16, 8),
      0.95,
      id="an evaluation with a large vocabulary",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp=128),
      (16, 8, 64, 32, 16, 8),
      1.0,
      id="experts",
    ),
  ],
)
def test_the_plan_is_never_below_and_seldom_above_what_xla_needs(
  policy, sizes, top_p
):
  n, P, S, T, slots, lanes = sizes
  state, needed = needs(policy, *sizes, sampler.Behaviour(top_p=top_p))
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
  tx, _ = learning.optimizer(base.get_config())
  _, state, places = learning.state_places(
    jax.eval_shape(policy.init, jax.random.key(0)),
    tx,
    mesh,
    keep_reference=True,
    offload="nothing",
  )
  mass = functools.partial(
    theory.correct_mass, response_logp=policy.response_logp, temperature=1.0
  )
  zeros = lambda *shape, dtype=np.int32: np.zeros(shape, dtype)
  of_rows = zeros(P, R, dtype=np.float32), zeros(P, R, dtype=bool)
  found = theory.Probe(
    zeros(P, S), zeros(P, S, dtype=bool), zeros(P, R, T),
    zeros(P, R, T, dtype=bool), *of_rows, *of_rows, zeros(P, dtype=np.float32),
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
    watch = lambda found, params: mass(found, params).mean()
    return jax.tree.leaves(
      update._apply.__wrapped__(
        state,
        (grads, update.Stats.zero(state.params)),
        tx=tx,
        watch=jax.tree_util.Partial(watch, found),
      )
    )

  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  out = jax.tree.leaves(places)
  out += [whole] * (len(jax.eval_shape(apply, *flat)) - len(out))
  program = jax.jit(apply, donate_argnums=0, out_shardings=out)
  m = program.lower(*flat).compile().memory_analysis()
  held = m.argument_size_in_bytes + m.output_size_in_bytes
  total = held + m.temp_size_in_bytes - m.alias_size_in_bytes
  size = lambda tree, at: memory.shard_bytes(
    jax.tree.leaves(tree), jax.tree.leaves(at)
  )
  return total, size(state, places), size(grads, places.params)


@pytest.mark.parametrize(
  "policy, sizes",
  [
    pytest.param(SMALL, dict(P=2, R=16, T=128, S=96), id="float32"),
    pytest.param(
      HALF,
      dict(P=2, R=16, T=128, S=96),
      id="bfloat16",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      SMALL, dict(P=2, R=16, T=6, S=40), id="short", marks=pytest.mark.slow
    ),
    pytest.param(
      dataclasses.replace(SMALL, layers=6, tied=False),
      dict(P=3, R=5, T=64, S=500),
      id="a head of its own",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp=128),
      dict(P=2, R=16, T=128, S=96),
      id="experts",
      marks=pytest.mark.slow,
    ),
  ],
)
@pytest.mark.parametrize("data, model", [(1, 1), (8, 1), (4, 2)])
def test_an_update_that_measures_the_theorem_is_planned(
  policy, sizes, data, model, monkeypatch
):
  devices = jax.devices()[: data * model]
  monkeypatch.setattr(jax, "device_count", lambda: len(devices))
  mesh = jax.make_mesh(
    (data, model), ("data", "model"), devices=devices,
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )  # fmt: skip
  total, state, gradient = applying(policy, mesh, **sizes)
  P, R, T, S = sizes.values()
  found = memory.Probe(
    policy, state, gradient, P, R, S, T, data, model, on_cpu=True
  )
  assert total <= found.need <= 1.4 * total, found.need / total


# --------------------------------------------------------------------- choices

fit = functools.partial(
  plan.rollouts,
  SMALL,
  resident_bytes=0,
  n=24,
  prompts=8,
  prompt_tokens=8,
  max_new_tokens=400,
)


def needed(**changes) -> int:
  """Bytes of a plan for which there is memory enough."""
  return fit(memory_bytes=10**15, **changes).total_bytes


def least(total: int) -> int:
  """The least memory for a plan of so many bytes."""
  return math.ceil(total / 0.9)


@pytest.mark.parametrize(
  "field, low, high",
  [
    ("resident_bytes", 0, 1000),
    ("n", 24, 25),
    ("prompts", 8, 9),
    ("prompt_tokens", 8, 9),
    ("slots", 7, 8),
    ("lanes", 3, 4),
  ],
)
def test_more_of_anything_needs_more(field, low, high):
  both = {"slots": 8, "lanes": 4}
  assert needed(**both | {field: low}) < needed(**both | {field: high})


def test_longer_rollouts_need_more_whatever_their_pages():
  total = [
    needed(max_new_tokens=T, slots=8, lanes=4) for T in range(1, 1300, 7)
  ]
  assert all(a < b for a, b in itertools.pairwise(total))


def test_more_devices_need_less_of_each():
  for more in ({"data": 2}, {"model": 2}, {"data": 8}):
    assert needed(slots=8, lanes=8, **more) < needed(slots=8, lanes=8)


def test_everything_if_there_is_room():
  got = fit(memory_bytes=10**15)
  assert (got.slots, got.lanes) == (24, 8)
  got = fit(memory_bytes=10**15, slots=100, lanes=100)
  assert (got.slots, got.lanes) == (24, 8)
  got = fit(memory_bytes=10**15, slots=5, lanes=3)
  assert (got.slots, got.lanes) == (5, 3)


def test_as_many_slots_as_fit():
  before = 0
  for share in np.linspace(0.01, 1.0, 30):
    smallest, largest = needed(slots=1, lanes=1), needed()
    memory_bytes = least(smallest + share * (largest - smallest))
    got = fit(memory_bytes=memory_bytes)
    assert got.total_bytes <= got.limit_bytes <= 0.9 * memory_bytes
    rows = got.slots * got.lanes
    assert 1.1 * rows >= before  # within what is not worth fewer slots
    before = max(rows, before)
    # No choice that is a tenth better was left.
    for slots in (1, 2, 4, 8, 16, 24):
      for lanes in range(1, 9):
        if needed(slots=slots, lanes=lanes) <= got.limit_bytes:
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


def test_lanes_are_those_of_all_devices():
  got = fit(memory_bytes=least(needed(slots=24, lanes=4, data=2)), data=2)
  assert got.lanes == 4 and got.slots == 24


def refusal(**changes) -> str:
  with pytest.raises(plan.TooLarge) as e:
    fit(**changes)
  line = str(e.value)
  assert "\n" not in line
  assert line.startswith("rollouts of 24 x ")
  return line


def test_refuses_slots_and_names_how_many_fit():
  tight = least(needed(slots=10, lanes=3))
  line = refusal(memory_bytes=tight, slots=20, lanes=3)
  need, limit = needed(slots=20, lanes=3), int(0.9 * tight)
  assert f"need {plan.size(need)} of {plan.size(limit)} (90% of a" in line
  found = re.search(
    r"with slots = 20 and lanes = 3; nearest that fits: slots = (\d+) with "
    r"lanes = 3, or lanes = (\d+) with slots = 20$",
    line,
  )
  slots, lanes = map(int, found.groups())
  assert slots == 10
  fit(memory_bytes=tight, slots=slots, lanes=3)
  fit(memory_bytes=tight, slots=20, lanes=lanes)
  refusal(memory_bytes=tight, slots=slots + 1, lanes=3)
  refusal(memory_bytes=tight, slots=20, lanes=lanes + 1)


def test_refuses_one_given_number():
  tight = least(needed(slots=10, lanes=1))
  line = refusal(memory_bytes=tight, slots=20)
  assert line.endswith("with slots = 20; nearest that fits: slots = 10")
  tight = least(needed(slots=1, lanes=5))
  line = refusal(memory_bytes=tight, lanes=6)
  assert line.endswith("with lanes = 6; nearest that fits: lanes = 5")
  one = least(needed(slots=3, lanes=1))
  line = refusal(memory_bytes=one, slots=20, lanes=6)
  assert line.endswith("nearest that fits: slots = 3 with lanes = 1")
  line = refusal(
    memory_bytes=least(needed(slots=10, lanes=8)), slots=99, lanes=99
  )
  assert "with slots = 99 and lanes = 99; nearest" in line


def test_refuses_a_length_and_names_the_nearest():
  tight = least(needed(slots=1, lanes=1, max_new_tokens=1000))
  line = refusal(memory_bytes=tight, max_new_tokens=2000)
  found = re.search(
    r"24 x 2000 tokens need .* even one slot at a time; nearest that fits: "
    r"max_new_tokens = (\d+), or (\d+) prompts? \((\d+) rollouts\) at a time",
    line,
  )
  length, prompts, rollouts = map(int, found.groups())
  assert length == 1000 and rollouts == 24 * prompts
  fit(memory_bytes=tight, max_new_tokens=length)
  refusal(memory_bytes=tight, max_new_tokens=length + 1)
  fit(memory_bytes=tight, max_new_tokens=2000, prompts=prompts)
  refusal(memory_bytes=tight, max_new_tokens=2000, prompts=prompts + 1)


def test_names_a_mesh_that_fits():
  sizes = dict(max_new_tokens=1, prompts=1, slots=1)
  tight = least(needed(**sizes, model=2))
  line = refusal(memory_bytes=tight, **sizes)
  assert line.endswith("nearest that fits: mesh_model = 2 on 2 devices")
  fit(memory_bytes=tight, **sizes, model=2)
  tight = least(needed(**sizes, model=2, resident_bytes=10**7))
  line = refusal(memory_bytes=tight, **sizes, data=2, resident_bytes=10**7)
  assert line.endswith("nearest that fits: mesh_model = 2")


def test_names_two_sizes_if_neither_would_do_alone():
  sizes = dict(prompts=64, prompt_tokens=256, max_new_tokens=4000)
  tight = least(needed(**sizes | {"prompts": 1, "max_new_tokens": 90}, slots=1))
  line = refusal(memory_bytes=tight, **sizes)
  found = re.search(
    r"nearest that fits: 1 prompt \(24 rollouts\) at a time and "
    r"max_new_tokens = (\d+)$",
    line,
  )
  length = int(found[1])
  assert length >= 90
  fit(memory_bytes=tight, **sizes | {"prompts": 1, "max_new_tokens": length})
  for one in ({"prompts": 1}, {"max_new_tokens": 1}):
    refusal(memory_bytes=tight, **sizes | one)


def test_says_when_nothing_fits():
  line = refusal(memory_bytes=2**20, resident_bytes=3 * GIB, max_new_tokens=9)
  weights = load(SMALL).weights
  assert line.endswith(
    "even one slot at a time, not even 1 token of a prompt fits: training "
    f"state and weights alone are {plan.size(3 * GIB + weights)}; take more "
    "devices, or larger ones"
  )


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
  one = plan.RolloutPlan(1, 1, 1, 1, {"finishing": {"a": 5}}, 9, 10)
  assert one.line().startswith("1 lane x 1 slot, 1 page of 1 token, 0.00 KiB")


# ------------------------------------------------------------------ the command

QWEN = dict(
  model_type="qwen2", hidden_act="silu", hidden_size=1536,
  intermediate_size=8960, max_position_embeddings=131072,
  num_attention_heads=12, num_hidden_layers=28, num_key_value_heads=2,
  rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False,
  use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
LLAMA = dict(
  model_type="llama", hidden_act="silu", hidden_size=4096,
  intermediate_size=14336, max_position_embeddings=131072,
  num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
  rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
  vocab_size=128256,
)  # fmt: skip


def command(*args: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "brorl_jax.main", "--mode=plan", *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
  )


def test_the_command_prints_a_plan_without_a_folder():
  done = command("--config=configs/n512.py")
  assert done.returncode == 0, done.stderr
  text = done.stdout
  assert "rollouts: 8 prompts x 512, at most 6 tokens, on 1 x 1 CPU" in text
  assert "\n8 lanes x 128 slots, 1 page of 6 tokens, " in text
  assert "\nevaluations: 256 prompts x 16\n" in text
  head, *parts = text[text.index("an update, measuring the ") :].splitlines()
  assert head == "an update, measuring the theorem"
  names = [line.split("  ")[1].strip() for line in parts]
  assert names == (
    "training state,gradients,weights,work,together,allowed,memory".split(",")
  )
  out = command("--config=configs/n512.py", "--config.theory_prompts=0").stdout
  assert out == text[: text.index("an update, measuring the ")]


def test_the_command_refuses_in_one_line():
  done = command("--config=configs/n512.py", "--config.memory_bytes=1000000")
  assert done.returncode == 2 and done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith(
    "error: config.memory_bytes = 1000000: rollouts of 512 x 6 tokens need "
  )
  assert "of 0.86 MiB (90% of a device)" in line


@pytest.mark.parametrize("of", [n512, n16])
@pytest.mark.parametrize(
  "preset, fields, data", [("1p5b", QWEN, 8), ("8b", LLAMA, 1)]
)
def test_presets_fit_eight_devices_that_are_not_here(
  of, preset, fields, data, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  (tmp_path / "config.json").write_text(json.dumps(fields))
  c = of.get_config(preset)
  c.checkpoint, c.mesh_data = str(tmp_path), data
  c.memory_bytes = 80 * 10**9
  planning.run(c)
  text = capsys.readouterr().out
  assert f"on {data} x {8 // data} accelerators" in text
  found = re.findall(r"^(\d+) lanes? x (\d+) slots?, 8 pages", text, re.M)
  (lanes, slots), _ = [tuple(map(int, pair)) for pair in found]
  assert lanes * slots // data >= 64  # rows of a device
  c.int8_cache = True
  planning.run(c)
  text = capsys.readouterr().out
  lanes_8, slots_8 = re.search(
    r"^(\d+) lanes? x (\d+) slot", text, re.M
  ).groups()
  assert int(lanes_8) * int(slots_8) > 1.3 * lanes * slots


def test_a_name_of_the_hub_is_not_downloaded(monkeypatch):
  monkeypatch.setattr(hf, "locate", lambda _: pytest.fail("downloads"))
  c = n512.get_config("1p5b")
  c.mesh_data = 8
  with pytest.raises(settings.UserError) as e:
    planning.run(c)
  name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
  assert f"checkpoint '{name}' is not a directory here" in str(e.value)
  assert f"'hf download {name} config.json --local-dir DeepSeek" in str(e.value)


def test_a_directory_that_is_missing():
  c = base.get_config()
  c.checkpoint = "/no/such/directory"
  with pytest.raises(settings.UserError, match=r"is not a directory$"):
    planning.run(c)


def test_devices_that_are_not_here_cannot_be_asked(capsys):
  c = base.get_config()
  c.mesh_data = 16
  c.in_flight, c.blocks = 16 * 512, 16
  with pytest.raises(settings.UserError, match="of 16 only 8 are here; give"):
    planning.run(c)
  c.memory_bytes = GIB
  planning.run(c)
  assert "on 16 x 1 accelerators" in capsys.readouterr().out


def test_a_plan_is_that_of_the_run_where_its_devices_are_here(capsys):
  c = base.get_config()
  c.update(dtype="bfloat16", memory_bytes=10**8, mesh_data=1)
  planning.run(c)
  policy = architectures.read_policy(settings.ASSETS, dtype=c.dtype)
  got = planning.make(
    c, policy, data=1, model=1, on_cpu=None, keep_reference=True
  )
  text = capsys.readouterr().out
  assert "on 1 x 1 CPU devices" in text
  assert got.rollouts.table() in text and got.evaluations.table() in text


def test_a_mesh_that_does_not_fit_the_work_is_refused():
  c = base.get_config()
  c.mesh_data = 3
  with pytest.raises(settings.UserError, match="do not spread over 3 devices"):
    planning.run(c)


# -------------------------------------------------------------------- training


def plans(**changes) -> planning.Plans:
  c = base.get_config()
  c.update(**changes)
  return planning.make(
    c, SMALL, data=1, model=1, on_cpu=None, keep_reference=True
  )


def test_zero_means_as_many_as_fit():
  got = plans(slots=0).rollouts
  assert (got.slots, got.lanes) == (512, 8)
  got = plans(slots=0, lanes=2).rollouts
  assert (got.slots, got.lanes) == (512, 2)
  cache = lambda p: p.rollouts.stages["decoding"]["cache"]
  assert cache(plans(int8_cache=True)) < cache(plans()) / 2


def test_evaluations_take_fewer_puzzles_at_a_time_if_they_must():
  roomy = plans()
  assert roomy.chunk == 256  # 4096 / 16, of 480
  assert roomy.evaluations.slots == 16
  assert plans(eval_prompts=1).chunk == 8
  # Prompts of evaluations are many, those of rollouts few.
  need = roomy.rollouts.total_bytes
  tight = plans(memory_bytes=least(need))
  assert tight.rollouts == dataclasses.replace(
    roomy.rollouts,
    memory_bytes=least(need),
    limit_bytes=tight.rollouts.limit_bytes,
  )
  assert tight.chunk < 256
  assert tight.evaluations.total_bytes <= tight.evaluations.limit_bytes


def test_the_probe_is_that_of_the_config():
  found = plans(theory_tokens=4, theory_responses=5).probe
  assert (found.prompts, found.responses, found.tokens) == (2, 5, 4)
  assert found.prompt_tokens == 40
  # No more than there are.
  found = plans(theory_prompts=99, theory_tokens=99, samples=16 * 512).probe
  assert (found.prompts, found.tokens) == (16, 6)
  assert plans(theory_prompts=0).probe is None
  params = learning.state_bytes(
    base.get_config(), SMALL, data=1, model=1, on_cpu=False,
    keep_reference=True,
  ) // 4  # fmt: skip
  assert found.gradient_bytes == pytest.approx(params, rel=1e-4)


def test_moments_are_on_the_devices_while_an_update_is_applied():
  def held(offload, **how):
    c = base.get_config()
    c.offload = offload
    where = dict(data=1, model=1, on_cpu=False, keep_reference=True)
    return learning.state_bytes(c, SMALL, **where, **how)

  assert held("moments") < held("moments", applying=True)
  assert held("moments", applying=True) == held("reference")
  assert held("nothing", applying=True) == held("nothing")
  c = base.get_config()
  c.update(offload="moments", memory_bytes=10**12)
  probe = planning.make(
    c, SMALL, data=1, model=1, on_cpu=False, keep_reference=True
  ).probe
  assert probe.resident_bytes == held("reference")


def test_a_probe_that_does_not_fit_is_refused_with_the_nearest_that_does():
  need = lambda **changes: (
    plans(max_new_tokens=900, memory_bytes=10**15, **changes).probe.need
  )
  many = dict(theory_prompts=9, theory_responses=200)
  assert need(**many, theory_tokens=100) < need(**many, theory_tokens=101)
  # Less than the probe would take, and enough for all else.
  tight = dict(memory_bytes=least(need(**many, theory_tokens=100)))
  assert plans(max_new_tokens=900, theory_prompts=0, **tight).probe is None
  with pytest.raises(plan.TooLarge) as e:
    plans(max_new_tokens=900, **many, theory_tokens=128, **tight)
  line = str(e.value)
  assert "\n" not in line and re.fullmatch(
    r"measuring the theorem on theory_prompts = 9 with 200 responses of 128 "
    r"tokens needs [\d.]+ .iB of [\d.]+ .iB \(90% of a device\) in an update; "
    r"nearest that fits: theory_tokens = 100, or theory_prompts = 0 leaves it "
    r"out",
    line,
  )
  plans(max_new_tokens=900, **many, theory_tokens=100, **tight)


def test_a_probe_of_which_nothing_fits():
  found = plans().probe
  with pytest.raises(plan.TooLarge, match="in an update; theory_prompts = 0 "):
    plan.check_probe(found, found.resident_bytes)


def test_training_refuses_before_it_loads(tmp_path, monkeypatch):
  monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("loads"))
  c = base.get_config()
  c.memory_bytes = 10**6
  with pytest.raises(settings.UserError, match=r"nearest that|larger ones"):
    training.run(c, tmp_path / "run", allow_change=False)
  assert list(tmp_path.iterdir()) == []


def test_the_sampler_gets_what_was_planned(monkeypatch):
  class Called(Exception):
    pass

  def called(*args, **named):
    raise Called(args[0], named)

  monkeypatch.setattr(sampler, "rollouts", called)
  monkeypatch.setattr(sampling, "stream", called)
  c = base.get_config()
  c.update(int8_cache=True, lanes=3, slots=40)
  mesh = sharding.make_mesh(8, 1)
  got = planning.make(
    c, SMALL, data=1, model=1, on_cpu=None, keep_reference=True
  )
  text = tokenizer.Tokenizer(settings.ASSETS)
  with pytest.raises(Called) as e:
    sampling.streamed(c, SMALL, text.stop_ids, mesh, got.rollouts)(
      {}, lambda room, idle: None, None
    )
  policy, streamed = e.value.args
  assert (streamed["slots"], streamed["lanes"], streamed["n"]) == (40, 3, 512)
  assert streamed["places"] == 8  # 4096 / 512
  assert streamed["behaviour"] == sampler.Behaviour()
  assert policy == dataclasses.replace(SMALL, int8_cache=True)
  examples = Examples(c, text)
  judge = Judge(c, examples)
  with pytest.raises(Called) as e:
    measure = evaluating.measure(
      c, SMALL, examples, judge, mesh, got.evaluations, got.chunk
    )
    next(measure({}, examples.heldout()))
  policy, named = e.value.args
  assert (named["slots"], named["lanes"], named["n"]) == (16, 256, 16)
  assert named["behaviour"] == sampler.Behaviour(temperature=0.6, top_p=0.95)
  assert policy == dataclasses.replace(SMALL, int8_cache=True)
