"""Stage 2: prompts -> rollouts, for training and for evaluations."""

from collections.abc import Iterator

import jax
from jaxtyping import Array, Key, PyTree

from brorl_jax import types
from brorl_jax.config import Config
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.plan import resolve
from brorl_jax.plan.resolve import Heldout, Phase, WithPolicy
from brorl_jax.rollout import prefixes, rounds, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.stream import Feed, stream


def form(phase: Phase) -> str:
  """How rollouts of a step are decoded, in a few words."""
  c = phase.config.sampling
  if _shares_prefixes(phase.decoder, c.chunk, c.max_new_tokens):
    return f"a row for each prefix, of at most {c.max_new_tokens} tokens"
  return phase.memory.rollouts.line()


def round_plan(phase: Phase) -> rounds.RoundPlan:
  """How many rollouts each candidate gets."""
  c = phase.config.sampling
  if not c.rounds:
    return rounds.RoundPlan((c.n,))
  return rounds.RoundPlan(c.rounds, c.stop_right, c.stop_wrong)


def sample_heldout(
  this: WithPolicy[Config],
  c: Config,
  how: Heldout,
  params: PyTree,
  prompts: types.Prompts,
  key: Key[Array, ""],
) -> types.Rollouts:
  """All rollouts of held-out prompts, on the host.

  Args:
    this: The policy, on this machine.
    c: The config of the run, or of a phase.
    how: The memory plan.
    params: Parameters of this process' own.
    prompts: On the host.
    key: Of the evaluation.
  """
  policy, mesh = resolve.decoder(c, this.policy), sharding.local_mesh(this.mesh)
  n, T, stop = c.eval.n, c.sampling.max_new_tokens, this.text.stop_ids
  cut = SamplingParams(temperature=c.eval.temperature, top_p=c.eval.top_p)
  if _shares_prefixes(policy, n, T):
    out = prefixes.rollouts(
      policy,
      params,
      prompts,
      key,
      n=n,
      max_new_tokens=T,
      sampling=cut,
      stop_ids=stop,
      mesh=mesh,
    )
  else:
    out = sampler.rollouts(
      policy,
      params,
      prompts,
      key,
      n=n,
      max_new_tokens=T,
      sampling=cut,
      stop_ids=stop,
      slots=how.plan.slots,
      lanes=how.plan.lanes,
      blocks=how.plan.blocks,
      mesh=mesh,
    )
  return jax.device_get(out)


def stream_rollouts(
  this: WithPolicy[Config],
  phase: Phase,
  params: PyTree,
  feed: Feed,
  key: Key[Array, ""],
) -> Iterator[tuple[types.Prompts, types.Rollouts]]:
  """For training: finished prompts with their rollouts.

  Args:
    this: The policy, on this machine.
    phase: Sizes and memory plan; each process has its share of what is in
      flight.
    params: Of the run, spread over all processes.
    feed: Gives prompts.
    key: Of the step.
  """
  c, fits = phase.config.sampling, phase.memory.rollouts
  mesh, stop = sharding.local_mesh(this.mesh), this.text.stop_ids
  params = sharding.local_copy(params, mesh)
  places = c.places // this.machine.processes
  cut = SamplingParams(temperature=c.temperature)
  if _shares_prefixes(phase.decoder, c.chunk, c.max_new_tokens):
    return prefixes.stream(
      phase.decoder,
      params,
      feed,
      key,
      n=c.chunk,
      max_new_tokens=c.max_new_tokens,
      sampling=cut,
      stop_ids=stop,
      places=places,
      mesh=mesh,
    )
  return stream(
    phase.decoder,
    params,
    feed,
    key,
    n=c.chunk,
    max_new_tokens=c.max_new_tokens,
    sampling=cut,
    stop_ids=stop,
    slots=fits.slots,
    lanes=fits.lanes,
    places=places,
    blocks=fits.blocks,
    mesh=mesh,
  )


def _shares_prefixes(decoder: Policy, n: int, max_new_tokens: int) -> bool:
  return prefixes.pays(
    decoder,
    n=n,
    max_new_tokens=max_new_tokens,
    memory_bytes=decoder.target.memory_bytes,
  )
