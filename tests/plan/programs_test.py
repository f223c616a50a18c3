"""Tests of brorl_jax/plan/programs.py: a real step runs no other."""

import jax
import jaxtyping
import pytest
import runs_ahead as made
import tiers
from small_policies import changed

from brorl_jax.learner import update
from brorl_jax.main import train as train_command
from brorl_jax.plan import hlo, measured, programs, resolve
from brorl_jax.plan.run import Job, size, training_spec
from brorl_jax.rollout import prefixes, stream
from brorl_jax.rollout import programs as rollout_programs

# What XLA compiles in a step, by the name in the list.
JITTED = {
  "prefill": (stream, "open_shelf"),
  "read": (stream, "read_more"),
  "decode": (rollout_programs, "segment"),
  "admit": (stream, "_admit"),
  "compact": (rollout_programs, "resize"),
  "take": (stream, "_taken"),
  "score": (update, "logp_of"),
  "gradient": (update, "_add"),
  "apply": (update, "_apply"),
  "evaluation: prefill": (rollout_programs, "start"),
  "evaluation: finish": (rollout_programs, "finish"),
}
ORDER = [
  "score", "gradient", "apply", "prefill", "decode", "read", "admit", "compact",
  "take",
  "evaluation: prefill", "evaluation: decode", "evaluation: finish",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def unchecked():
  """Types are checked of arrays alone, which programs are compiled without."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def found(unchecked):
  """A run of TINY, and its programs by name."""
  run = made.run()
  every = measured.every(run, lambda lowered: lowered.compile())
  return run, {p.name: p for p in every}


def shapes(tree):
  """Of each array; scalars the host may pass as numbers of Python."""
  arrays = [x for x in jax.tree.leaves(tree) if getattr(x, "shape", ())]
  return sorted((tuple(x.shape), str(x.dtype)) for x in arrays)


def test_the_spec_of_training():
  run = made.run()
  spec = training_spec(run)
  assert (spec.chunk, spec.max_new_tokens, spec.slots) == (4, 6, 3)
  assert (spec.lanes, spec.streams, spec.blocks) == (2, True, 0)
  assert spec.sampling.temperature == run.config.sampling.temperature


@pytest.mark.ci
def test_the_programs_of_a_run(found):
  _, every = found
  assert [*every] == ORDER
  assert {p.layers for p in every.values()} == {2}


@pytest.mark.ci
def test_bytes_of_arguments_are_those_that_xla_counts(found):
  """`held` is the training state, and what a gradient reads besides."""
  run, every = found
  # XLA leaves out arguments that a program does not read; of this none.
  gradient = every["gradient"]
  memory = gradient.lowered.compile().memory_analysis()
  besides = gradient.held_bytes - run.sampling_bytes
  counted = besides + size(run.state().params)
  assert counted == memory.argument_size_in_bytes


@pytest.mark.ci
def test_a_policy_of_few_layers_decodes_with_so_many(found):
  _, every = found
  deep = made.run(changed(layers=5), fast=True)
  every_one = programs.sampling(deep, lambda lowered: lowered.compile())
  few = [p for p in every_one if p.name == "decode"]
  assert [p.layers for p in few] == [2, 3]
  two, _ = few
  # Weights of the layers, in arguments of the same shapes as a policy of two.
  assert shapes(two.lowered.in_avals) == shapes(
    every["decode"].lowered.in_avals
  )


@pytest.mark.slow
def test_a_step_runs_what_is_listed(tmp_path, monkeypatch):
  """Each program of the list but one is called with just these shapes."""
  monkeypatch.setattr(prefixes, "pays", lambda *_, **__: False)
  c = made.run(prompt_tokens=40, steps=1, save_every=1, eval_every=1).config
  run = resolve.resolve(c, resolve.here(c.devices))
  job = Job(run, run.phases[0], run.mesh, run.mesh, fast=False)
  listed = {}
  for one in measured.every(job, lambda lowered: lowered.compile()):
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
  every = {p.name: p for p in measured.every(run, lambda x: x.compile())}
  assert [*every] == [*ORDER[:3], "copy", *ORDER[3:]]

  # No message leaves a process but in the copy and the update.
  def groups(name):
    text = every[name].lowered.compile().as_text()
    return {x.group for x in hlo.Text(text).account().collectives}

  assert max(groups("copy") | groups("gradient")) == 8
  assert max({0}.union(*map(groups, ORDER[3:]))) <= 8 // processes
  # 16 prompts at a time, of 10 tokens each.
  shapes_of = lambda p: shapes(p.lowered.in_avals)
  assert ((16 // processes, 10), "int32") in shapes_of(every["prefill"])
  assert shapes_of(every["gradient"]) == shapes_of(whole["gradient"])
  # A process holds the copy beside its part of the training state.
  copy = size(run.alone.state().params)
  whole_bytes = 4 * run.parameters
  assert copy == whole_bytes if processes == 8 else copy < whole_bytes / 3
  assert every["prefill"].held_bytes >= run.sampling_bytes + copy
