"""Sizes that follow from a machine, and --mode=plan."""

import dataclasses
import functools
import itertools
import json
import math
import re
import shutil

import hub_cache
import jax
import one_step
import pytest
import tiers
from configured import config
from loads import GIB, SMALL, on_gpu, planned, settled
from messages import mentions, refuses

from brorl_jax.configs import n16, n512
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.main import plan as plan_command
from brorl_jax.main import settings
from brorl_jax.many import meshes
from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model import huggingface, spec, tokenizer
from brorl_jax.model.spec import Target
from brorl_jax.plan import memory, resolve, topology
from brorl_jax.plan.resolve import Machine, Plans


def plans(**changes) -> Plans:
  return planned(config(**changes))


def chosen(axes=ONE, policy=SMALL, **changes):
  c = config(**changes)
  out, _ = settled(c, policy, axes)
  sampled, optim = out.sampling, out.optim
  assert dataclasses.replace(out, sampling=c.sampling, optim=c.optim) == c
  return sampled.in_flight, optim.blocks, optim.rows


def test_work_spreads_evenly_over_the_mesh():
  of = dict(n=512, in_flight=8192, rows=32, samples=16384)
  settled(config(**of, blocks=16), axes=Axes(fsdp=8))
  both = "3 groups ... in_flight = 8192 ... of 384 ... blocks = 16 ... of 3"
  with refuses(ValueError, both):
    settled(config(**of, blocks=16), axes=Axes(fsdp=3))
  with refuses(ValueError, "blocks = 6 ... multiple of 4"):
    settled(config(**of, blocks=6), axes=Axes(fsdp=4))


@pytest.mark.parametrize(("rows", "prompts", "each"),
  [(8, 128, 2048), (32, 128, 2048), (64, 128, 1024), (8, 4, 256)])  # fmt: skip
