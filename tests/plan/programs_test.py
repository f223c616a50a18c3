"""Programs of a run, which a real step runs too, and the memory they need."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import runs_ahead as made
import tiers
from messages import refuses
from small_policies import GEMMA2, changed

from brorl_jax.learner import update
from brorl_jax.main import train as train_command
from brorl_jax.plan import programs, resolve
from brorl_jax.plan.memory import TooLarge
from brorl_jax.plan.programs import (
  CompileJob,
  Program,
  bytes_of,
  every_program,
  training_spec,
)
from brorl_jax.rollout import prefixes, stream
from brorl_jax.rollout import programs as rollout_programs
from launch.bench.ahead.hlo import Text

MIB = 2**20
# What XLA compiles in a step, by the name in the list.
JITTED = {"score": (update, "logp_of"), "gradient": (update, "_add"),
  "apply": (update, "_apply"), "prefill": (stream, "open_shelf"),
  "decode": (rollout_programs, "segment"), "read": (stream, "read_more"),
  "admit": (stream, "_admit"), "compact": (rollout_programs, "resize"),
  "take": (stream, "_taken"), "evaluation: prefill": (rollout_programs,
    "start"), "evaluation: finish": (rollout_programs, "finish")}  # fmt: skip
TRAINING = [*JITTED][:9]
ORDER = [
  *TRAINING, "evaluation: prefill", "evaluation: decode", "evaluation: finish",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def unchecked():
  """Types are checked of arrays alone, which programs are compiled without."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def found(unchecked):
  run = made.run()
  every = every_program(run, lambda lowered: lowered.compile())
  return run, {p.name: p for p in every}


def shapes(tree):
  """Of each array; scalars the host may pass as numbers of Python."""
  arrays = [x for x in jax.tree.leaves(tree) if getattr(x, "shape", ())]
  return sorted((tuple(x.shape), str(x.dtype)) for x in arrays)


def test_a_run_by_hand():
  run = made.run()
  assert run.rows == 8
  layer = 16 * 40 + 24 * 16 + 3 * 16 * 20 + 40 + 2 * 16
  assert run.parameters == 2 * 37 * 16 + 2 * layer + 16
  spec = training_spec(run)
  assert (spec.chunk, spec.max_new_tokens, spec.slots) == (4, 6, 3)
  assert (spec.lanes, spec.streams, spec.blocks) == (2, True, 0)
  assert spec.sampling.temperature == run.config.sampling.temperature
  # 24 rows on 8 devices; a key is two words.
  key = jax.eval_shape(lambda: jax.random.key(0))
  tree = [run.at("fsdp")((24, 5), jnp.float32), run.at()((7,), jnp.int8)]
  assert bytes_of([*tree, run.at()(key.shape, key.dtype)]) == 3 * 5 * 4 + 7 + 8


@pytest.mark.parametrize("changes, old, ref", [
  (dict(minibatches=1, kl_weight=0.0), False, False),
  (dict(minibatches=2, kl_weight=0.0), True, False),
  (dict(minibatches=1, kl_weight=0.1), False, True),
])  # fmt: skip
def test_a_batch_has_the_log_probabilities_that_are_needed(changes, old, ref):
  run = made.run(**changes)
  batch = programs.batch(run, scored=True)
  assert (batch.logp_old is not None, batch.logp_ref is not None) == (old, ref)
  plain = programs.batch(run, scored=False)
  assert plain.logp_old is None and plain.logp_ref is None
  # 8 microbatches of 8 blocks of 4 rows, cut along the blocks.
  assert batch.response.shape == (8, 8, 4, 6)
  assert batch.prompt.sharding.shard_shape(batch.prompt.shape) == (8, 1, 10)


def test_what_an_update_compiles_and_what_lies_beside_it():
  """While it is applied the moments lie on the devices."""
  plain = programs.updating(made.run(minibatches=1, kl_weight=0.0))
  assert next(plain).name == "gradient"
  of = {one.name: one.held_bytes for one in programs.updating(made.run())}
  assert [*of] == TRAINING[:3] and of["gradient"] < 10_000_000 + 2_000_000
  assert 20_000_000 < of["apply"] < 20_000_000 + 2_000_000


