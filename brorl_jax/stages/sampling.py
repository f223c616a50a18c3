"""Stage 2: prompts -> rollouts, for training and for evaluations."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
from jaxtyping import PyTree

from brorl_jax import types
from brorl_jax.config import Config
from brorl_jax.model import sharding
from brorl_jax.plan.memory import RolloutPlan
from brorl_jax.plan.resolve import Phase, WithPolicy
from brorl_jax.rollout import dynamic_sampling, prefixes, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.dynamic_sampling import Crossing, Feed, Reply, RoundPlan
from brorl_jax.rollout.slots import RolloutSpec, Seed


def form(phase: Phase, episodes: bool = False) -> str:
  """How rollouts of a step are decoded, in a few words."""
  plan = phase.memory.rollouts
  if _together(plan) and not phase.config.run.max_age and not episodes:
    most = plan.load.max_new_tokens
    return f"a row for each prefix, of at most {most} tokens"
  return plan.line()


def round_plan(phase: Phase) -> RoundPlan:
  """How many rollouts each candidate gets."""
  c, chunk = phase.config.sampling, phase.memory.rollouts.load.n
  return RoundPlan(c.rounds or (c.n,), c.stop_right * bool(c.rounds), chunk)


def sample_heldout(
  this: WithPolicy,
  c: Config,
  plan: RolloutPlan,
  params: PyTree,
  prompts: types.Prompts,
  key: Seed,
  reply: Reply | None = None,
) -> types.Rollouts:
  """All rollouts of held-out prompts, on the host; `c` is the config of the run
  or of a phase, `params` are this process' copy. With `reply` all episodes.
  """
  cut = SamplingParams(temperature=c.eval.temperature, top_p=c.eval.top_p)
  spec, shared = _spec(this, plan, cut)
  if reply is not None:
    places = -(-len(prompts.index) // spec.devices) * spec.devices
    of = {"key": key, "places": places, "turns": True}
    sample = lambda feed: stream.stream(spec, params, feed, **of)
    return dynamic_sampling.played(sample, reply, prompts)
  make = prefixes if shared else sampler
  return jax.device_get(make.rollouts(spec, params, prompts, key))


def stream_rollouts(
  this: WithPolicy,
  phase: Phase,
  params: PyTree,
  feed: Feed,
  key: Seed,
  *crossing: Crossing,
  turns: bool = False,
) -> Iterator[tuple[types.Prompts, types.Rollouts]]:
  """For training: finished prompts with their rollouts. Each process samples
  its share of what is in flight; `params` are spread over all processes.
  """
  c, plan = phase.config.sampling, phase.memory.rollouts
  spec, shared = _spec(this, plan, SamplingParams(temperature=c.temperature))
  make = (prefixes if shared else stream).stream
  if crossing or turns:
    how = {"crossing": next(iter(crossing), None), "turns": turns}
    make = functools.partial(stream.stream, **how)
  params = sharding.local_copy(params, sharding.local_mesh(this.mesh))
  return make(spec, params, feed, key, places=plan.load.prompts)


def _spec(
  this: WithPolicy, plan: RolloutPlan, cut: SamplingParams
) -> tuple[RolloutSpec, bool]:
  """What the sampler gets, and whether rollouts share rows."""
  spec = plan.spec(cut, this.text.stop_ids, sharding.local_mesh(this.mesh))
  lanes = _together(plan)
  return dataclasses.replace(spec, lanes=lanes or spec.lanes), lanes > 0


def _together(plan: RolloutPlan) -> int:
  """Prompts of a device whose rollouts share rows at one time; 0: none do."""
  load, most = plan.load, plan.load.policy.target.memory_bytes
  how = {"n": load.n, "max_new_tokens": load.max_new_tokens}
  return prefixes.together(load.policy, **how, memory_bytes=most)