@pytest.mark.parametrize("data", [1, 4])
def test_zeros_follow_from_the_mesh(rows, prompts, each, data):
  zeros = dict(in_flight=0, blocks=0, rows=3, n=512, samples=512 * prompts)
  axes = Axes(data=data, fsdp=rows // data)
  assert chosen(axes, **zeros) == (rows * each, rows, 3)


def test_rows_are_as_many_as_fit():
  most = planned(config(rows=1, blocks=1, max_new_tokens=4096), on_gpu()).update
  rows = lambda limit: memory.update_rows(most, round(limit / 0.9) + 2)
  of = lambda M: dataclasses.replace(most, responses=M).need
  assert (rows(of(8)), rows(of(8) - 4096)) == (8, 4)
  assert (rows(of(4) - 4096), rows(of(2) - 4096)) == (2, 1)
  assert rows(0) == 1  # and refused where the plan is made
  small = dict(n=4, samples=2**14, in_flight=4, eval_n=1, theory_prompts=0)
  for M in (8, 4, 2):
    tight = dict(rows=0, blocks=1, max_new_tokens=4096, **small)
    tight |= dict(memory_bytes=round(of(M) / 0.9) + 2)
    assert chosen(policy=on_gpu(), **tight)[2] == M
    assert (
      chosen(policy=on_gpu(), **tight | {"samples": 64})[2] == 2
    )  # by padding


# What XLA may use of a device, and how many there are.
MACHINES = {"h100:1x8": ("gpu", 8, 72.8), "h100:8x8": ("gpu", 64, 72.8),
  "v5p:2x2x2": ("tpu", 8, 95.7), "v5p:4x4x4": ("tpu", 64, 95.7),
  "v6e:4x4": ("tpu", 16, 31.2), "v6e:8x8": ("tpu", 64, 31.2)}  # fmt: skip


@pytest.mark.parametrize(
  "preset, name", tiers.some(itertools.product(["1p5b", "8b"], MACHINES), 2, 4)
)
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
  assert (sampled.n, sampled.samples,
    sampled.max_new_tokens) == (512, 128 * 512, 15360)  # fmt: skip
  assert out.optim.minibatches == c.optim.minibatches
  assert out.optim.lr == c.optim.lr


@pytest.mark.parametrize("offload", ["nothing", "reference", "moments"])
@pytest.mark.parametrize("reference", [True, False])
def test_training_state_is_what_training_makes(reference, offload):
  mesh = meshes.make_mesh(fsdp=4, tensor=2)
  c = config(offload=offload, in_flight=4 * 512, blocks=4)
  tx, _ = resolve.optimizer(c)
  state = states.initial_state(SMALL.init(jax.random.key(0)), tx, mesh,
    keep_reference=reference, offload=offload)  # fmt: skip
  device = jax.devices()[0]
  held = sum(shard.data.nbytes for x in jax.tree.leaves(state)
    for shard in x.addressable_shards if shard.device == device)  # fmt: skip
  how = dict(axes=Axes(fsdp=4, tensor=2), keep_reference=reference)
  state_bytes = lambda policy: planned(c, policy, **how).sampling_bytes
  assert held == state_bytes(SMALL)
  on_device = sum(shard.data.nbytes for x in jax.tree.leaves(state)
    for shard in x.addressable_shards if shard.device == device
    and x.sharding.memory_kind == "device")  # fmt: skip
  assert on_device == state_bytes(on_gpu())
  copies = (offload == "nothing") * reference + 2 * (offload != "moments")
  params = state_bytes(SMALL) // (3 + reference)
  assert round(on_device / params, 2) == 1 + copies


def test_moments_that_wait_on_the_host_are_held_while_they_are_applied():
  plans = planned(config(offload="moments"), on_gpu())
  params = resolve.parameter_bytes(on_gpu(), axes=ONE)
  assert plans.sampling_bytes == pytest.approx(params, rel=1e-3)
  assert plans.applying_bytes == pytest.approx(3 * params, rel=1e-3)


def test_two_batches_lie_on_the_devices():
  """8 microbatches of 16 blocks of 3 rows: 21 bytes for each token."""
  c = config(rows=3, blocks=16, max_new_tokens=100)
  parts = planned(c, axes=Axes(fsdp=4)).update.parts
  assert parts["batches"] == 2 * 8 * (16 // 4) * 3 * 100 * 21


def test_evaluations_are_planned_for_files_alone_or_with_puzzles():
  files = {"data.files": ("a.jsonl", "b.jsonl"), "in_flight": 512 * 512}
  alone, mixed, made = (
    plans(**given, memory_bytes=GIB, mesh_fsdp=1).heldout.load.prompts
    for given in (
      {**files, "eval_n": 512}, {**files, "eval_n": 512, "data.puzzles": True},
      {"in_flight": 512 * 512, "eval_n": 512}))  # fmt: skip
  # 60 held-out prompts of each task: two files, eight families.
  assert alone <= 120 and made > alone and mixed >= made


def test_evaluations_take_fewer_puzzles_at_a_time_if_they_must():
  small = functools.partial(plans, rows=1, blocks=1)  # a small update
  roomy = small()
  assert roomy.heldout.load.prompts == 256  # 4096 / 16, of 480
  assert (roomy.heldout.lanes, roomy.heldout.slots) == (16, 8)
  assert small(eval_prompts=1).heldout.load.prompts == 8
  assert small(slots=5).heldout.slots == 5
  assert small(in_flight=512, eval_n=512, slots=0).heldout.slots == 512
  assert small(eval_prompts=0).heldout.load.prompts == 256
  longer = small(eval_max_new_tokens=600)
  assert longer.heldout.load.max_new_tokens == 600
  assert longer.heldout.total_bytes > roomy.heldout.total_bytes
  assert longer.rollouts == roomy.rollouts
  with pytest.raises(memory.TooLarge, match="evaluations: rollouts of 16 x 3"):
    small(eval_max_new_tokens=32_000, memory_bytes=GIB // 8)
  # Prompts of evaluations are many, those of rollouts few.
  need = roomy.rollouts.total_bytes
  tight = small(memory_bytes=math.ceil(need / 0.9))
  chosen = lambda plan: (plan.slots, plan.lanes, plan.stages)
  large = dataclasses.replace(roomy.rollouts.load.policy, vocab=2**18)  # 134 MB
  load = dataclasses.replace(roomy.rollouts.load, policy=large)
  other = dataclasses.replace(roomy.rollouts, load=load)
  assert (roomy.rollouts.groups, other.groups) == (2, 1)
  assert chosen(tight.rollouts) == chosen(roomy.rollouts)
  assert tight.heldout.load.prompts < 256
  assert tight.heldout.total_bytes <= need


@pytest.mark.parametrize("each, want", [
  (4, [32, 16, 8]),  # of each of eight families
  (60, [256, 128, 64]),  # 4096 / 16: no more than training has in flight
])  # fmt: skip
def test_processes_divide_evaluations(each, want):
  c = config(eval_prompts=each)
  of = lambda count: planned(c, SMALL, Axes(fsdp=4), processes=count)
  assert [of(count).heldout.load.prompts for count in (1, 2, 4)] == want


def plan_of(c):
  plan_command.run(plan_command.resolved(c))


@pytest.mark.parametrize("of", tiers.some([n512, n16], 1, 1))
@pytest.mark.parametrize(
  "preset, data", [("1p5b", 8), tiers.at_night(("8b", 2))]
)
def test_presets_fit_eight_devices_that_are_not_here(
  of, preset, data, capsys, monkeypatch
):
  monkeypatch.setattr(spec, "here", lambda: Target("cpu", 1, GIB))
  c = of.get_config(preset)
  c.devices.mesh_fsdp, c.devices.memory_bytes = data, 80 * 10**9

  def found(**fields):
    """Slots in all lanes, and blocks of a device."""
    c.sampling.update({"mean_tokens": 0, "int8_cache": False} | fields)
    plan_of(settings.typed(c))
    text = capsys.readouterr().out
    assert f"on {data} x {8 // data} accelerators" in text
    said = re.findall(
      r"^(\d+) lanes? x (\d+) slots?, (\d+) blocks of 64", text, re.M
    )
    (lanes, slots, blocks), _ = [tuple(map(int, each)) for each in said]
    return lanes * slots, blocks

  longest, blocks = found()
  assert longest // data >= 64  # rows of a device
  assert blocks == longest // data * 240  # 15,360 / 64 for each
  # What is counted on is the mean.
  mean, blocks = found(mean_tokens=6000)
  assert mean >= 2 * longest
  assert blocks == math.ceil(mean // data * (0.85 * 6000 / 64 + 0.5)) + 240
  assert found(int8_cache=True)[0] > 1.3 * longest


def test_a_plan_reads_the_cache_of_the_hub(tmp_path, monkeypatch, capsys):
  hub_cache.made(tmp_path, monkeypatch, v2=huggingface.ASSETS)
  plan_of(config(checkpoint="maker/model@v2"))
  assert "rollouts: " in capsys.readouterr().out
  command = "'hf download maker/model config.json --revision v1'"
  with refuses(UserError, f"checkpoint 'maker/model@v1' ... {command}"):
    plan_of(config(checkpoint="maker/model@v1"))
  known = n512.get_config("1p5b").policy.checkpoint.removesuffix("@v2")
  for name in (known, f"{known}@v2"):  # comes with the package
    assert plan_command.locate(name).name == known.partition("/")[2]


@pytest.mark.parametrize("text, on", [
  (None, "8 x 1 accelerators\n ... 72.78 GiB"),
  ("h100:8x8", "64 x 1 accelerators of 8 processes ... 72.78 GiB"),
  ("v5p:2x2x2", "8 x 1 accelerators of 2 processes ... 95.74 GiB"),
  ("h100:256x1", "128 of 256 processes need no prompt if all are kept"),
])  # fmt: skip
def test_a_preset_for_accelerators_is_planned(text, on, capsys, monkeypatch):
  def prepare(name, **_):
    raise UserError(f"no compiler for {name}")

  monkeypatch.setattr(spec, "here", lambda: Target("cpu", 1, GIB))
  monkeypatch.setattr(topology, "prepare", prepare)
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".92")
  c = n512.get_config("1p5b")
  typed = settings.typed(c)
  where = plan_command.assumed(typed, topology.named(text, fast=False))
  plan_command.run(plan_command.resolved(typed, where), where)
  said = capsys.readouterr().out
  assert all(part in said for part in on.split(" ... "))
  assert ("need no prompt" in said) == ("need no" in on)
  why = (
    f"no compiler for {text}" if text else "no accelerator here ... h100:1x8"
  )
  assert mentions(said.splitlines()[0], why)
  with refuses(UserError, "no compiler for h100:1x8"):
    topology.named("h100:1x8", fast=True)
  c.devices.mesh_fsdp = 65
  with refuses(UserError, "fsdp=65 ... devices of ... a machine of 65"):
    plan_command.resolved(settings.typed(c), where)


def test_devices_that_are_not_here_cannot_be_asked(capsys):
  many = dict(mesh_fsdp=16, in_flight=16 * 512, blocks=16)
  with pytest.raises(UserError, match="only 8 of 16 are here"):
    plan_of(config(**many))
  plan_of(config(**many, memory_bytes=GIB))
  assert "on 16 x 1 accelerators" in capsys.readouterr().out


def others(path, count=30, wrong=None):
  """Lines as others write them; the one numbered `wrong` has no answer."""
  rows = [{"question": f"{i} + 1 = ?", "label": i + 1} for i in range(count)]
  if wrong is not None:
    del rows[wrong]["label"]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return {
    "data.files": (str(path),), "data.fields": "prompt:question,answer:label",
    "data.domain": "math", "data.heldout_one_in": 3, "prompt_tokens": 60,
  }  # fmt: skip


def test_a_plan_reads_the_data_too(tmp_path, capsys):
  plan_of(config(**others(tmp_path / "mine.jsonl")))
  read, prompts, longest = capsys.readouterr().out.splitlines()[-3:]
  counts = re.match(r"files: math (\d+); held out (\d+); ", read)
  train, held = map(int, counts.groups())
  assert train > held > 0 and train + held == 30
  assert prompts.startswith("prompts: math 100%; none are generated")
  count = int(re.fullmatch(r"longest prompt (\d+) of 60 tokens", longest)[1])
  text = tokenizer.Tokenizer(huggingface.ASSETS)
  asked = config().data.domains["math"].instruction
  message = {"role": "user", "content": f"10 + 1 = ?\n{asked}"}
  assert count == len(text.render([message]))


def test_a_plan_tells_of_a_bad_line_and_of_a_long_prompt(tmp_path):
  path = tmp_path / "mine.jsonl"
  for fields in {}, {"memory_bytes": 1000}:  # of which the file comes first
    with refuses(UserError, "mine.jsonl, line 8 ... 'label'"):
      plan_of(config(**others(path, wrong=7), **fields))
  with refuses(UserError, "need ... 0.88 KiB ... memory_bytes"):
    plan_of(config(**others(path), memory_bytes=1000))
  with refuses(UserError, "data.prompt_tokens = 9"):
    plan_of(config(**others(path) | {"prompt_tokens": 9}))


def test_a_plan_without_a_tokenizer_reads_what_it_can(tmp_path, capsys):
  source = tmp_path / "policy"
  source.mkdir()
  shutil.copy(huggingface.ASSETS / "config.json", source)
  fields = others(tmp_path / "mine.jsonl")
  plan_of(config(checkpoint=str(source), **fields))
  text = capsys.readouterr().out
  assert "CPU devices" in text  # float32: not meant for accelerators
  said = text.splitlines()[-1]
  assert re.fullmatch(
    r"files: \d+ examples, held out \d+; the length of their prompts is"
    rf" unknown: {source} has no tokenizer\.json", said)  # fmt: skip
  fields = others(tmp_path / "mine.jsonl", wrong=7)
  with refuses(UserError, "line 8 ... 'label'"):
    plan_of(config(checkpoint=str(source), **fields))


def test_a_plan_is_that_of_the_run_where_its_devices_are_here(capsys):
  plan_of(config(dtype="bfloat16", mesh_fsdp=1))  # an embedded policy
  assert "on 1 x 1 CPU devices" in capsys.readouterr().out
  c = config(dtype="bfloat16", memory_bytes=10**8, mesh_fsdp=1)
  plan_of(c)
  got = one_step.resolved(c).phases[0].memory
  text = capsys.readouterr().out
  assert "on 1 x 1 CPU devices" in text
  assert got.rollouts.table() in text and got.heldout.table() in text