@pytest.mark.ci
def test_the_programs_of_a_run_and_bytes_that_xla_counts(found):
  """`held` is the training state, and what a gradient reads besides."""
  run, every = found
  assert [*every] == ORDER
  # XLA leaves out arguments that a program does not read; of this none.
  gradient = every["gradient"]
  memory = gradient.lowered.compile().memory_analysis()
  besides = gradient.held_bytes - run.sampling_bytes
  assert besides + bytes_of(run.state().params) == memory.argument_size_in_bytes


@pytest.mark.ci
def test_few_layers_decode_with_the_weights_of_few(found):
  _, every = found
  deep = made.run(changed(layers=5), fast=True)
  every_one = programs.sampling(deep, lambda lowered: lowered.compile())
  decode = [p.lowered.in_avals for p in every_one if p.name == "decode"]
  two, three = map(shapes, decode)
  assert two == shapes(every["decode"].lowered.in_avals)
  assert len(three) > len(two)


@pytest.mark.slow
def test_a_step_runs_what_is_listed(tmp_path, monkeypatch):
  """Each program of the list but one is called with just these shapes."""
  monkeypatch.setattr(prefixes, "pays", lambda *_, **__: False)
  c = made.run(prompt_tokens=40, steps=1, save_every=1, eval_every=1).config
  run = resolve.resolve(c, resolve.here(c.devices))
  job = CompileJob(run, run.phases[0], run.mesh, run.mesh, fast=False)
  listed = {}
  for one in every_program(job, lambda lowered: lowered.compile()):
    listed.setdefault(one.name, shapes(one.lowered.in_avals))
  called = {}
  for name, (module, function) in JITTED.items():
    real = getattr(module, function)

    def seen(*args, real=real, name=name, **kwargs):
      called.setdefault(name, []).append(shapes((args, kwargs)))
      return real(*args, **kwargs)

    monkeypatch.setattr(module, function, seen)
  train_command.run(run, tmp_path / "run", allow_change=False)
  # Both kinds of rollouts go through the same loop.
  alike = {"evaluation: decode": "decode"}
  for name, arguments in listed.items():
    calls = called.get(alike.get(name, name), [])
    # Nothing is compacted in so short a step.
    assert arguments in calls or name == "compact", name
  assert called.keys() <= listed.keys()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [tiers.at_night(2), 8])
