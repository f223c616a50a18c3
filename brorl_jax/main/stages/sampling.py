"""Stage 2: prompts -> rollouts, for training and for evaluations."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from brorl_jax import types
from brorl_jax.config.run import Eval
from brorl_jax.config.sampling import Sampling
from brorl_jax.model import local
from brorl_jax.model.policy import Policy
from brorl_jax.rollout import plan, prefixes, rounds, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.stream import stream


def decoder(c: Sampling, policy: Policy) -> Policy:
  """The policy with the sampler's options."""
  return dataclasses.replace(policy, int8_cache=c.int8_cache)


def form(c: Sampling, policy: Policy, fits: plan.RolloutPlan) -> str:
  """How rollouts of a step are decoded, in a few words."""
  if _shares_prefixes(c, policy, fits, c.chunk):
    return f"a row for each prefix, of at most {c.max_new_tokens} tokens"
  return fits.line()


def plan_of(c: Sampling) -> rounds.Plan:
  """How many rollouts each candidate gets."""
  if not c.rounds:
    return rounds.Plan((c.n,))
  return rounds.Plan(c.rounds, c.stop_right, c.stop_wrong)


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
  how = _how(c, stop_ids, mesh, held.n, sampling)
  make = functools.partial(
    sampler.rollouts, decoder(c, policy), **how, **_slots(fits)
  )
  if _shares_prefixes(c, policy, fits, held.n):
    make = functools.partial(prefixes.rollouts, decoder(c, policy), **how)

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
  how = _how(c, stop_ids, mesh, c.chunk, sampling)
  how["places"] = c.places // processes
  make = functools.partial(stream, decoder(c, policy), **how, **_slots(fits))
  if _shares_prefixes(c, policy, fits, c.chunk):
    make = functools.partial(prefixes.stream, decoder(c, policy), **how)
  return lambda params, feed, key: make(local.copied(params, mesh), feed, key)


def _shares_prefixes(
  c: Sampling, policy: Policy, fits: plan.RolloutPlan, n: int
) -> bool:
  return prefixes.pays(
    decoder(c, policy),
    n=n,
    max_new_tokens=c.max_new_tokens,
    memory_bytes=fits.memory_bytes,
  )


def _how(c: Sampling, stop_ids, mesh, n: int, sampling) -> dict[str, Any]:
  return dict(
    n=n,
    max_new_tokens=c.max_new_tokens,
    sampling=sampling,
    stop_ids=stop_ids,
    mesh=mesh,
  )


def _slots(fits: plan.RolloutPlan) -> dict[str, Any]:
  return dict(slots=fits.slots, lanes=fits.lanes, blocks=fits.blocks)
