"""--mode=plan: fits rollouts and evaluations into memory, or refuses them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from brorl_jax import config, meshes
from brorl_jax.config import Config
from brorl_jax.config.run import Devices
from brorl_jax.errors import UserError
from brorl_jax.learner import theory
from brorl_jax.main import (
  checkpoint_source,
  corpus,
  functions,
  settings,
  sizes,
)
from brorl_jax.main.ahead import report
from brorl_jax.main.ahead import topology as topology_of
from brorl_jax.main.ahead.run import Run
from brorl_jax.main.stages import examples, learning, sampling
from brorl_jax.meshes import Axes
from brorl_jax.model import (
  architectures,
  huggingface,
  target,
  tokenizer,
)
from brorl_jax.model.policy import Policy
from brorl_jax.model.target import Target
from brorl_jax.rollout import memory, plan
from brorl_jax.tasks import own
from brorl_jax.tasks.names import MADE

# The config.json of the language models that presets name.
_ARCHITECTURES = pathlib.Path(__file__).parents[1] / "ahead" / "architectures"


@dataclasses.dataclass(frozen=True)
class Plans:
  """Memory plans of rollouts, evaluations, updates and the theorem's probe."""

  rollouts: plan.RolloutPlan
  evaluations: plan.RolloutPlan
  chunk: int  # held-out prompts that are sampled together
  update: memory.Gradient  # of the longest responses
  probe: memory.Gradient | None  # None: the theorem is not measured


def run(c: Config, topology: str | None = None, *, fast: bool = False) -> None:
  """Prints the plan of a run; loads no weights.

  Without a topology the memory of rollouts and evaluations by arithmetic. If
  `devices.mesh_fsdp` and `devices.memory_bytes` are given, this may be for more
  devices than this machine has; it then assumes accelerators.

  Args:
    c: The config.
    topology: Devices for which all programs are compiled too.
    fast: Whether two and three layers stand for all.
  """
  settings.check_training(c)
  if fast and topology is None:
    raise UserError("--fast is for --topology=; leave it out")
  try:
    functions.digests(settings.phases(c))
    if c.reward.verifier:
      own.Rewards(c.reward.verifier, workers=1).close()  # imports them
    source = _source(c.policy.checkpoint)
    where = None if topology is None else _described(topology, fast)
    axes, machine = _devices(c.devices, where)
    c = sizes.with_dtype(c, machine)
    policy = architectures.read_policy(source, dtype=c.policy.dtype)
    policy = dataclasses.replace(policy, target=machine)
    how: dict[str, Any] = dict(axes=axes)
    how["keep_reference"] = learning.keeps_reference(c)
    count = 1 if where is None else where.processes
    axes.share(count)  # or it is refused here
    phases = [
      _phase(x, c, policy, **how, processes=count) for x in settings.phases(c)
    ]
    corpus.check(c.data, own=bool(c.reward.verifier))
    if c.policy.chat_template:
      tokenizer.read_template(c.policy.chat_template)
    if c.data.files:
      print(*_data(c, source), sep="\n")
    if where is not None:
      first, plans = phases[0]
      _compiled(first, plans, policy, where, **how, fast=fast)
  except ValueError as e:
    raise UserError(str(e)) from None


def _described(text: str, fast: bool) -> topology_of.Topology:
  name = topology_of.parse(text)
  topology_of.prepare(name, fast=fast)
  return topology_of.describe(name)


def _devices(
  c: Devices, where: topology_of.Topology | None
) -> tuple[Axes, Target]:
  """The mesh and the machine."""
  machine = target.here() if where is None else where.target
  if c.memory_bytes:
    machine = dataclasses.replace(machine, memory_bytes=c.memory_bytes)
  axes = Axes(**c.mesh).filled(machine.devices)
  if where is not None and axes.devices != machine.devices:
    raise UserError(
      f"config.devices: mesh ({axes}) does not fill the {machine.devices} "
      f"devices of --topology={where.name}; leave mesh_fsdp at -1"
    )
  if axes.devices <= machine.devices:
    return axes, machine
  if not c.memory_bytes:
    raise UserError(
      "config.devices.memory_bytes = 0 asks the devices, but only "
      f"{machine.devices} of {axes.devices} are here; set it to the memory "
      "of one device"
    )
  return axes, Target("gpu", axes.devices, c.memory_bytes)