def test_each_process_samples_its_share_without_the_others(processes, found):
  run, whole = made.run(processes=processes), found[1]
  every = {p.name: p for p in every_program(run, lambda x: x.compile())}
  assert [*every] == [*ORDER[:3], "copy", *ORDER[3:]]

  # No message leaves a process but in the copy and the update.
  def groups(name):
    text = every[name].lowered.compile().as_text()
    return {x.group for x in Text(text).account().collectives}

  assert max(groups("copy") | groups("gradient")) == 8
  assert max({0}.union(*map(groups, ORDER[3:]))) <= 8 // processes
  # 16 prompts at a time, of 10 tokens each.
  shapes_of = lambda p: shapes(p.lowered.in_avals)
  assert ((16 // processes, 10), "int32") in shapes_of(every["prefill"])
  assert shapes_of(every["gradient"]) == shapes_of(whole["gradient"])
  # A process holds the copy beside its part of the training state.
  copy = bytes_of(run.alone.state().params)
  whole_bytes = 4 * run.parameters
  assert copy == whole_bytes if processes == 8 else copy < whole_bytes / 3
  assert every["prefill"].held_bytes >= run.sampling_bytes + copy


def of_compiler(outputs, aliased):
  """As XLA's, of a program that needs 40 bytes for itself."""
  sizes = dict(output_size_in_bytes=outputs, alias_size_in_bytes=aliased)
  memory = SimpleNamespace(temp_size_in_bytes=40, **sizes)
  return SimpleNamespace(memory_analysis=lambda: memory)


def test_memory_of_a_program():
  one = lambda *sizes: (Program("a", None, 100), of_compiler(*sizes))
  (found,) = programs.needs(made.run(), [one(50, 30)])
  assert found == ("a", 100, 40, 20) and found.peak_bytes == 160
  # Results that are all written over arguments need nothing.
  (found,) = programs.needs(made.run(), [one(20, 30)])
  assert found.new_bytes == 0


def test_two_and_three_layers_stand_for_more():
  job = made.run(changed(layers=7), fast=True)
  few = [(Program("decode", None, 100), of_compiler(39, 30))]
  few += [(Program("decode", None, 130), of_compiler(34, 30))]
  (found,) = programs.needs(job, few)
  # Of 7 layers 5 are more than those of two. Less for more layers is chance.
  assert found == ("decode", 100 + 5 * 30, 40, 9)


@pytest.mark.parametrize(
  "policy, says", [(changed(layers=3), "has 3"), (GEMMA2, "which slide")]
)
def test_a_policy_that_few_layers_do_not_stand_for(policy, says):
  with refuses(ValueError, f"--fast ... {says} ... leave --fast out"):
    programs.compile_all(made.run(policy, fast=True), made.topology())


def test_every_program_is_compiled_once(monkeypatch):
  seen = []

  class Lowered:
    def compile(self, compiler_options):
      assert compiler_options == {}
      seen.append(self)
      return of_compiler(0, 0)

  def every(job, compile):
    compile(first := Lowered())
    yield Program("prefill", first, 100)
    yield Program("decode", Lowered(), 170)

  monkeypatch.setattr(programs, "every_program", every)
  found = programs.compile_all(made.run(), made.topology())
  assert [p.name for p, _ in found] == ["prefill", "decode"]
  assert len(seen) == 2


@pytest.fixture
def show(monkeypatch, capsys):
  def printed(*some, job=None):
    monkeypatch.setattr(programs, "compile_all", lambda *_: [])
    monkeypatch.setattr(programs, "needs", lambda *_: [*some])
    programs.show(job or made.run(), made.topology())
    return capsys.readouterr().out.splitlines()

  return printed


def test_tables_and_a_line_of_json(show):
  large = made.needs("gradient", temp_bytes=500 * MIB)
  lines = show(made.needs("prefill"), large)
  assert lines[0] == (
    "programs of cpu:1x8: mesh (data=1, fsdp=8, tensor=1, expert=1), 2 layers"
  )
  assert [line.split() for line in lines[1:5]] == [
    "per device held itself peak of pool".split(),
    "prefill 2.00 MiB 3.00 MiB 5.00 MiB 0.5%".split(),
    "gradient 2.00 MiB 0.49 GiB 0.49 GiB 50.4%".split(),
    "pool 0.98 GiB".split(),
  ]
  assert lines[5] == "checkpoint: 83.01 KiB, of 8 devices"
  # Parameters, two moments and the reference, and three counters.
  saved = 16 * made.run().parameters + 3 * 4
  read = json.loads(lines[-1])
  first, _ = read.pop("programs")
  assert first == {"name": "prefill", "held_bytes": 2 * MIB,
    "temp_bytes": MIB, "new_bytes": 2 * MIB, "peak_bytes": 5 * MIB}  # fmt: skip
  assert read.pop("estimated_bytes")["gradient"] > 0
  assert read == {"topology": "cpu:1x8", "devices": 8, "pool_bytes": made.POOL,
    "fits": True, "checkpoint_bytes": saved}  # fmt: skip
  lines = show(made.needs("prefill"), job=made.run(fast=True))
  assert lines[0].endswith("2 layers, decode with 2 and 3, no evaluation")


@pytest.mark.parametrize(("name", "lower"), [
  ("score", "optim.rows = 4"), ("gradient", "optim.rows = 4"),
  ("decode", "sampling.slots = 3"), ("apply", "theory.prompts = 16"),
])  # fmt: skip
def test_what_does_not_fit_is_printed_and_refused_with_what_to_lower(
  show, capsys, name, lower
):
  show(made.needs(name, temp_bytes=made.POOL - 4 * MIB))  # what just fits
  some = [made.needs(which, temp_bytes=made.POOL + more)
    for which, more in (("prefill", 0), (name, MIB))]  # fmt: skip
  with refuses(TooLarge, f"{name} needs ... lower {lower}"):
    show(*some, job=made.run(theory_prompts=16))
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False
