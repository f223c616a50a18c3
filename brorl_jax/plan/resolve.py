"""A config and a machine -> a run: run = resolve(config, here(config.devices)).

All that follows from the two is decided and checked here, once.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from brorl_jax import config
from brorl_jax.config import Config, PhaseConfig
from brorl_jax.config.run import Devices
from brorl_jax.config.sampling import Sampling
from brorl_jax.errors import UserError, as_user_error
from brorl_jax.learner import state as states
from brorl_jax.learner import theory
from brorl_jax.learner.objective import Correction, Objective
from brorl_jax.learner.packing import Layout, most_rows
from brorl_jax.learner.state import Optimizer, Schedule
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import adapters, architectures, huggingface, sharding, spec
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Target
from brorl_jax.model.tokenizer import DATE, Tokenizer, read_template
from brorl_jax.plan import checkpoint_source, memory
from brorl_jax.plan.checkpoint_source import CheckpointSource
from brorl_jax.plan.memory import Gradient, Load, RolloutPlan, TooLarge
from brorl_jax.rl import advantages, losses, lr_scaling
from brorl_jax.rollout import sampler
from brorl_jax.runs import folder
from brorl_jax.verdicts.base import MADE
from brorl_jax.verdicts.own import find

# Rollouts of a device, 4 prompts of 512: while the last rollouts of one decode,
# the rollouts of the next take the slots that they leave.
_AHEAD = 2048
# Chunks of a prompt on a device: with one 64 GPUs make 3 % fewer rollouts in a
# second (simulated). Fewer rollouts would read a prompt for themselves.
_CHUNKS, _LEAST_CHUNK = 2, 32
# Steps' prompts that may be in progress where some will be rejected. On a CPU
# one: what is in progress and not needed takes time from the others.
_SPARE = 2
# Fields that name a function, with the table of the built-in ones.
_TABLES: Mapping[str, Mapping[str, Any]] = {
  "loss.kind": losses.LOSSES,
  "advantage.kind": advantages.ADVANTAGES,
  "filter.keep": advantages.KEEP,
}
# Of loss.correction_range, where it is empty.
_USUAL_RANGE = {
  "truncated": (0.0, 2.0),
  "banded": (0.5, 5.0),
  "sequence": (0.999, 1.002),
}
# Nats: what a token counts at most in the KL term. ProRL v2 states it.
_KL_CLAMP = 10.0


class Machine(NamedTuple):
  """What a run is divided over: this machine, or one that is described."""

  axes: Axes  # of the mesh of all devices
  target: Target  # platform, and the memory of a device
  processes: int = 1  # each samples on its share of the devices
  mesh: Mesh | None = None  # None: the devices are not here


def here(c: Devices) -> Machine:
  """This machine; raises UserError if its devices do not fill the mesh."""
  try:
    mesh = meshes.make_mesh(**c.mesh)
  except ValueError as e:
    raise UserError(f"config.devices: {e}") from None
  return Machine(meshes.of(mesh), spec.here(), jax.process_count(), mesh)


@dataclasses.dataclass(frozen=True)
class Plans:
  """What a phase of a run needs of the memory of a device."""

  rollouts: RolloutPlan  # of a process
  heldout: RolloutPlan  # held-out prompts at one time, of a process
  update: Gradient  # of the longest responses
  sampling_bytes: int  # training state while a step is sampled
  applying_bytes: int  # and while an update is applied

  @property
  def need(self) -> int:
    """Bytes of a device, when most is needed."""
    sampled = max(self.rollouts.total_bytes, self.heldout.total_bytes)
    return max(sampled, self.update.need)


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
class WithPolicy:
  """A config and its policy, on a machine."""

  config: Config  # with a dtype in place of "auto"
  machine: Machine
  source: CheckpointSource
  policy: Policy
  tokenizer: Tokenizer | None  # None: a plan of a directory without one

  @property
  def text(self) -> Tokenizer:
    assert self.tokenizer is not None
    return self.tokenizer

  @property
  def mesh(self) -> Mesh:
    assert self.machine.mesh is not None
    return self.machine.mesh


@dataclasses.dataclass(frozen=True)
class Run(WithPolicy):
  """A training run on a machine."""

  keep_reference: bool  # whether any phase has a KL term
  functions: Mapping[str, Mapping[str, str]]  # the user's own, with digests
  phases: tuple[Phase, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation(WithPolicy):
  """An evaluation of a policy on a machine."""

  heldout: RolloutPlan


@as_user_error(ValueError)
def resolve(
  c: Config,
  machine: Machine,
  workdir: pathlib.Path | None = None,
  *,
  locate: Callable[[str], pathlib.Path] = huggingface.locate,
) -> Run:
  """The training run of a config on a machine, this one or a topology.

  `workdir` is its folder if it may resume there: in the dtype it began with;
  `locate` leads from `policy.checkpoint` to a Hugging Face directory.
  Raises UserError if parts do not fit together, or something not into the
  memory of a device, in one line that names fields and what would do.
  """
  given = [(p, phase_functions(i, p)) for i, p in enumerate(c.phases)]
  # With an adapter the reference is the base.
  keep = any(p.config.reference.kl_weight > 0.0 for p, _ in given)
  keep = keep and not c.policy.lora_rank
  source = CheckpointSource(locate(c.policy.checkpoint))
  this = _with_policy(c, machine, source, workdir)
  at = c.policy.lora_rank, c.policy.lora_alpha, c.policy.lora_layers
  policy = adapters.adapted(this.policy, *at)
  this = dataclasses.replace(this, policy=policy)
  phases = tuple(_phase(p, f, this, keep_reference=keep) for p, f in given)
  own = {field: x for _, f in given for field, x in f.digests.items()}
  return Run(**vars(this), keep_reference=keep, functions=own, phases=phases)


@as_user_error(ValueError)
def evaluation(
  c: Config, machine: Machine, workdir: pathlib.Path
) -> Evaluation:
  """The evaluation of a policy; only its parameters are on the devices.

  `policy.checkpoint` may be a run, or one of its checkpoints. An evaluation in
  `workdir` resumes with the step it began with. Raises UserError as `resolve`.
  """
  source = checkpoint_source.locate(c.policy.checkpoint)
  before = folder.stored(workdir, "evaluated")
  if before and before["run"] == str(source.run) and source.step is None:
    source = source._replace(step=before["step"])
  this = _with_policy(c, machine, source, workdir)
  axes = machine.axes
  c = with_in_flight(this.config, axes, this.config.sampling.chunk)
  _check_lengths(c, this.policy.max_positions)
  held = parameter_bytes(this.policy, axes)
  heldout = _heldout_plan(c, this.policy, axes, held, 1)
  return Evaluation(**vars(this), heldout=heldout)


def _with_policy(
  c: Config,
  machine: Machine,
  source: CheckpointSource,
  begun: pathlib.Path | None,
) -> WithPolicy:
  ran, at = checkpoint_source.ran(source), machine.target
  if c.policy.dtype == "auto":  # that with which the folder, or the run, began
    starts = folder.configs(begun) if begun else []
    before = [config.flat(values).get("policy.dtype") for values in starts[:1]]
    before += [ran and ran.dtype, "float32" if at.on_cpu else "bfloat16"]
    section = dataclasses.replace(c.policy, dtype=next(filter(None, before)))
    c = dataclasses.replace(c, policy=section)
  # What a CPU has available differs at every start. Sizes follow from it, and
  # from sizes the order of sums: a run keeps what it began with.
  kept = folder.stored(begun, "memory_bytes") if begun and at.on_cpu else None
  if given := c.devices.memory_bytes or kept:
    at = dataclasses.replace(at, memory_bytes=given)
  policy = architectures.read_policy(source.source, dtype=c.policy.dtype)
  policy = dataclasses.replace(policy, target=at)
  text = None
  if machine.mesh is not None or (source.source / "tokenizer.json").is_file():
    date = ((begun and folder.stored(begun, "data")) or {}).get(DATE, "")
    given = c.policy.chat_template
    text = checkpoint_source.read_tokenizer(source, given, date)
    checkpoint_source.check_vocabulary(source.source, text, policy)
  elif c.policy.chat_template:
    read_template(c.policy.chat_template)
  return WithPolicy(c, machine._replace(target=at), source, policy, text)


class Functions(NamedTuple):
  """The functions of a phase."""

  objective: Objective
  advantage: advantages.Advantage
  keep: advantages.Rule
  digests: dict[str, dict[str, str]]  # of the user's, by field, with names


def phase_functions(number: int, phase: PhaseConfig) -> Functions:
  """From the tables of rl/, or the user's own; digests of what it changes.

  Raises ValueError if there is no such function, or it is of no use there.
  """
  c, digests = phase.config, {}

  def named(field: str, wrap: Callable[[Any], Any]) -> Any:
    """The function that a field names; `wrap` checks a user's."""
    section, _, last = field.partition(".")
    name, what = getattr(getattr(c, section), last), f"config.{field}"
    value, digest = find(name, _TABLES[field], what=what)
    if digest and (phase.changed is None or field in phase.changed):
      where = field if not number else f"run.phases[{number - 1}]['{field}']"
      digests[where] = {"name": name, "digest": digest}
    if name in _TABLES[field]:
      return value
    try:
      return wrap(value)
    except ValueError as e:
      raise ValueError(f"{what} = {name!r}: {e}") from None

  clip = {name: getattr(c.loss, name) for name in losses.OPTIONS}
  try:
    loss = named("loss.kind", functools.partial(losses.from_user, **clip))
    if c.loss.mean == "constant" and loss.unit == "sequence":
      raise ValueError(
        "config.loss.mean = 'constant' needs a loss per token; loss.kind = "
        f"{c.loss.kind!r} has one value per sequence; choose another mean"
      )
    if c.loss.dual_clip and "dual_clip" not in loss.options:
      raise ValueError(
        f"config.loss.dual_clip = {c.loss.dual_clip:g} must be 0 with "
        f"loss.kind = {c.loss.kind!r}, which does not take it"
      )
    if c.advantage.k:
      advantage = functools.partial(
        advantages.ADVANTAGES["pass_at_k"], k=c.advantage.k
      )
    else:
      advantage = named("advantage.kind", advantages.from_user)
    keep = named("filter.keep", advantages.rule_from_user)
  except ValueError as e:
    raise ValueError(f"{phase.where}{e}") from None
  if c.sampling.rounds:  # prompts get different numbers of rollouts
    whitened = c.advantage.kind in advantages.WHITENED
    advantage = functools.partial(
      advantages.each_prompt_once, advantage, whitened=whitened
    )
  return Functions(_objective(c, loss), advantage, keep, digests)


