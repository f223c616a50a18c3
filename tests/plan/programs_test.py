"""Tests of brorl_jax/plan/programs.py: a real step runs no other."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import runs_ahead as made
import tiers
from small_policies import changed

from brorl_jax.learner import update
from brorl_jax.main import train as train_command
from brorl_jax.plan import programs, resolve
from brorl_jax.plan.programs import (
  CompileJob,
  every_program,
  size,
  training_spec,
)
from brorl_jax.rollout import prefixes, stream
from brorl_jax.rollout import programs as rollout_programs
from launch.bench.roofline.hlo import Text

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
  every = every_program(run, lambda lowered: lowered.compile())
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


def test_bytes_on_a_device():
  run = made.run()
  split, whole = run.at("fsdp"), run.at()
  # 24 rows on 8 devices; a key is two words.
  key = jax.eval_shape(lambda: jax.random.key(0))
  tree = [split((24, 5), jnp.float32), whole((7,), jnp.int8)]
  assert size(tree) == 3 * 5 * 4 + 7
  assert size([*tree, whole(key.shape, key.dtype)]) == 75


def test_a_run_by_hand():
  run = made.run()
  assert run.rows == 8
  # 16 places on 8 devices: a quarter of 2 is at least one of each.
  assert (
    run.admitted_together == 8
    and made.run(in_flight=512).admitted_together == 32
  )
  layer = 16 * 40 + 24 * 16 + 3 * 16 * 20 + 40 + 2 * 16
  assert run.parameters == 2 * 37 * 16 + 2 * layer + 16


@pytest.mark.parametrize(
  "changes, old, ref",
  [
    (dict(minibatches=1, kl_weight=0.0), False, False),
    (dict(minibatches=2, kl_weight=0.0), True, False),
    (dict(minibatches=1, kl_weight=0.1), False, True),
  ],
)
def test_a_batch_has_the_log_probabilities_that_are_needed(changes, old, ref):
  run = made.run(**changes)
  batch = programs.batch(run, scored=True)
  assert (batch.logp_old is not None, batch.logp_ref is not None) == (old, ref)
  plain = programs.batch(run, scored=False)
  assert plain.logp_old is None and plain.logp_ref is None
  # 8 microbatches of 8 blocks of 4 rows, cut along the blocks.
  assert batch.response.shape == (8, 8, 4, 6)
  assert batch.prompt.sharding.shard_shape(batch.prompt.shape) == (8, 1, 10)


@pytest.mark.parametrize(
  "kl_weight, first", [(0.0, "gradient"), (0.1, "score")]
)
def test_scores_are_known_before_where_they_are_needed(kl_weight, first):
  job = made.run(minibatches=1, kl_weight=kl_weight)
  assert next(programs.updating(job)).name == first


def test_what_lies_beside_each_program():
  """While an update is applied the moments lie on the devices."""
  run = made.run()
  of = {one.name: one.held_bytes for one in programs.updating(run)}
  assert of["gradient"] < 10_000_000 + 2_000_000
  assert 20_000_000 < of["apply"] < 20_000_000 + 2_000_000


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
  copy = size(run.alone.state().params)
  whole_bytes = 4 * run.parameters
  assert copy == whole_bytes if processes == 8 else copy < whole_bytes / 3
  assert every["prefill"].held_bytes >= run.sampling_bytes + copy
