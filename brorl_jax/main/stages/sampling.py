"""Stage 2: prompts -> rollouts, for training and for evaluations."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from brorl_jax import types
from brorl_jax.model import local
from brorl_jax.model.policy import Policy
from brorl_jax.rollout import plan, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.stream import stream
from brorl_jax.runs.sections.eval import Eval
from brorl_jax.runs.sections.sampling import Sampling


def decoder(c: Sampling, policy: Policy) -> Policy:
  """The policy with the sampler's options."""
  return dataclasses.replace(policy, int8_cache=c.int8_cache)


def heldout(
  c: Sampling,
  held: Eval,
  policy: Policy,
  stop_ids: tuple[int, ...],
  mesh: Mesh,
  fits: plan.RolloutPlan,
) -> Callable[..., types.Rollouts]:
  """For evaluations: (params, prompts, key) -> all rollouts, on the host."""
  sampling = SamplingParams(temperature=held.temperature, top_p=held.top_p)
  make = functools.partial(
    sampler.rollouts,
    decoder(c, policy),
    **_how(c, stop_ids, mesh, fits, held.n, sampling),
  )

  def sample(params, prompts: types.Prompts, key) -> types.Rollouts:
    return jax.device_get(make(params, prompts, key))

  return sample


def streamed(
  c: Sampling,
  policy: Policy,
  stop_ids: tuple[int, ...],
  mesh: Mesh,
  fits: plan.RolloutPlan,
  processes: int = 1,
) -> Callable[..., Iterator[tuple[types.Prompts, types.Rollouts]]]:
  """For training: (params, feed, key) -> finished prompts with rollouts.

  Args:
    c: Sizes of the run.
    policy: Description of the policy.
    stop_ids: Tokens that end a rollout.
    mesh: Devices of this process.
    fits: The memory plan of a process.
    processes: Of the run; each has its share of what is in flight.
  """
  sampling = SamplingParams(temperature=c.temperature)
  make = functools.partial(
    stream,
    decoder(c, policy),
    **_how(c, stop_ids, mesh, fits, c.n, sampling),
    places=c.places // processes,
  )
  return lambda params, feed, key: make(local.copied(params, mesh), feed, key)


def _how(c: Sampling, stop_ids, mesh, fits: plan.RolloutPlan, n: int, sampling):
  return dict(
    n=n,
    max_new_tokens=c.max_new_tokens,
    sampling=sampling,
    stop_ids=stop_ids,
    slots=fits.slots,
    lanes=fits.lanes,
    blocks=fits.blocks,
    mesh=mesh,
  )
