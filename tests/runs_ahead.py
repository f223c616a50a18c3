"""A small run whose programs are compiled ahead, for tests; no test file."""

import dataclasses
from typing import Any

import jax
from one_step import config
from small_policies import TINY

from brorl_jax.config import PhaseConfig
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import huggingface
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Target
from brorl_jax.plan import resolve
from brorl_jax.plan.checkpoint_source import CheckpointSource
from brorl_jax.plan.memory import Load, RolloutPlan
from brorl_jax.plan.programs import CompileJob, Needs
from brorl_jax.plan.resolve import Machine
from brorl_jax.plan.topology import Name, Topology

POOL = 1000 * 2**20  # bytes of a device that XLA may use


def topology(processes: int = 1) -> Topology:
  """The eight devices of the tests, as those of so many processes."""
  target = Target("cpu", 8, POOL)
  return Topology(
    Name("cpu", (processes, 8 // processes)), jax.devices(), target
  )


def run(policy: Policy = TINY, *, fast: bool = False,
  processes: int = 1, **fields: Any) -> CompileJob:  # fmt: skip
  """24 prompts x 4 rollouts of 6 tokens, 16 prompts at a time, on 8 devices."""
  small = dict(
    n=4, samples=96, in_flight=64, prompt_tokens=10, max_new_tokens=6,
    rows=4, blocks=8, eval_n=2, eval_prompts=8, theory_prompts=0,
  )  # fmt: skip
  c, where = config(**small | fields), topology()
  machine = Machine(axes := Axes(fsdp=8), where.target, processes)
  policy = dataclasses.replace(policy, target=where.target)
  source = CheckpointSource(huggingface.ASSETS)
  this = resolve.WithPolicy(c, machine, source, policy, None)
  given = resolve.phase_functions(0, PhaseConfig(1, c, None))
  phase = resolve._phase(
    PhaseConfig(1, c, None), given, this, keep_reference=True
  )
  load = Load(
    policy, 0, n=4, prompts=64, prompt_tokens=10, max_new_tokens=6, axes=axes
  )
  memory = dataclasses.replace(
    phase.memory, rollouts=RolloutPlan(load, 3, 16, POOL),
    heldout=RolloutPlan(dataclasses.replace(load, prompts=8), 2, 16, POOL),
    sampling_bytes=10_000_000, applying_bytes=20_000_000,
  )  # fmt: skip
  phase = dataclasses.replace(phase, memory=memory)
  whole = resolve.Run(
    **vars(this), keep_reference=True, functions={}, phases=(phase,)
  )
  mesh = where.mesh(axes)
  return CompileJob(whole, phase, mesh, meshes.part(mesh, processes), fast)


def needs(name: str, **fields: int) -> Needs:
  """A program of 5 MiB."""
  known = dict(held_bytes=2 * 2**20, temp_bytes=2**20, new_bytes=2 * 2**20)
  return Needs(name, **known | fields)