def _objective(c: Config, loss: losses.PolicyLoss) -> Objective:
  correction = None
  if (kind := c.loss.correction) != "none":
    low, high = map(float, c.loss.correction_range or _USUAL_RANGE[kind])
    correction = Correction(kind, low, high)
  return Objective(
    **{name: getattr(c.loss, name) for name in losses.OPTIONS},
    loss=loss,
    kl_weight=c.reference.kl_weight,
    kl_clamp=_KL_CLAMP,
    entropy_weight=c.loss.entropy_weight,
    correction=correction,
    temperature=c.sampling.temperature,
  )


def refuse_changes(
  before: Mapping[str, Any] | None, now: Mapping[str, Mapping[str, str]]
) -> None:
  """Raises ValueError if the file of a function changed since the run began.

  Another name is a change of the config, which is refused elsewhere.
  """
  for field, function in now.items():
    was = (before or {}).get(field, function)
    if was["name"] == function["name"] and was["digest"] != function["digest"]:
      file = function["name"].rpartition(":")[0]
      raise ValueError(
        f"config.{field} = {function['name']!r}: {file} was changed since this "
        f"run began (digest {was['digest']}, now {function['digest']}); "
        "restore it, choose another workdir, or pass --allow_config_change"
      )


def optimizer(c: Config) -> tuple[Optimizer, Schedule]:
  """AdamW with a warm-up, and the rate of each update."""
  names = ("warmup", "weight_decay", "max_grad_norm")
  how = {name: getattr(c.optim, name) for name in names}
  b1, b2 = c.optim.betas
  return states.adamw(lr=scaled_lr(c), b1=b1, b2=b2, eps=1e-8, **how)


