"""Memory of a run: how its rollouts and evaluations are decoded, or refused."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from brorl_jax import architectures, hf, memory, plan, sharding
from brorl_jax.main import learning, sampling, settings
from brorl_jax.main.settings import ASSETS, Config
from brorl_jax.policy import Policy


@dataclasses.dataclass(frozen=True)
class Plans:
  """Both kinds of sampling of a run, and its updates as far as they measure."""

  rollouts: plan.RolloutPlan
  evaluations: plan.RolloutPlan
  chunk: int  # held-out puzzles that are sampled together
  probe: memory.Probe | None  # None: the theorem is not measured


def run(c: Config) -> None:
  """Prints what a run would do with the memory there is; loads no weights.

  Devices need not be here if `config.mesh_data` and `memory_bytes` are given;
  those that are not are taken for accelerators.
  """
  settings.check_training(c)
  model = c.mesh_model
  data = c.mesh_data
  if data == -1:
    data = max(jax.device_count() // model, 1)
  here = data * model <= jax.device_count()
  if not here and not c.memory_bytes:
    raise settings.UserError(
      f"config.memory_bytes = 0 asks the devices, but of {data * model} only "
      f"{jax.device_count()} are here; give what one of them has"
    )
  try:
    policy = architectures.read_policy(_source(c.checkpoint), dtype=c.dtype)
    on_cpu = here and jax.default_backend() == "cpu"
    for since, phase in settings.phases(c):
      settings.check_mesh(phase, data)
      settings.check_lengths(phase, policy.max_positions)
      plans = make(
        phase,
        policy,
        data=data,
        model=model,
        on_cpu=on_cpu,
        keep_reference=learning.keeps_reference(c),
      )
      when = f" from step {since}" if c.phases else ""
      print(
        f"rollouts{when}: {phase.in_flight // phase.n} prompts x {phase.n}, at "
        f"most {phase.max_new_tokens} tokens, on {data} x {model} "
        f"{'CPU devices' if on_cpu else 'accelerators'}\n"
        f"{plans.rollouts.table()}\n"
        f"evaluations: {plans.chunk} prompts x {phase.eval_n}\n"
        f"{plans.evaluations.table()}"
      )
      if plans.probe is not None:
        parts = plan.shares(plans.probe.parts, _memory_bytes(c))
        print("an update, measuring the theorem", *parts, sep="\n")
  except ValueError as e:
    raise settings.UserError(str(e)) from None


def _source(checkpoint: str) -> pathlib.Path:
  """Where config.json lies; unlike `hf.locate` it downloads nothing."""
  path = pathlib.Path(checkpoint)
  if not checkpoint:
    return ASSETS
  if path.exists() or path.is_absolute() or len(path.parts) != 2:
    return hf.locate(checkpoint)
  raise ValueError(
    f"checkpoint {checkpoint!r} is not a directory here; a plan needs its "
    f"config.json alone: where there is a network run 'hf download "
    f"{checkpoint} config.json --local-dir {path.name}', then give "
    f"--config.checkpoint={path.name}"
  )


def make(
  c: Config,
  policy: Policy,
  *,
  data: int,
  model: int,
  on_cpu: bool | None,
  keep_reference: bool,
) -> Plans:
  """Plans for a mesh of data x model devices.

  Args:
    c: The config.
    policy: As it was read.
    data: Devices over which prompts are spread.
    model: Devices over which heads and vocabulary are spread.
    on_cpu: Whether devices are CPUs; whether these are if None.
    keep_reference: Whether any phase of the run has a reference policy.

  Raises:
    TooLarge: Something does not fit.
    ValueError: The policy cannot be spread like this.
  """
  if on_cpu is None:
    on_cpu = jax.default_backend() == "cpu"
  where = dict(data=data, model=model, on_cpu=on_cpu)
  state = functools.partial(
    learning.state_bytes, c, policy, **where, keep_reference=keep_reference
  )
  fit = _fit(c, policy, state(), **where)
  rollouts = fit(
    n=c.n,
    prompts=c.in_flight // c.n,
    slots=c.slots or None,
    lanes=c.lanes or None,
  )
  chunk, evaluations = _evaluations(c, fit, data)
  probe = _probe(c, policy, state(applying=True), **where)
  return Plans(rollouts, evaluations, chunk, probe)


def evaluation(
  c: Config, policy: Policy, *, data: int, model: int, on_cpu: bool
) -> tuple[int, plan.RolloutPlan]:
  """Held-out prompts at a time, and their plan, beside parameters alone.

  Raises:
    TooLarge: They do not fit.
    ValueError: The policy cannot be spread like this.
  """
  held = _parameter_bytes(policy, data, model)
  fit = _fit(c, policy, held, data=data, model=model, on_cpu=on_cpu)
  return _evaluations(c, fit, data)


def _parameter_bytes(policy: Policy, data: int, model: int) -> int:
  """Of a device; as many as of their gradients."""
  params = jax.eval_shape(policy.init, jax.random.key(0))
  mesh = AbstractMesh((data, model), ("data", "model"))
  return memory.shard_bytes(params, sharding.param_shardings(params, mesh))


def _memory_bytes(c: Config) -> int:
  return c.memory_bytes or memory.device_bytes()


def _probe(
  c: Config, policy: Policy, resident_bytes: int, **where: Any
) -> memory.Probe | None:
  """What the theorem's probe holds; raises TooLarge if that does not fit."""
  if not c.theory_prompts:
    return None
  found = memory.Probe(
    policy,
    resident_bytes,
    _parameter_bytes(policy, where["data"], where["model"]),
    prompts=min(c.theory_prompts, c.samples // c.n),
    responses=c.theory_responses,
    prompt_tokens=c.prompt_tokens,
    tokens=min(c.theory_tokens, c.max_new_tokens),
    **where,
  )
  plan.check_probe(found, _memory_bytes(c))
  return found


def _fit(
  c: Config, policy: Policy, resident_bytes: int, **where: Any
) -> Callable[..., plan.RolloutPlan]:
  """`plan.rollouts`, with a name for the memory that the config gives."""
  fit = functools.partial(
    plan.rollouts,
    sampling.decoder(c, policy),
    memory_bytes=_memory_bytes(c),
    resident_bytes=resident_bytes,
    prompt_tokens=c.prompt_tokens,
    max_new_tokens=c.max_new_tokens,
    **where,
  )
  if not c.memory_bytes:
    return fit

  def named(**sizes: Any) -> plan.RolloutPlan:
    try:
      return fit(**sizes)
    except plan.TooLarge as e:
      given = f"config.memory_bytes = {c.memory_bytes}"
      raise plan.TooLarge(f"{given}: {e}") from None

  return named


def _evaluations(
  c: Config, fit: Callable[..., plan.RolloutPlan], data: int
) -> tuple[int, plan.RolloutPlan]:
  """As many held-out puzzles at a time as in training, or half of them, ..."""
  # Tasks of files are not known before they are read: one for each.
  tasks = len(c.families) if c.domains.gym.weight else 0
  tasks += len(c.data.heldout_files or c.data.files)
  heldout = c.eval_prompts * max(tasks, 1)
  each = max(min(c.in_flight // c.eval_n // data, -(-heldout // data)), 1)
  while True:
    try:
      return each * data, fit(
        n=c.eval_n,
        prompts=each * data,
        slots=min(c.slots, c.eval_n) or None,
        cut=c.eval_top_p < 1.0,
      )
    except plan.TooLarge as e:
      if each == 1:
        raise plan.TooLarge(f"evaluations: {e}") from None
      each = -(-each // 2)
