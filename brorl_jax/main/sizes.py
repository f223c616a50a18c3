"""Sizes of a run that follow from its machine: the mesh and its memory.

Fields of the config that are 0, and a dtype that is "auto", are set here. They
change no result but by rounding, and how long a step takes.
"""

import dataclasses
import pathlib
from typing import Any, TypeVar

import jax

from brorl_jax import config
from brorl_jax.config import Config, Warmup
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.learner.layout import MICROBATCHES
from brorl_jax.main.stages import learning
from brorl_jax.meshes import Axes
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.target import Target
from brorl_jax.rollout import memory, plan
from brorl_jax.runs import folder

# Rollouts of a device, 4 prompts of 512: while the last rollouts of one decode,
# those of the next take the slots that they leave.
_AHEAD = 2048

C = TypeVar("C", Config, Warmup)


def with_dtype(c: C, machine: Target, began: str | None = None) -> C:
  """The config with a dtype in place of "auto".

  That of the run which goes on or is evaluated, `began`; of a new one float32
  on a CPU and bfloat16 elsewhere.
  """
  if c.policy.dtype != "auto":
    return c
  dtype = began or ("float32" if machine.on_cpu else "bfloat16")
  return dataclasses.replace(
    c, policy=dataclasses.replace(c.policy, dtype=dtype)
  )


def dtype_of(workdir: pathlib.Path) -> str | None:
  """The dtype of the run or evaluation in a folder; None without one.

  Raises:
    UserError: Its config.json cannot be read.
  """
  if not (starts := folder.configs(workdir)):
    return None
  dtype = config.flat(starts[0]).get("policy.dtype", "float32")
  if dtype not in ("float32", "bfloat16"):
    raise UserError(
      f"{workdir / 'config.json'}: policy.dtype = {dtype!r} is not what a run "
      "writes; it must be float32 or bfloat16"
    )
  return dtype


def settled(
  c: Config, policy: Policy, *, axes: Axes, keep_reference: bool
) -> Config:
  """The config with sizes in place of zeros.

    sampling.in_flight  2,048 for each row of devices, in whole prompts, or as
                        many as a step has, but at least a prompt
    optim.blocks        one for each row of devices
    optim.rows          8, or as few as fit into memory

  Args:
    c: The config.
    policy: Description of the policy.
    axes: Of the mesh.
    keep_reference: Whether any phase of the run has a reference policy.
  """
  optim = dataclasses.replace(c.optim, blocks=c.optim.blocks or axes.rows)
  sampled = dataclasses.replace(c.sampling, in_flight=in_flight(c, axes))
  c = dataclasses.replace(c, sampling=sampled, optim=optim)
  if optim.rows:
    return c
  one = dataclasses.replace(c, optim=dataclasses.replace(optim, rows=1))
  most = gradient(one, policy, axes=axes, keep_reference=keep_reference)
  rows = plan.rows(most, memory_bytes(c, policy))
  return dataclasses.replace(c, optim=dataclasses.replace(optim, rows=rows))


def in_flight(c: Config, axes: Axes) -> int:
  """Rollouts that are made at one time, see `settled`."""
  sampled = c.sampling
  chunk = sampled.chunk
  most = max(sampled.samples // chunk, 1)  # chunks of a step
  each = max(min(-(-_AHEAD // chunk), most // axes.rows), 1)
  return sampled.in_flight or axes.rows * each * chunk


def memory_bytes(c: Config, policy: Policy) -> int:
  """Memory of a device: what the config says, or the machine."""
  return c.devices.memory_bytes or policy.target.memory_bytes


def gradient(
  c: Config, policy: Policy, *, axes: Axes, keep_reference: bool
) -> memory.Gradient:
  """Memory of an update's gradient, for the longest responses.

  Args:
    c: The config, with all sizes.
    policy: Description of the policy.
    axes: Of the mesh.
    keep_reference: Whether any phase of the run has a reference policy.
  """
  held = resident_bytes(c, policy, axes=axes, keep_reference=keep_reference)
  return memory.Gradient(
    policy,
    held,
    parameter_bytes(policy, axes),
    prompts=c.optim.blocks,
    responses=c.optim.rows,
    prompt_tokens=c.data.prompt_tokens,
    tokens=c.sampling.max_new_tokens,
    axes=axes,
    applied=False,
    # Two batches: one is brought while the other is computed.
    microbatches=2 * MICROBATCHES,
  )


def resident_bytes(c: Config, policy: Policy, **where: Any) -> int:
  """`state_bytes` of a config."""
  return state_bytes(
    policy,
    learning.optimizer(c.optim, c.sampling)[0],
    offload=c.devices.offload,
    pipeline=c.run.pipeline,
    **where,
  )


def state_bytes(
  policy: Policy,
  tx,
  *,
  offload: str,
  pipeline: bool,
  axes: Axes,
  keep_reference: bool,
  applying: bool = False,
) -> int:
  """Bytes per device of the training state while it samples or updates.

  Args:
    policy: Description of the policy.
    tx: The optimizer.
    offload: `devices.offload`.
    pipeline: `run.pipeline`.
    axes: Of the mesh.
    keep_reference: Whether any phase of the run has a reference policy.
    applying: Whether an update is applied, with the moments on the devices.

  Raises:
    ValueError: The policy cannot be split over these devices.
  """
  away = "nothing" if policy.target.on_cpu else offload  # a CPU's is the host's
  if applying and away == "moments":
    away = "reference"
  _, shapes, places = states.state_places(
    jax.eval_shape(policy.init, jax.random.key(0)),
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
  if pipeline:  # the parameters that the next step is sampled with
    held += sharding.shard_bytes(
      jax.tree.leaves(shapes.params), jax.tree.leaves(places.params)
    )
  return held


def parameter_bytes(policy: Policy, axes: Axes) -> int:
  """Bytes per device of the parameters, or of their gradients."""
  params = jax.eval_shape(policy.init, jax.random.key(0))
  places = sharding.param_shardings(params, axes.abstract)
  return sharding.shard_bytes(params, places)
