"""Sizes of a run that follow from its machine, and the memory that they need.

They change no result but by rounding, and how long a step takes.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from brorl_jax.config import Config
from brorl_jax.learner import state as states
from brorl_jax.learner import theory
from brorl_jax.learner.packing import MICROBATCHES
from brorl_jax.learner.state import Optimizer
from brorl_jax.many.meshes import Axes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.target import Target
from brorl_jax.plan import memory
from brorl_jax.plan.memory import Gradient, Load, RolloutPlan
from brorl_jax.verdicts.base import MADE

# Rollouts of a device, 4 prompts of 512: while the last rollouts of one decode,
# the rollouts of the next take the slots that they leave.
_AHEAD = 2048


class Machine(NamedTuple):
  """What a run is divided over: this machine, or one that is described."""

  axes: Axes  # of the mesh of all devices
  target: Target  # platform, and the memory of a device
  processes: int = 1  # each samples on its share of the devices
  mesh: Mesh | None = None  # None: the devices are not here


@dataclasses.dataclass(frozen=True)
class Heldout:
  """How held-out prompts are sampled."""

  prompts: int  # at one time, on all devices of a process
  plan: RolloutPlan


@dataclasses.dataclass(frozen=True)
class Plans:
  """What a phase of a run needs of the memory of a device."""

  rollouts: RolloutPlan  # of a process
  heldout: Heldout
  update: Gradient  # of the longest responses
  probe: Gradient | None  # of the theorem's; None: it is not measured
  sampling_bytes: int  # training state while a step is sampled
  applying_bytes: int  # and while an update is applied


def of_phase(
  c: Config,
  policy: Policy,
  tx: Optimizer,
  machine: Machine,
  *,
  keep_reference: bool,
) -> tuple[Config, Plans]:
  """The config with sizes in place of zeros, and its memory plans.

    sampling.in_flight  2,048 for each row of devices, in whole prompts, or as
                        many as a step has, but at least a prompt
    optim.blocks        one for each row of devices
    optim.rows          8, or as few as fit into memory

  Args:
    c: The config of the phase.
    policy: Description of the policy.
    tx: The optimizer.
    machine: What the run is divided over.
    keep_reference: Whether any phase of the run has a reference policy.

  Raises:
    TooLarge: Something does not fit.
    ValueError: Work or policy cannot be divided over these devices.
  """
  axes, memory_bytes = machine.axes, policy.target.memory_bytes
  c = with_in_flight(c, axes)
  blocks = c.optim.blocks or axes.rows
  _check_mesh(c, blocks, axes.rows)
  held, applying = (
    _state_bytes(c, policy, tx, axes, keep_reference, applying=applying)
    for applying in (False, True)
  )
  update = Gradient(
    policy,
    held,
    parameter_bytes(policy, axes),
    prompts=blocks,
    responses=c.optim.rows or 1,
    prompt_tokens=c.data.prompt_tokens,
    tokens=c.sampling.max_new_tokens,
    axes=axes,
    applied=False,
    # Two batches: one is brought while the other is computed.
    microbatches=2 * MICROBATCHES,
  )
  rows = c.optim.rows or memory.update_rows(update, memory_bytes)
  update = dataclasses.replace(update, responses=rows)
  optim = dataclasses.replace(c.optim, rows=rows, blocks=blocks)
  c = dataclasses.replace(c, optim=optim)
  rollouts, heldout = _sampled(c, policy, machine, held)
  memory.check_update(update, memory_bytes)
  probe = None
  if c.theory.prompts:
    probe = dataclasses.replace(
      update,
      resident_bytes=applying,
      prompts=min(c.theory.prompts, c.sampling.prompts),
      responses=theory.RESPONSES,
      tokens=min(theory.TOKENS, c.sampling.max_new_tokens),
      applied=True,
      microbatches=0,
    )
    memory.check_probe(probe, memory_bytes)
  return c, Plans(rollouts, heldout, update, probe, held, applying)


def _sampled(
  c: Config, policy: Policy, machine: Machine, held: int
) -> tuple[RolloutPlan, Heldout]:
  """How a process samples, beside the training state."""
  count, axes = machine.processes, machine.axes.share(machine.processes)
  if count > 1:  # each process samples with a copy of the parameters
    held += parameter_bytes(policy, axes)
  sampled = c.sampling
  load = Load(
    decoder(c, policy),
    held,
    n=sampled.chunk,
    prompts=sampled.places // count,
    prompt_tokens=c.data.prompt_tokens,
    max_new_tokens=sampled.max_new_tokens,
    axes=axes,
    mean_tokens=sampled.mean_tokens,
    streams=True,
  )
  lanes = sampled.chunk_lanes or None
  rollouts = _fitted(c, load, sampled.slots or None, lanes)
  return rollouts, heldout(c, policy, axes, held, count)


def decoder(c: Config, policy: Policy) -> Policy:
  """The policy with the sampler's options."""
  return dataclasses.replace(policy, int8_cache=c.sampling.int8_cache)


