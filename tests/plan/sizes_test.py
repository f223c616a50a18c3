"""Sizes that follow from the machine."""

import dataclasses
import json

import pytest
from configured import config
from loads import GIB, SMALL, on_gpu, planned, settled

from brorl_jax.configs import n512
from brorl_jax.main import plan as plan_command
from brorl_jax.main import settings
from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model.target import Target
from brorl_jax.plan import memory, resolve, sizes
from brorl_jax.plan.sizes import Machine


def chosen(axes=ONE, policy=SMALL, **changes):
  c = config(**changes)
  out, _ = settled(c, policy, axes)
  sampled, optim = out.sampling, out.optim
  assert dataclasses.replace(out, sampling=c.sampling, optim=c.optim) == c
  return sampled.in_flight, optim.blocks, optim.rows


def test_what_is_given_stays():
  given = dict(in_flight=4096, blocks=24, rows=7)
  assert chosen(Axes(fsdp=8), **given) == (4096, 24, 7)


def test_work_spreads_evenly_over_the_mesh():
  of = dict(n=512, in_flight=8192, rows=32, samples=16384)
  settled(config(**of, blocks=16), axes=Axes(fsdp=8))
  with pytest.raises(
    ValueError, match=r"in_flight = 8192 is 16 prompts of 512 .* of 1536"
  ) as both:
    settled(config(**of, blocks=16), axes=Axes(fsdp=3))
  assert "blocks = 16 (use a multiple of 3)" in str(both.value)
  with pytest.raises(ValueError, match=r"blocks = 6.* multiple of 4"):
    settled(config(**of, blocks=6), axes=Axes(fsdp=4))


@pytest.mark.parametrize(
  ("rows", "prompts", "each"),
  [(8, 128, 4), (32, 128, 4), (64, 128, 2), (8, 4, 1)],
)
@pytest.mark.parametrize("data", [1, 4])
def test_zeros_follow_from_the_mesh(rows, prompts, each, data):
  zeros = dict(in_flight=0, blocks=0, rows=3, n=512, samples=512 * prompts)
  axes = Axes(data=data, fsdp=rows // data)
  assert chosen(axes, **zeros) == (rows * each * 512, rows, 3)


def test_rows_are_as_many_as_fit():
  c = config(rows=1, blocks=1, max_new_tokens=4096)
  most = planned(c, on_gpu()).update
  rows = lambda limit: memory.update_rows(most, round(limit / 0.9) + 2)
  of = lambda M: dataclasses.replace(most, responses=M).need
  assert rows(of(8)) == 8
  assert rows(of(8) - 4096) == 4
  assert rows(of(4) - 4096) == 2
  assert rows(of(2) - 4096) == 1
  assert rows(0) == 1  # and refused where the plan is made
  small = dict(n=4, samples=64, in_flight=4, eval_n=1, theory_prompts=0)
  for M in (8, 4, 2):
    tight = dict(rows=0, blocks=1, max_new_tokens=4096, **small)
    tight |= dict(memory_bytes=round(of(M) / 0.9) + 2)
    assert chosen(policy=on_gpu(), **tight)[2] == M


QWEN = "DeepSeek-R1-Distill-Qwen-1.5B"
LLAMA = "DeepSeek-R1-Distill-Llama-8B"
# What XLA may use of a device, and how many there are.
MACHINES = {
  "h100:1x8": ("gpu", 8, 72.8),
  "h100:8x8": ("gpu", 64, 72.8),
  "v5p:2x2x2": ("tpu", 8, 95.7),
  "v5p:4x4x4": ("tpu", 64, 95.7),
  "v6e:4x4": ("tpu", 16, 31.2),
  "v6e:8x8": ("tpu", 64, 31.2),
}


@pytest.mark.parametrize("preset", ["1p5b", "8b"])
@pytest.mark.parametrize("name", MACHINES)
def test_a_preset_starts_on_every_machine_with_the_papers_values(preset, name):
  platform, devices, gib = MACHINES[name]
  machine = Target(platform, devices, int(gib * GIB))
  c = settings.typed(n512.get_config(preset))
  axes = Axes(**c.devices.mesh).filled(devices)
  this = resolve.resolve(c, Machine(axes, machine), locate=plan_command.locate)
  (phase,) = this.phases
  out, plans = phase.config, phase.memory
  assert plans.update.need <= memory.limit_of(plans.rollouts.memory_bytes)
  sampled = out.sampling
  assert (sampled.n, sampled.samples, sampled.max_new_tokens) == (
    512, 128 * 512, 15360,
  )  # fmt: skip
  assert out.optim.minibatches == c.optim.minibatches
  assert out.optim.lr == c.optim.lr


@pytest.mark.parametrize("of", [QWEN, LLAMA])
def test_the_architectures_that_presets_name_are_known(of):
  directory = plan_command.locate(f"deepseek-ai/{of}")
  fields = json.loads((directory / "config.json").read_text())
  assert "DeepSeek" in directory.name and fields["hidden_size"] in (1536, 4096)


def test_an_update_that_does_not_fit_is_refused_with_the_nearest_that_does():
  c = config(rows=8, blocks=2, max_new_tokens=4096, memory_bytes=10**12)
  whole = planned(c, on_gpu()).update
  fewer = lambda **sizes: dataclasses.replace(whole, **sizes).need
  limit = fewer(responses=5) / 0.9
  with pytest.raises(memory.TooLarge) as e:
    memory.check_update(whole, int(limit) + 1)
  line = str(e.value)
  assert "\n" not in line
  assert line.startswith(
    "the gradient of optim.blocks = 2 with optim.rows = 8 responses of 4096 "
    "tokens needs "
  )
  assert "nearest that fits: optim.rows = 5, or optim.blocks = 1" in line
  with pytest.raises(memory.TooLarge, match="use more devices, or larger ones"):
    memory.check_update(whole, whole.resident_bytes)
  memory.check_update(whole, int(whole.need / 0.9) + 1)


def test_moments_that_wait_on_the_host_are_held_while_they_are_applied():
  plans = planned(config(offload="moments"), on_gpu())
  params = sizes.parameter_bytes(on_gpu(), axes=ONE)
  assert plans.sampling_bytes == pytest.approx(params, rel=1e-3)
  assert plans.applying_bytes == pytest.approx(3 * params, rel=1e-3)


def test_each_of_several_processes_samples_with_its_own_parameters():
  axes = Axes(fsdp=8)
  one, two = (
    planned(config(), axes=axes, processes=count).rollouts.load.resident_bytes
    for count in (1, 2)
  )
  assert two - one == sizes.parameter_bytes(SMALL, axes.share(2))


def test_the_memory_of_a_cpu_is_that_of_its_host():
  nothing, moments = (
    planned(config(offload=offload)) for offload in ("nothing", "moments")
  )
  assert nothing.sampling_bytes == moments.sampling_bytes


def test_two_batches_lie_on_the_devices():
  """8 microbatches of 16 blocks of 3 rows: 21 bytes for each token."""
  c = config(rows=3, blocks=16, max_new_tokens=100)
  parts = planned(c, axes=Axes(fsdp=4)).update.parts
  assert parts["batches"] == 2 * 8 * (16 // 4) * 3 * 100 * 21
