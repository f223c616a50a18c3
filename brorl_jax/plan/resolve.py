"""A config and a machine -> a run, with all that follows from the two.

    run = resolve(config, here(config.devices))

The dtype, sizes that are 0 in the config, memory plans, the optimizer, the loss
and the user's own functions are decided and checked here, once and before
anything is compiled. Whoever receives a `Run` asks neither the config nor the
machine again.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from brorl_jax import config
from brorl_jax.config import Config, Warmup
from brorl_jax.config.run import Meshed
from brorl_jax.errors import UserError
from brorl_jax.learner import theory
from brorl_jax.learner.objective import Objective
from brorl_jax.learner.packing import Layout
from brorl_jax.learner.state import Optimizer, Schedule
from brorl_jax.many import meshes
from brorl_jax.model import architectures, huggingface, target, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.target import Target
from brorl_jax.model.tokenizer import Tokenizer
from brorl_jax.plan import checkpoint_source, functions, sizes
from brorl_jax.plan.checkpoint_source import CheckpointSource
from brorl_jax.plan.functions import Functions
from brorl_jax.plan.sizes import Heldout, Machine, Plans
from brorl_jax.rl import advantages
from brorl_jax.runs import folder

C = TypeVar("C", Config, Warmup)


def here(c: Meshed) -> Machine:
  """This machine; raises UserError if its devices do not fill the mesh."""
  try:
    mesh = meshes.make_mesh(**c.mesh)
  except ValueError as e:
    raise UserError(f"config.devices: {e}") from None
  return Machine(meshes.of(mesh), target.here(), jax.process_count(), mesh)


@dataclasses.dataclass(frozen=True)
class Phase:
  """Consecutive steps of a run that have everything in common."""

  since: int  # first step
  changed: Mapping[str, Any] | None  # fields; None for the first phase
  config: Config  # with sizes in place of zeros
  trainer: Policy  # with the options of updates
  objective: Objective
  advantage: advantages.Advantage
  keep: Callable[[np.ndarray, np.ndarray], jax.Array]  # compiled
  tx: Optimizer
  lr: Schedule  # learning rate of each update
  layout: Layout  # of an update's batches
  mass: theory.Mass  # of correct responses
  memory: Plans


@dataclasses.dataclass(frozen=True)
class WithPolicy(Generic[C]):
  """A config and its policy, on a machine."""

  config: C  # with a dtype in place of "auto"
  machine: Machine
  source: CheckpointSource
  policy: Policy
  tokenizer: Tokenizer | None  # None: a plan of a directory without one

  @property
  def text(self) -> Tokenizer:
    """The tokenizer, which there must be."""
    assert self.tokenizer is not None
    return self.tokenizer

  @property
  def mesh(self) -> Mesh:
    """Of all devices, which must be here."""
    assert self.machine.mesh is not None
    return self.machine.mesh


@dataclasses.dataclass(frozen=True)
class Run(WithPolicy[Config]):
  """A training run on a machine."""

  keep_reference: bool  # whether any phase has a KL term
  functions: Mapping[str, Mapping[str, str]]  # the user's own, with digests
  phases: tuple[Phase, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation(WithPolicy[Config]):
  """An evaluation of a policy on a machine."""

  heldout: Heldout


def resolve(
  c: Config,
  machine: Machine,
  workdir: pathlib.Path | None = None,
  *,
  locate: Callable[[str], pathlib.Path] = huggingface.locate,
) -> Run:
  """The training run of a config on a machine.

  Args:
    c: The config, whose sections were checked together (`settings.training`).
    machine: This one, or a topology.
    workdir: Folder of the run if it may resume there: in the dtype it began
      with.
    locate: From `policy.checkpoint` to a Hugging Face directory.

  Raises:
    UserError: Parts do not fit together, or something not into the memory of a
      device; in one line that names fields and what would do.
  """
  try:
    given = [*zip(c.phases, functions.phase_functions(c.phases), strict=True)]
    keep = any(p.config.reference.kl_weight > 0.0 for p, _ in given)
    began = _dtype_of(c, workdir)
    source = CheckpointSource(locate(c.policy.checkpoint))
    this = _with_policy(c, machine, source, began)
    phases = tuple(_phase(p, f, this, keep_reference=keep) for p, f in given)
  except ValueError as e:
    raise UserError(str(e)) from None
  own = {field: x for _, f in given for field, x in f.digests.items()}
  return Run(**vars(this), keep_reference=keep, functions=own, phases=phases)


def evaluation(
  c: Config, machine: Machine, workdir: pathlib.Path
) -> Evaluation:
  """The evaluation of a policy; only its parameters are on the devices.

  Args:
    c: The config; `policy.checkpoint` may be a run, or one of its checkpoints.
    machine: This one.
    workdir: Folder of the evaluation, which may resume there: with the step
      that it began with.

  Raises:
    UserError: As `resolve`.
  """
  try:
    began = _dtype_of(c, workdir)
    source = checkpoint_source.locate(c.policy.checkpoint)
    before = folder.stored(workdir, "evaluated")
    if before and before["run"] == str(source.run) and source.step is None:
      source = source._replace(step=before["step"])
    if began is None and (ran := checkpoint_source.ran(source)) is not None:
      began = ran.dtype
    this = _with_policy(c, machine, source, began)
    c, axes = sizes.with_in_flight(this.config, machine.axes), machine.axes
    _check_lengths(c, this.policy.max_positions)
    held = sizes.parameter_bytes(this.policy, axes)
    heldout = sizes.heldout(c, this.policy, axes, held, 1)
  except ValueError as e:
    raise UserError(str(e)) from None
  return Evaluation(**vars(this), heldout=heldout)


def warmup(c: Warmup, machine: Machine) -> WithPolicy[Warmup]:
  """The supervised training of a policy; raises UserError as `resolve`."""
  rows = machine.axes.rows
  try:
    if c.optim.rows % rows:
      raise ValueError(
        f"config.optim.rows = {c.optim.rows} does not divide over {rows} rows "
        "of devices (config.devices.mesh_data x mesh_fsdp); use a multiple"
      )
    source = CheckpointSource(huggingface.locate(c.policy.checkpoint))
    this = _with_policy(c, machine, source, None)
    if c.optim.row_tokens > this.policy.max_positions:
      raise ValueError(
        f"config.optim.row_tokens = {c.optim.row_tokens} must be at most "
        f"{this.policy.max_positions}, the longest input of this checkpoint"
      )
  except ValueError as e:
    raise UserError(str(e)) from None
  return this


def with_dtype(c: C, machine: Target, began: str | None = None) -> C:
  """The config with a dtype in place of "auto".

  That of the run which is resumed or evaluated, `began`; of a new one float32
  on a CPU and bfloat16 elsewhere.
  """
  if c.policy.dtype != "auto":
    return c
  dtype = began or ("float32" if machine.on_cpu else "bfloat16")
  policy = dataclasses.replace(c.policy, dtype=dtype)
  return dataclasses.replace(c, policy=policy)


def _dtype_of(c: Config, workdir: pathlib.Path | None) -> str | None:
  """Where the config leaves it open the dtype with which a folder began."""
  if workdir is None or c.policy.dtype != "auto":
    return None
  starts = folder.configs(workdir)
  began = config.flat(starts[0]).get("policy.dtype") if starts else None
  try:
    return began and dataclasses.replace(c.policy, dtype=began).dtype
  except config.Wrong as e:
    raise ValueError(f"{workdir / 'config.json'}: policy.{e}") from None


def _with_policy(
  c: C, machine: Machine, source: CheckpointSource, began: str | None
) -> WithPolicy[C]:
  """The policy of a config, for a machine, with its tokenizer."""
  c = with_dtype(c, machine.target, began)
  at = machine.target
  if isinstance(c, Config) and (given := c.devices.memory_bytes):
    at = dataclasses.replace(at, memory_bytes=given)
  policy = architectures.read_policy(source.source, dtype=c.policy.dtype)
  policy = dataclasses.replace(policy, target=at)
  text = None
  if machine.mesh is not None or (source.source / "tokenizer.json").is_file():
    text = checkpoint_source.read_tokenizer(source, c.policy.chat_template)
    checkpoint_source.check_vocabulary(source.source, text, policy)
  elif c.policy.chat_template:
    tokenizer.read_template(c.policy.chat_template)
  return WithPolicy(c, machine._replace(target=at), source, policy, text)


def _phase(
  given: config.PhaseConfig,
  chosen: Functions,
  this: WithPolicy[Config],
  *,
  keep_reference: bool,
) -> Phase:
  """A phase with its functions, its sizes and its memory plans."""
  policy, machine = this.policy, this.machine
  c = dataclasses.replace(given.config, policy=this.config.policy)
  tx, lr = functions.optimizer(c)
  try:
    _check_lengths(c, policy.max_positions)
    c, memory = sizes.of_phase(
      c, policy, tx, machine, keep_reference=keep_reference
    )
  except ValueError as e:
    raise ValueError(f"{given.where}{e}") from None
  trainer = dataclasses.replace(
    policy, remat=c.devices.remat, mesh=machine.mesh
  )
  lean = dataclasses.replace(trainer, remat="layer")  # a probe is small
  return Phase(
    given.since,
    given.changed,
    c,
    trainer,
    chosen.objective,
    chosen.advantage,
    jax.jit(chosen.keep),
    tx,
    lr,
    Layout(
      c.optim.rows,
      c.optim.blocks,
      c.sampling.max_new_tokens,
      c.data.prompt_tokens,
      machine.axes.rows,
    ),
    theory.Mass(lean.response_logp, c.sampling.temperature),
    memory,
  )


def _check_lengths(c: Config, max_positions: int) -> None:
  """Raises ValueError if a rollout may be longer than the policy allows."""
  longest = c.data.prompt_tokens + c.sampling.max_new_tokens
  if longest > max_positions:
    raise ValueError(
      f"config.data.prompt_tokens + sampling.max_new_tokens = {longest} must "
      f"be at most {max_positions}, the longest input of this checkpoint"
    )
