"""Stage 2: prompts -> rollouts, of training and of evaluations."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from brorl_jax import plan, sampler, types
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy
from brorl_jax.stream import stream


def decoder(c: Config, policy: Policy) -> Policy:
  """The policy as the sampler gets it."""
  return dataclasses.replace(
    policy, int8_cache=c.int8_cache, decode_kernel=c.decode_kernel
  )


def heldout(
  c: Config,
  policy: Policy,
  stop_ids: tuple[int, ...],
  mesh: Mesh,
  fits: plan.RolloutPlan,
) -> Callable[..., types.Rollouts]:
  """Of evaluations: (params, prompts, key) -> rollouts, on the host at once."""
  behaviour = sampler.Behaviour(
    temperature=c.eval_temperature, top_p=c.eval_top_p
  )
  make = functools.partial(
    sampler.rollouts,
    decoder(c, policy),
    **_how(c, stop_ids, mesh, fits, c.eval_n, behaviour),
  )

  def sample(params, prompts: types.Prompts, key) -> types.Rollouts:
    return jax.device_get(make(params, prompts, key))

  return sample


def streamed(
  c: Config,
  policy: Policy,
  stop_ids: tuple[int, ...],
  mesh: Mesh,
  fits: plan.RolloutPlan,
) -> Callable[..., Iterator[tuple[types.Prompts, types.Rollouts]]]:
  """Stage 2: (params, feed, key) -> prompts that are done, their rollouts."""
  behaviour = sampler.Behaviour(temperature=c.temperature)
  make = functools.partial(
    stream,
    decoder(c, policy),
    **_how(c, stop_ids, mesh, fits, c.n, behaviour),
    places=c.in_flight // c.n,
  )
  return lambda params, feed, key: make(params, feed, key)


def _how(c: Config, stop_ids, mesh, fits: plan.RolloutPlan, n: int, behaviour):
  return dict(
    n=n,
    max_new_tokens=c.max_new_tokens,
    behaviour=behaviour,
    stop_ids=stop_ids,
    slots=fits.slots,
    lanes=fits.lanes,
    mesh=mesh,
  )