def _phase(
  which: config.Phase,
  c: Config,
  policy: Policy,
  *,
  axes: Axes,
  keep_reference: bool,
  processes: int,
) -> tuple[Config, Plans]:
  """Prints the memory plans of a phase of the run; it, with its sizes."""
  since, phase, _ = which
  how: dict[str, Any] = dict(axes=axes, keep_reference=keep_reference)
  phase = sizes.settled(phase, policy, **how)
  settings.check_mesh(phase, axes.rows)
  settings.check_lengths(phase, policy.max_positions)
  plans = make(phase, policy, **how, processes=processes)
  when = f" from step {since}" if c.run.phases else ""
  kind = "CPU devices" if policy.target.on_cpu else "accelerators"
  many = f" of {processes} processes" if processes > 1 else ""
  form, shared = sampling.form(phase.sampling, policy, plans.rollouts), ""
  if form != plans.rollouts.line():
    shared = f"{form}, which needs less than these slots:\n"
  print(
    f"rollouts{when}: {phase.sampling.places} prompts x "
    f"{phase.sampling.chunk}, at most {phase.sampling.max_new_tokens} tokens, "
    f"on {axes.rows} x {axes.within} {kind}{many}\n"
    f"{shared}{plans.rollouts.table()}\n"
    f"evaluations: {plans.chunk} prompts x {phase.eval.n}\n"
    f"{plans.evaluations.table()}"
  )
  of = functools.partial(plan.shares, memory_bytes=policy.target.memory_bytes)
  print(
    f"an update, {plans.update.prompts} blocks x {plans.update.responses} rows",
    *of(plans.update.parts),
    sep="\n",
  )
  if plans.probe is not None:
    parts = of(plans.probe.parts)
    print("an update, measuring the theorem", *parts, sep="\n")
  return phase, plans


def _compiled(
  c: Config,
  plans: Plans,
  policy: Policy,
  where: topology_of.Topology,
  *,
  axes: Axes,
  keep_reference: bool,
  fast: bool,
) -> None:
  """Compiles the programs of a phase and prints what they need.

  Raises:
    TooLarge: One does not fit.
  """
  held = functools.partial(
    sizes.resident_bytes,
    c,
    policy,
    axes=axes,
    keep_reference=keep_reference,
  )
  mesh = where.mesh(axes)
  run = Run(
    c,
    policy,
    mesh,
    meshes.part(mesh, where.processes),
    plans.rollouts,
    plans.evaluations,
    plans.chunk,
    keep_reference=keep_reference,
    sampling_bytes=held(),
    applying_bytes=held(applying=True),
    fast=fast,
  )
  report.show(run, where)


def _data(c: Config, source: pathlib.Path) -> list[str]:
  """Lines about the files; raises ValueError if they cannot be used."""
  if not (source / "tokenizer.json").is_file():
    train, held = corpus.read(c.data, own=bool(c.reward.verifier))
    return [
      f"files: {len(train.examples)} examples, held out {len(held.examples)}; "
      f"the length of their prompts is unknown: {source} has no tokenizer.json"
    ]
  which = checkpoint_source.CheckpointSource(source)
  text = checkpoint_source.read_tokenizer(which, c.policy.chat_template)
  read = examples.Examples.of(c, text)
  read.heldout()
  longest = f"longest prompt {read.longest} of {c.data.prompt_tokens} tokens"
  return [*read.log_lines, longest]


def _source(checkpoint: str) -> pathlib.Path:
  """The directory of config.json; unlike `huggingface.locate`, no download."""
  path = pathlib.Path(checkpoint)
  if path.exists() or path.is_absolute() or len(path.parts) != 2:
    return huggingface.locate(checkpoint)
  # The presets' own, which can so be planned before they are downloaded.
  known = _ARCHITECTURES / path.name
  if known.is_dir():
    return known
  raise ValueError(
    f"config.policy.checkpoint = {checkpoint!r} is not a directory on this "
    f"machine; a plan needs only its config.json: run 'hf download "
    f"{checkpoint} config.json --local-dir {path.name}', then use "
    f"--config.policy.checkpoint={path.name}"
  )