def scaled_lr(c: Config) -> float:
  """The learning rate of a step, for its number of samples."""
  lr, base = c.optim.lr, c.optim.lr_samples
  if not base:
    return lr
  return lr_scaling.sqrt_scaled(
    lr, samples=c.sampling.samples, base_samples=base
  )


def _phase(
  given: PhaseConfig,
  chosen: Functions,
  this: WithPolicy,
  *,
  keep_reference: bool,
) -> Phase:
  policy, machine = this.policy, this.machine
  c = dataclasses.replace(given.config, policy=this.config.policy)
  tx, lr = optimizer(c)
  try:
    _check_lengths(c, policy.max_positions)
    c, plans = sized(c, policy, tx, machine, keep_reference=keep_reference)
  except ValueError as e:
    raise ValueError(f"{given.where}{e}") from None
  trainer = dataclasses.replace(
    policy, remat=c.devices.remat, mesh=machine.mesh
  )
  lean = dataclasses.replace(trainer, remat="layer")  # a probe is small
  o, longest = c.optim, c.sampling.max_new_tokens
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
    Layout(o.rows, o.blocks, longest, c.data.prompt_tokens, machine.axes.rows),
    theory.Mass(lean.response_logp, c.sampling.temperature),
    plans,
  )


def _check_lengths(c: Config, max_positions: int) -> None:
  lengths = {"sampling": c.sampling.max_new_tokens, "eval": c.heldout_tokens}
  name = max(lengths, key=lengths.__getitem__)
  longest = c.data.prompt_tokens + lengths[name]
  if longest > max_positions:
    raise ValueError(
      f"config.data.prompt_tokens + {name}.max_new_tokens = {longest} must "
      f"be at most {max_positions}, the longest input of this checkpoint"
    )


