"""Stage 2: prompts -> rollouts, of training and of evaluations."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from brorl_jax import plan, sampler, types
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy


def decoder(c: Config, policy: Policy) -> Policy:
  """The policy as the sampler gets it."""
  return dataclasses.replace(
    policy, int8_cache=c.int8_cache, decode_kernel=c.decode_kernel
  )


def rollouts(
  c: Config,
  policy: Policy,
  stop_ids: tuple[int, ...],
  mesh: Mesh,
  fits: plan.RolloutPlan,
  *,
  n: int,
) -> Callable[..., types.Rollouts]:
  """(params, prompts, key) -> n rollouts each, copied to the host at once."""
  policy = decoder(c, policy)

  def sample(params, prompts: types.Prompts, key) -> types.Rollouts:
    out = sampler.rollouts(
      policy,
      params,
      prompts,
      key,
      n=n,
      max_new_tokens=c.max_new_tokens,
      behaviour=sampler.Behaviour(temperature=c.temperature),
      stop_ids=stop_ids,
      slots=fits.slots,
      lanes=fits.lanes,
      mesh=mesh,
    )
    return jax.device_get(out)

  return sample