def make(
  c: Config,
  policy: Policy,
  *,
  axes: Axes,
  keep_reference: bool,
  processes: int = 1,
) -> Plans:
  """Plans of a phase.

  Args:
    c: The config.
    policy: Description of the policy.
    axes: Of the mesh.
    keep_reference: Whether any phase of the run has a reference policy.
    processes: Over which the devices are divided. Each has all parameters, and
      samples its share of what is in flight.

  Raises:
    TooLarge: Something does not fit.
    ValueError: The policy cannot be split over these devices.
  """
  how: dict[str, Any] = dict(axes=axes, keep_reference=keep_reference)
  state = functools.partial(sizes.resident_bytes, c, policy, **how)
  own, held = axes.share(processes), state()
  if processes > 1:
    held += sizes.parameter_bytes(policy, own)
  fit = _fit(c, policy, held, own)
  rollouts = fit(
    n=c.sampling.chunk,
    prompts=c.sampling.places // processes,
    slots=c.sampling.slots or None,
    lanes=c.sampling.chunk_lanes or None,
    streams=True,
  )
  chunk, evaluations = _evaluations(c, fit, own.rows, processes)
  update = sizes.gradient(c, policy, **how)
  plan.check_update(update, sizes.memory_bytes(c, policy))
  probe = _probe(c, policy, state(applying=True), axes)
  return Plans(rollouts, evaluations, chunk, update, probe)


def evaluation(
  c: Config, policy: Policy, axes: Axes
) -> tuple[int, plan.RolloutPlan]:
  """Held-out prompts at one time, and their plan; only parameters are resident.

  Raises:
    TooLarge: They do not fit.
    ValueError: The policy cannot be split over these devices.
  """
  held = sizes.parameter_bytes(policy, axes)
  sampled = dataclasses.replace(c.sampling, in_flight=sizes.in_flight(c, axes))
  c = dataclasses.replace(c, sampling=sampled)
  return _evaluations(c, _fit(c, policy, held, axes), axes.rows)


def _probe(
  c: Config, policy: Policy, resident_bytes: int, axes: Axes
) -> memory.Gradient | None:
  """Memory of the theorem's probe; raises TooLarge if it does not fit."""
  if not c.theory.prompts:
    return None
  probe = memory.Gradient(
    policy,
    resident_bytes,
    sizes.parameter_bytes(policy, axes),
    prompts=min(c.theory.prompts, c.sampling.prompts),
    responses=theory.RESPONSES,
    prompt_tokens=c.data.prompt_tokens,
    tokens=min(theory.TOKENS, c.sampling.max_new_tokens),
    axes=axes,
  )
  plan.check_probe(probe, sizes.memory_bytes(c, policy))
  return probe


def _fit(
  c: Config, policy: Policy, resident_bytes: int, axes: Axes
) -> Callable[..., plan.RolloutPlan]:
  """`plan.rollouts`, whose errors name devices.memory_bytes if it is set."""
  fit = functools.partial(
    plan.rollouts,
    sampling.decoder(c.sampling, policy),
    memory_bytes=sizes.memory_bytes(c, policy),
    resident_bytes=resident_bytes,
    prompt_tokens=c.data.prompt_tokens,
    max_new_tokens=c.sampling.max_new_tokens,
    mean_tokens=c.sampling.mean_tokens,
    axes=axes,
  )
  if not c.devices.memory_bytes:
    return fit

  def named(**how: Any) -> plan.RolloutPlan:
    try:
      return fit(**how)
    except plan.TooLarge as e:
      given = f"config.devices.memory_bytes = {c.devices.memory_bytes}"
      raise plan.TooLarge(f"{given}: {e}") from None

  return named


def _evaluations(
  c: Config,
  fit: Callable[..., plan.RolloutPlan],
  rows: int,
  processes: int = 1,
) -> tuple[int, plan.RolloutPlan]:
  """Held-out prompts at one time: as in training, halved until they fit.

  Those of one process, which has its share of all; `rows` are its own.
  """
  # The tasks of files are unknown before they are read: assume one per file.
  files = c.data.heldout_files or c.data.files
  mixed = c.data.puzzles or not files
  tasks = len(files)
  if mixed and c.data.domains[MADE].weight:
    tasks += len(c.data.families)
  heldout = c.eval.prompts * max(tasks, 1)
  each = max(
    min(
      c.sampling.in_flight // processes // c.eval.n // rows,
      -(-heldout // processes // rows),
    ),
    1,
  )
  while True:
    try:
      return each * rows, fit(
        n=c.eval.n,
        prompts=each * rows,
        slots=min(c.sampling.slots, c.eval.n) or None,
        cut=c.eval.top_p < 1.0,
      )
    except plan.TooLarge as e:
      if each == 1:
        raise plan.TooLarge(f"evaluations: {e}") from None
      each = -(-each // 2)
