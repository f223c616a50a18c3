"""--mode=plan: fits rollouts and evaluations into memory, or refuses them."""

import pathlib

from brorl_jax.config import Config
from brorl_jax.config.run import Devices
from brorl_jax.errors import UserError, as_user_error
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import huggingface, spec
from brorl_jax.model.spec import Target
from brorl_jax.plan import memory, programs, resolve, step_time, topology
from brorl_jax.plan.programs import CompileJob
from brorl_jax.plan.resolve import Machine, Phase, Run
from brorl_jax.plan.step_time import Case
from brorl_jax.plan.topology import Topology
from brorl_jax.stages import examples, sampling
from brorl_jax.verdicts import own

# The config.json of the language models that presets name.
_ARCHITECTURES = pathlib.Path(__file__).parents[1] / "plan" / "architectures"
_USUAL = "h100:1x8"  # without accelerators, for presets that are meant for them


@as_user_error(ValueError)
def run(
  this: Run,
  where: Topology | None = None,
  mean_tokens: float | None = None,
  pass_rate: float = 0.62,
  *,
  fast: bool = False,
) -> None:
  """Prints the plan of a run, of which no weights were loaded. With a topology
  all programs are compiled for it, if `fast` with two and three layers, and
  the seconds of a step with this mean length and share of kept prompts follow.
  """
  c, judges = this.config, this.config.reward.verifier
  if judges:
    own.Rewards(judges, workers=1).close()  # imports them
  for phase in this.phases:
    _show(this, phase)
    if where is not None and where.name.kind in topology.CHIPS:
      s = phase.config.sampling
      mean = mean_tokens or s.mean_tokens or s.max_new_tokens / 2
      _show_time(this, phase, where, step_time.Case(mean, pass_rate))
  examples.check_data(c.data, own=bool(judges))
  if c.data.files and this.tokenizer is not None:
    read = examples.Examples(c, this.text)
    read.heldout()
    longest = f"longest prompt {read.longest} of {c.data.prompt_tokens} tokens"
    print(*read.log_lines, longest, sep="\n")
  elif c.data.files:
    train, held = examples.read_files(c.data, own=bool(judges))
    print(
      f"files: {len(train.examples)} examples, held out {len(held.examples)}; "
      f"the length of their prompts is unknown: {this.source.source} has no "
      "tokenizer.json"
    )
  if where is not None and where.devices:
    mesh = where.mesh(this.machine.axes)
    one = meshes.part(mesh, where.processes)
    programs.show(CompileJob(this, this.phases[0], mesh, one, fast=fast), where)


@as_user_error(ValueError)
def assumed(c: Config, where: Topology | None) -> Topology | None:
  """`where`; without accelerators _USUAL for a language model in bfloat16."""
  # Of the presets those for accelerators name such a model.
  large = c.policy.dtype == "bfloat16"
  large &= c.policy.checkpoint not in huggingface.EMBEDDED
  given = where is not None or c.devices.memory_bytes
  if not large or given or not spec.here().on_cpu:
    return where
  print(f"no accelerator here: planned for {_USUAL}; --topology= is another")
  return topology.assumed(topology.parse(_USUAL))


@as_user_error(ValueError)
def resolved(c: Config, where: Topology | None = None) -> Run:
  """The run of a config on this machine or a topology, for a plan.

  If `devices.mesh_fsdp` and `devices.memory_bytes` are given, this may be for
  more devices than this machine has; it then assumes accelerators.
  """
  try:
    return resolve.resolve(c, machine(c.devices, where), locate=locate)
  except UserError:
    if c.data.files:  # what is wrong with them is told first
      examples.read_files(c.data, own=bool(c.reward.verifier))
    raise


@as_user_error(ValueError)
def machine(c: Devices, where: Topology | None) -> Machine:
  """This machine, or a topology, or as many accelerators as the mesh has.

  Raises UserError if the mesh does not fit, or their memory is unknown.
  """
  there = spec.here() if where is None else where.target
  axes = Axes(**c.mesh).filled(there.devices)
  if where is not None and axes.devices != there.devices:
    raise UserError(
      f"config.devices: mesh ({axes}) does not fill the {there.devices} "
      f"devices of --topology={where.name}; leave mesh_fsdp at -1, or name a "
      f"machine of {axes.devices}"
    )
  count = 1 if where is None else where.processes
  axes.share(count)
  if axes.devices > there.devices:
    if not c.memory_bytes:
      raise UserError(
        "config.devices.memory_bytes = 0 asks the devices, but only "
        f"{there.devices} of {axes.devices} are here; set it to their memory"
      )
    there = Target("gpu", axes.devices, c.memory_bytes)
  return Machine(axes, there, count)


def _show(this: Run, phase: Phase) -> None:
  c, plans, axes = phase.config, phase.memory, this.machine.axes
  when = f" from step {phase.since}" if this.config.run.phases else ""
  kind = "CPU devices" if this.policy.target.on_cpu else "accelerators"
  count = this.machine.processes
  many = f" of {count} processes" if count > 1 else ""
  if (idle := count - c.sampling.prompts) > 0:
    few = f"need no prompt if all are kept: a step has {c.sampling.prompts}"
    print(f"{idle} of {count} processes {few}")
  form, shared = sampling.form(phase), ""
  if form != plans.rollouts.line():
    shared = f"{form}, which needs less than these slots:\n"
  print(
    f"rollouts{when}: {plans.rollouts.load.prompts * count} prompts x "
    f"{plans.rollouts.load.n}, at most {c.sampling.max_new_tokens} tokens, "
    f"on {axes.rows} x {axes.within} {kind}{many}\n"
    f"{shared}{plans.rollouts.table()}\n"
    f"evaluations: {plans.heldout.load.prompts} prompts x {c.eval.n}\n"
    f"{plans.heldout.table()}"
  )
  update = plans.update
  print(
    f"an update, {update.prompts} blocks x {update.responses} rows",
    *memory.shares(update.parts, this.policy.target.memory_bytes),
    sep="\n",
  )


def _show_time(this: Run, phase: Phase, where: Topology, case: Case) -> None:
  chip = topology.CHIPS[where.name.kind]
  t = step_time.step_time(this, phase, chip, case)
  rows = {
    "rollouts": f"{t.drawn:,}, {t.drawn / t.rollouts:.1f} per second; "
    f"{t.busy:.0%} of slots are busy, {t.surplus:,} more are begun",
    "exchange": "between processes",
    "scores": "of the old policy and the reference",
    "update": f"{t.padding:.0%} of the positions are padding",
  }
  total = sum(getattr(t, name) for name in rows)
  print(
    f"a step on {where.name} takes {total:,.0f} s by simulation, if "
    f"{case.pass_rate:.0%} of the prompts are kept and responses have "
    f"{case.mean_tokens:,.0f} tokens",
    *(f"  {k:9} {getattr(t, k):7,.0f} s  {v}" for k, v in rows.items()),
    sep="\n",
  )


def locate(checkpoint: str) -> pathlib.Path:
  """The directory of config.json; unlike `huggingface.locate`, no download."""
  try:
    return huggingface.locate(checkpoint, plan=True)
  except ValueError:
    # The presets' own can be planned before they are downloaded.
    named = huggingface.HUB.fullmatch(checkpoint)
    if named and (known := _ARCHITECTURES / named[2]).is_dir():
      return known
    raise