def sized(
  c: Config,
  policy: Policy,
  tx: Optimizer,
  machine: Machine,
  *,
  keep_reference: bool,
) -> tuple[Config, Plans]:
  """The config with sizes in place of zeros, and its memory plans.

    sampling.in_flight  see `with_in_flight` and `with_needed`
    optim.blocks        one for each row of devices; no more than an update has
    optim.rows          8, or fewer, by memory and padding

  `keep_reference` says whether any phase of the run has a reference policy.
  Raises TooLarge, or ValueError if the devices cannot share work or policy.
  """
  axes, memory_bytes = machine.axes, policy.target.memory_bytes
  count, share = machine.processes, axes.share(machine.processes)
  chunk = chunk_of(c.sampling, share.rows)
  wasteful = policy.target.on_cpu or c.filter.keep == "all"
  spare = 1 if wasteful else _SPARE
  c = with_in_flight(c, axes, chunk, spare)
  _check_mesh(c, c.optim.blocks or axes.rows, axes.rows, chunk)
  # While it samples, and while an update is applied. A CPU's memory
  # is the host's.
  away = "nothing" if policy.target.on_cpu else c.devices.offload
  parts = policy.shapes, tx, axes.abstract
  held, applying = (
    _state_bytes(parts, keep_reference=keep_reference, offload=offload)
    for offload in (away, "reference" if away == "moments" else away)
  )
  update = _update_of(c, policy, held, axes)
  sizes = {"rows": update.responses, "blocks": update.prompts}
  c = dataclasses.replace(c, optim=dataclasses.replace(c.optim, **sizes))
  # Each of several processes samples with its own copy of the parameters.
  beside = held + (parameter_bytes(policy, share) if count > 1 else 0)
  evaluated = c  # whose prompts are others
  c = with_needed(c, axes, chunk, spare)
  s = c.sampling
  load = _load(c, policy, share, beside, chunk, s.in_flight // chunk // count)
  fits = memory.rollouts(
    dataclasses.replace(load, streams=True),
    memory_bytes,
    slots=s.slots or None,
    # Chunks that decode together: as many rows as `lanes` prompts have.
    lanes=s.lanes * max(s.slots // chunk, 1) or None,
  )
  memory.check_update(update, memory_bytes)
  heldout = _heldout_plan(evaluated, policy, share, beside, count)
  return c, Plans(fits, heldout, update, held, applying)


def _update_of(c: Config, policy: Policy, held: int, axes: Axes) -> Gradient:
  """With `blocks` and `rows` in place of zeros."""
  blocks = c.optim.blocks or axes.rows
  update = Gradient(
    policy,
    held,
    parameter_bytes(policy, axes, trained=True),
    prompts=blocks,
    responses=c.optim.rows or 1,
    prompt_tokens=c.data.prompt_tokens,
    tokens=c.sampling.max_new_tokens,
    axes=axes,
  )
  each = -(-c.sampling.prompts // c.optim.minibatches)  # prompts of an update
  rows = c.optim.rows or min(
    memory.update_rows(update, policy.target.memory_bytes),
    most_rows(
      -(-each * c.sampling.n // axes.rows), update.prompt_tokens, update.tokens
    ),
  )
  most = each * -(-c.sampling.n // rows)
  blocks = min(blocks, -(-most // axes.rows) * axes.rows)
  return dataclasses.replace(update, responses=rows, prompts=blocks)


def chunk_of(s: Sampling, rows: int) -> int:
  """Rollouts of a prompt that share a place: those of the first round are cut
  into chunks for all rows of devices of a process, so that no device has the
  longest of all prompts.
  """
  n, least = s.chunk, min(s.chunk, _LEAST_CHUNK)
  most = _CHUNKS * rows if rows > 1 else 1
  return min(n // k for k in range(1, most + 1) if n % k == 0 <= n // k - least)


def with_in_flight(c: Config, axes: Axes, chunk: int, spare: int = 1) -> Config:
  """With `in_flight`: 2,048 rollouts for each row of devices, in whole chunks,
  or as many as `spare` steps have, but at least a chunk.
  """
  if c.sampling.in_flight:
    return c
  most = max(spare * c.sampling.samples // chunk, 1)
  each = max(min(-(-_AHEAD // chunk), most // axes.rows), 1)
  in_flight = axes.rows * each * chunk
  sampling = dataclasses.replace(c.sampling, in_flight=in_flight)
  return dataclasses.replace(c, sampling=sampling)


def with_needed(c: Config, axes: Axes, chunk: int, spare: int) -> Config:
  """With no more in flight than the prompts of `spare` steps need, in whole
  rows. If it is 1, another prompt is drawn only after one was rejected, so that
  never more are open, each with at most the rollouts of its largest round.
  """
  s = c.sampling
  rounds = itertools.pairwise((0, *(s.rounds or (s.n,))))
  most = spare * s.prompts * max(b - a for a, b in rounds) // chunk
  needed = -(-most // axes.rows) * axes.rows * chunk
  in_flight = min(s.in_flight, needed)
  return dataclasses.replace(
    c, sampling=dataclasses.replace(s, in_flight=in_flight)
  )


def _check_mesh(c: Config, blocks: int, rows: int, chunk: int) -> None:
  wrong = []
  if c.sampling.in_flight % (rows * chunk):
    wrong.append(
      f"sampling.in_flight = {c.sampling.in_flight} must be a multiple of "
      f"{rows * chunk}, {chunk} rollouts of a prompt for each group"
    )
  if blocks % rows:
    wrong.append(f"optim.blocks = {blocks} must be a multiple of {rows}")
  if wrong:
    raise ValueError(
      f"{rows} groups of devices (config.devices.mesh_data x mesh_fsdp) share "
      f"the work equally: {'; '.join(wrong)}; 0 chooses a size that does"
    )


def _load(
  c: Config, policy: Policy, axes: Axes, held: int, n: int, prompts: int
) -> Load:
  return Load(
    dataclasses.replace(policy, int8_cache=c.sampling.int8_cache),
    held,
    n=n,
    prompts=prompts,
    prompt_tokens=c.data.prompt_tokens,
    max_new_tokens=c.sampling.max_new_tokens,
    axes=axes,
    mean_tokens=c.sampling.mean_tokens,
  )


def _heldout_plan(
  c: Config, policy: Policy, axes: Axes, held: int, processes: int
) -> RolloutPlan:
  """Held-out prompts at one time: as in training, halved until they fit.

  `axes` are those of one process, `held` bytes are on a device anyway.
  """
  # The tasks of files are unknown before they are read: assume one per file.
  files = c.data.heldout_files or c.data.files
  tasks = len(files)
  if (c.data.puzzles or not files) and c.data.domains[MADE].weight:
    tasks += len(c.data.families)
  prompts, rows = c.eval.prompts * max(tasks, 1), axes.rows
  most = c.sampling.in_flight // processes // c.eval.n // rows
  each = max(min(most, -(-prompts // processes // rows) or most), 1)
  while True:
    load = _load(c, policy, axes, held, c.eval.n, each * rows)
    load = dataclasses.replace(
      load, cut=c.eval.top_p < 1.0, max_new_tokens=c.heldout_tokens
    )
    slots, lanes = c.sampling.slots or None, None
    if each > 1 and not policy.pool_columns:  # one prompt: as many as fit
      lanes, few = sampler.lanes_and_slots(load.here, load.n)
      slots, lanes = min(slots or few, few), lanes * rows
    try:
      return memory.rollouts(
        load, policy.target.memory_bytes, slots=slots, lanes=lanes
      )
    except TooLarge as e:
      if each == 1:
        raise TooLarge(f"evaluations: {e}") from None
      each = -(-each // 2)


def _state_bytes(parts: tuple, **how: Any) -> int:
  """Bytes per device of a training state; arguments as of `state_places`."""
  _, shapes, places = states.state_places(*parts, **how)
  leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
  ours = [(x, s) for x, s in leaves if s.memory_kind != sharding.HOST]
  return sharding.shard_bytes([x for x, _ in ours], [s for _, s in ours])


def parameter_bytes(
  policy: Policy, axes: Axes, *, trained: bool = False
) -> int:
  """Bytes per device of the parameters, or of the gradients of what is trained
  of them.
  """
  shapes = adapters.split(policy.shapes)[0] if trained else policy.shapes
  places = sharding.param_shardings(shapes, axes.abstract)
  return sharding.shard_bytes(shapes, places)
