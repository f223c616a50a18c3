"""The memory plan and --mode=plan."""

import functools
import itertools
import json
import math
import re

import jax
import numpy as np
import one_step
import pytest
import tiers
from configured import config
from loads import GIB, SMALL, load, on_gpu, planned

from brorl_jax.configs import n16, n512
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.main import plan as plan_command
from brorl_jax.main import settings
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import huggingface, target, tokenizer
from brorl_jax.model.target import Target
from brorl_jax.plan import functions, memory
from brorl_jax.plan.sizes import Plans


def plan_of(c):
  """Prints the plan of a config."""
  plan_command.run(plan_command.resolved(c))


@pytest.mark.parametrize("offload", ["nothing", "reference", "moments"])
@pytest.mark.parametrize("reference", [True, False])
def test_training_state_is_what_training_makes(reference, offload):
  mesh = meshes.make_mesh(fsdp=4, tensor=2)
  c = config(offload=offload, in_flight=4 * 512, blocks=4)
  tx, _ = functions.optimizer(c)
  state = states.initial_state(
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
  state_bytes = lambda policy: (
    planned(
      c, policy, Axes(fsdp=4, tensor=2), keep_reference=reference
    ).sampling_bytes
  )
  assert held == state_bytes(SMALL)
  on_device = sum(
    shard.data.nbytes
    for x in jax.tree.leaves(state)
    for shard in x.addressable_shards
    if shard.device == device and x.sharding.memory_kind == "device"
  )
  assert on_device == state_bytes(on_gpu())
  copies = (offload == "nothing") * reference + 2 * (offload != "moments")
  params = state_bytes(SMALL) // (3 + reference)
  assert round(on_device / params, 2) == 1 + copies


def test_what_waits_for_the_next_step_is_held_twice():
  one, two = (
    plans(pipeline=pipeline).sampling_bytes for pipeline in (False, True)
  )
  assert one == pytest.approx(4 * (two - one), rel=1e-3)


def plans(**changes) -> Plans:
  return planned(config(**changes))


def fit(memory_bytes, *, slots=None, lanes=None, **changes):
  sizes = dict(n=24, prompts=8, prompt_tokens=8, max_new_tokens=400)
  sizes |= {"resident_bytes": 0, "axes": Axes(), **changes}
  one = memory.Load(SMALL, **sizes)
  return memory.rollouts(one, memory_bytes, slots=slots, lanes=lanes)


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


def test_everything_if_there_is_room():
  got = fit(memory_bytes=10**15)
  assert (got.slots, got.lanes) == (24, 8)
  got = fit(memory_bytes=10**15, slots=100, lanes=100)
  assert (got.slots, got.lanes) == (24, 8)
  got = fit(memory_bytes=10**15, slots=5, lanes=3)
  assert (got.slots, got.lanes) == (5, 3)


@pytest.mark.ci
def test_as_many_slots_as_fit():
  before = 0
  for share in np.linspace(0.01, 1.0, 30):
    smallest, largest = needed(slots=1, lanes=1), needed()
    memory_bytes = least(smallest + share * (largest - smallest))
    got = fit(memory_bytes=memory_bytes)
    assert (
      got.total_bytes <= memory.limit_of(got.memory_bytes) <= 0.9 * memory_bytes
    )
    rows = got.slots * got.lanes
    assert 1.1 * rows >= before  # within what is not worth fewer slots
    before = max(rows, before)
    # No choice that is a tenth better was left.
    for slots in (1, 2, 4, 8, 16, 24):
      for lanes in range(1, 9):
        if needed(slots=slots, lanes=lanes) <= memory.limit_of(
          got.memory_bytes
        ):
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


def refusal(**changes) -> str:
  with pytest.raises(memory.TooLarge) as e:
    fit(**changes)
  line = str(e.value)
  assert "\n" not in line
  assert line.startswith("rollouts of 24 x ")
  return line


def test_refuses_slots_and_names_how_many_fit():
  tight = least(needed(slots=10, lanes=3))
  line = refusal(memory_bytes=tight, slots=20, lanes=3)
  need, limit = needed(slots=20, lanes=3), int(0.9 * tight)
  assert f"need {memory.size(need)} of {memory.size(limit)} (90% of a" in line
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
  tight = least(needed(**sizes, axes=Axes(tensor=2)))
  line = refusal(memory_bytes=tight, **sizes)
  assert line.endswith("nearest that fits: mesh_tensor = 2 on 2 devices")
  fit(memory_bytes=tight, **sizes, axes=Axes(tensor=2))
  tight = least(needed(**sizes, axes=Axes(tensor=2), resident_bytes=10**7))
  line = refusal(
    memory_bytes=tight, **sizes, axes=Axes(fsdp=2), resident_bytes=10**7
  )
  assert line.endswith("nearest that fits: mesh_tensor = 2")


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
    f"state and weights alone are {memory.size(3 * GIB + weights)}; use more "
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
  one = fit(memory_bytes=GIB, slots=1, lanes=1, max_new_tokens=1)
  assert one.line().startswith("1 lane x 1 slot, 1 page of 1 token, ")


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


def test_what_does_not_fit_is_refused_in_one_line(capsys):
  with pytest.raises(UserError) as e:
    plan_of(config(memory_bytes=10**6))
  line = str(e.value)
  assert capsys.readouterr().out == "" and "\n" not in line
  assert line.startswith(
    "config.devices.memory_bytes = 1000000: rollouts of 512 x 6 tokens need "
  )
  assert "of 0.86 MiB (90% of a device)" in line


@pytest.mark.parametrize("of", tiers.some([n512, n16], 1, 1))
@pytest.mark.parametrize(
  "preset, fields, data", [("1p5b", QWEN, 8), tiers.at_night(("8b", LLAMA, 2))]
)
def test_presets_fit_eight_devices_that_are_not_here(
  of, preset, fields, data, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(target, "here", lambda: Target("cpu", 1, GIB))
  (tmp_path / "config.json").write_text(json.dumps(fields))
  c = of.get_config(preset)
  c.policy.checkpoint, c.devices.mesh_fsdp = str(tmp_path), data
  c.devices.memory_bytes = 80 * 10**9
  plan_of(settings.typed(c))
  text = capsys.readouterr().out
  assert f"on {data} x {8 // data} accelerators" in text

  def found():
    """Slots in all lanes, and blocks of a device."""
    told = re.findall(
      r"^(\d+) lanes? x (\d+) slots?, (\d+) blocks of 64", text, re.M
    )
    (lanes, slots, blocks), _ = [tuple(map(int, each)) for each in told]
    return lanes * slots, blocks

  longest, blocks = found()
  assert longest // data >= 64  # rows of a device
  assert blocks == longest // data * 240  # 15,360 / 64 for each
  c.sampling.mean_tokens = c.sampling.max_new_tokens
  plan_of(settings.typed(c))
  text = capsys.readouterr().out
  assert found() == (longest, blocks)
  # What is counted on is the mean.
  c.sampling.mean_tokens = 6000
  plan_of(settings.typed(c))
  text = capsys.readouterr().out
  mean, blocks = found()
  assert mean >= 2 * longest
  assert blocks == math.ceil(mean // data * (6000 / 64 + 0.5)) + 240
  c.sampling.mean_tokens, c.sampling.int8_cache = 0, True
  plan_of(settings.typed(c))
  text = capsys.readouterr().out
  assert found()[0] > 1.3 * longest


def test_a_name_of_the_hub_is_not_downloaded(monkeypatch):
  monkeypatch.setattr(huggingface, "locate", lambda _: pytest.fail("downloads"))
  c = n512.get_config("1p5b")
  c.policy.checkpoint = name = "somebody/Model-1B"
  with pytest.raises(UserError) as e:
    plan_of(settings.typed(c))
  assert f"checkpoint = '{name}' is not a directory" in str(e.value)
  assert f"'hf download {name} config.json --local-dir Model-1B" in str(e.value)


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
  plan_command.run(
    plan_command.resolved(config(**others(tmp_path / "mine.jsonl")))
  )
  read, prompts, longest = capsys.readouterr().out.splitlines()[-3:]
  train, held = map(
    int, re.match(r"files: math (\d+); held out (\d+); ", read).groups()
  )
  assert train > held > 0 and train + held == 30
  assert prompts.startswith("prompts: math 100%; none are generated")
  count = int(re.fullmatch(r"longest prompt (\d+) of 60 tokens", longest)[1])
  text = tokenizer.Tokenizer(huggingface.ASSETS)
  asked = config().data.domains["math"].instruction
  assert count == len(
    text.render([{"role": "user", "content": f"10 + 1 = ?\n{asked}"}])
  )


def test_a_plan_tells_of_a_bad_line_and_of_a_long_prompt(tmp_path):
  path = tmp_path / "mine.jsonl"
  with pytest.raises(
    UserError, match=r"mine\.jsonl, line 8, field 'label': missing"
  ):
    plan_of(config(**others(path, wrong=7)))
  with pytest.raises(UserError, match=r"mine/\d+ has \d+ prompt tok"):
    plan_command.run(
      plan_command.resolved(config(**others(path) | {"prompt_tokens": 9}))
    )


def test_a_plan_without_a_tokenizer_reads_what_it_can(tmp_path, capsys):
  source = tmp_path / "policy"
  source.mkdir()
  (source / "config.json").write_bytes(
    (huggingface.ASSETS / "config.json").read_bytes()
  )
  fields = others(tmp_path / "mine.jsonl")
  plan_command.run(
    plan_command.resolved(config(checkpoint=str(source), **fields))
  )
  said = capsys.readouterr().out.splitlines()[-1]
  assert re.fullmatch(
    r"files: \d+ examples, held out \d+; the length of their prompts is"
    rf" unknown: {source} has no tokenizer\.json",
    said,
  )
  fields = others(tmp_path / "mine.jsonl", wrong=7)
  with pytest.raises(UserError, match="line 8, field 'label'"):
    plan_command.run(
      plan_command.resolved(config(checkpoint=str(source), **fields))
    )


def test_evaluations_are_planned_for_files_alone_or_with_puzzles():
  files = {"data.files": ("a.jsonl", "b.jsonl"), "in_flight": 512 * 512}
  alone, mixed, made = (
    plans(**given, memory_bytes=GIB, mesh_fsdp=1).heldout.prompts
    for given in (
      {**files, "eval_n": 512},
      {**files, "eval_n": 512, "data.puzzles": True},
      {"in_flight": 512 * 512, "eval_n": 512},
    )
  )
  # 60 held-out prompts of each task: two files, eight families.
  assert alone <= 120 and made > alone and mixed >= made


def test_a_plan_is_that_of_the_run_where_its_devices_are_here(capsys):
  c = config(dtype="bfloat16", memory_bytes=10**8, mesh_fsdp=1)
  plan_of(c)
  got = one_step.resolved(c).phases[0].memory
  text = capsys.readouterr().out
  assert "on 1 x 1 CPU devices" in text
  assert got.rollouts.table() in text and got.heldout.plan.table() in text


@pytest.mark.ci
def test_zero_means_as_many_as_fit():
  got = plans(slots=0).rollouts
  assert (got.slots, got.lanes) == (512, 8)
  got = plans(slots=0, lanes=2).rollouts
  assert (got.slots, got.lanes) == (512, 2)
  cache = lambda p: p.rollouts.stages["decoding"]["cache"]
  assert cache(plans(int8_cache=True)) < cache(plans()) / 2


def test_evaluations_take_fewer_puzzles_at_a_time_if_they_must():
  small = functools.partial(plans, rows=1, blocks=1)  # a small update
  roomy = small()
  assert roomy.heldout.prompts == 256  # 4096 / 16, of 480
  assert roomy.heldout.plan.slots == 16
  assert small(eval_prompts=1).heldout.prompts == 8
  assert small(slots=5).heldout.plan.slots == 5
  # Prompts of evaluations are many, those of rollouts few.
  need = roomy.rollouts.total_bytes
  tight = small(memory_bytes=least(need))
  chosen = lambda plan: (plan.slots, plan.lanes, plan.stages)
  assert chosen(tight.rollouts) == chosen(roomy.rollouts)
  assert tight.heldout.prompts < 256
  assert tight.heldout.plan.total_bytes <= memory.limit_of(least(need))


@pytest.mark.parametrize(
  "each, want",
  [
    (4, [32, 16, 8]),  # of each of eight families
    (60, [256, 128, 64]),  # 4096 / 16: no more than training has in flight
  ],
)
def test_processes_divide_evaluations(each, want):
  c = config(eval_prompts=each)
  of = lambda count: planned(c, SMALL, Axes(fsdp=4), processes=count)
  prompts = [of(count).heldout.prompts for count in (1, 2, 4)]
  assert prompts == want


def test_the_probe_is_that_of_the_config():
  found = plans(rows=1, blocks=1, max_new_tokens=900).probe
  assert (found.prompts, found.responses, found.tokens) == (2, 16, 128)
  assert found.prompt_tokens == 40
  # No more than there are.
  found = plans(theory_prompts=99, samples=16 * 512).probe
  assert (found.prompts, found.tokens) == (16, 6)
  assert plans(theory_prompts=0).probe is None
  params = plans().sampling_bytes // 4
  assert found.gradient_bytes == pytest.approx(params, rel=1e-4)


@pytest.mark.ci
def test_a_probe_that_does_not_fit_is_refused_with_the_nearest_that_does():
  small = functools.partial(plans, rows=1, blocks=1)  # a small update
  need = lambda **changes: (
    small(max_new_tokens=900, memory_bytes=10**15, **changes).probe.need
  )
  assert need(theory_prompts=15) < need(theory_prompts=16)
  # Less than the probe would take, and enough for all else.
  tight = dict(memory_bytes=least(need(theory_prompts=15)))
  assert small(max_new_tokens=900, theory_prompts=0, **tight).probe is None
  with pytest.raises(memory.TooLarge) as e:
    small(max_new_tokens=900, theory_prompts=16, **tight)
  line = str(e.value)
  assert "\n" not in line and re.fullmatch(
    r"measuring the theorem on theory\.prompts = 16 needs "
    r"[\d.]+ .iB of [\d.]+ .iB \(90% of a device\) in an update; "
    r"nearest that fits: 15; theory\.prompts = 0 leaves it out",
    line,
  )
  small(max_new_tokens=900, theory_prompts=15, **tight)


def test_a_probe_of_which_nothing_fits():
  found = plans().probe
  with pytest.raises(memory.TooLarge, match=r"update; theory\.prompts = 0 "):
    memory.check_probe(found, found.resident_bytes)