def with_in_flight(c: Config, axes: Axes) -> Config:
  """With as many rollouts at one time as the devices are for.

  2,048 for each row of devices, in whole prompts, or as many as a step has, but
  at least a prompt.
  """
  if c.sampling.in_flight:
    return c
  chunk = c.sampling.chunk
  most = max(c.sampling.samples // chunk, 1)  # chunks of a step
  each = max(min(-(-_AHEAD // chunk), most // axes.rows), 1)
  in_flight = axes.rows * each * chunk
  sampling = dataclasses.replace(c.sampling, in_flight=in_flight)
  return dataclasses.replace(c, sampling=sampling)


def _check_mesh(c: Config, blocks: int, rows: int) -> None:
  """Raises ValueError, with what would do, if work does not divide evenly."""
  n, places = c.sampling.chunk, c.sampling.places
  wrong = []
  if places % rows:
    wrong.append(
      f"sampling.in_flight = {c.sampling.in_flight} is {places} prompts of {n} "
      f"rollouts (use a multiple of {rows * n})"
    )
  if blocks % rows:
    wrong.append(f"optim.blocks = {blocks} (use a multiple of {rows})")
  if wrong:
    raise ValueError(
      f"{rows} rows of devices (config.devices.mesh_data x mesh_fsdp) do not "
      f"divide {'; '.join(wrong)}; 0 chooses for the devices there are"
    )


def _fitted(
  c: Config, load: Load, slots: int | None, lanes: int | None = None
) -> RolloutPlan:
  """`memory.rollouts`, whose errors name devices.memory_bytes if it is set."""
  memory_bytes = load.policy.target.memory_bytes
  try:
    return memory.rollouts(load, memory_bytes, slots=slots, lanes=lanes)
  except memory.TooLarge as e:
    if not c.devices.memory_bytes:
      raise
    given = f"config.devices.memory_bytes = {c.devices.memory_bytes}"
    raise memory.TooLarge(f"{given}: {e}") from None


def heldout(
  c: Config, policy: Policy, axes: Axes, held: int, processes: int
) -> Heldout:
  """Held-out prompts at one time: as in training, halved until they fit.

  Those of one process, which has its share of all; `axes` are its own.
  """
  # The tasks of files are unknown before they are read: assume one per file.
  files = c.data.heldout_files or c.data.files
  tasks = len(files)
  if (c.data.puzzles or not files) and c.data.domains[MADE].weight:
    tasks += len(c.data.families)
  prompts, rows = c.eval.prompts * max(tasks, 1), axes.rows
  most = c.sampling.in_flight // processes // c.eval.n // rows
  each = max(min(most, -(-prompts // processes // rows)), 1)
  load = Load(
    decoder(c, policy),
    held,
    n=c.eval.n,
    prompts=each * rows,
    prompt_tokens=c.data.prompt_tokens,
    max_new_tokens=c.sampling.max_new_tokens,
    axes=axes,
    cut=c.eval.top_p < 1.0,
    mean_tokens=c.sampling.mean_tokens,
  )
  slots = min(c.sampling.slots, c.eval.n) or None
  while True:
    load = dataclasses.replace(load, prompts=each * rows)
    try:
      return Heldout(each * rows, _fitted(c, load, slots))
    except memory.TooLarge as e:
      if each == 1:
        raise memory.TooLarge(f"evaluations: {e}") from None
      each = -(-each // 2)


def _state_bytes(
  c: Config,
  policy: Policy,
  tx: Optimizer,
  axes: Axes,
  keep_reference: bool,
  *,
  applying: bool,
) -> int:
  """Bytes per device of the training state while it samples or updates.

  Raises ValueError if the policy cannot be split over these devices.
  """
  # A CPU's memory is the host's.
  away = "nothing" if policy.target.on_cpu else c.devices.offload
  if applying and away == "moments":
    away = "reference"
  _, shapes, places = states.state_places(
    policy.shapes,
    tx,
    axes.abstract,
    keep_reference=keep_reference,
    offload=away,
  )
  leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
  on_device = [(x, s) for x, s in leaves if s.memory_kind != sharding.HOST]
  held = sharding.shard_bytes(
    [x for x, _ in on_device], [s for _, s in on_device]
  )
  if c.run.pipeline:  # the parameters that the next step is sampled with
    held += parameter_bytes(policy, axes)
  return held


def parameter_bytes(policy: Policy, axes: Axes) -> int:
  """Bytes per device of the parameters, or of their gradients."""
  places = sharding.param_shardings(policy.shapes, axes.abstract)
  return sharding.shard_bytes(policy.shapes, places)
