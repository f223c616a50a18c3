"""Stage 2: prompts -> rollouts, for training and for evaluations."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from brorl_jax import types
from brorl_jax.model import local
from brorl_jax.model.policy import Policy
from brorl_jax.rl import allocation, stopping
from brorl_jax.rollout import plan, prefixes, rounds, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.stream import stream
from brorl_jax.runs import run_state
from brorl_jax.runs.run_state import RunState
from brorl_jax.runs.sections.eval import Eval
from brorl_jax.runs.sections.sampling import Sampling


def decoder(c: Sampling, policy: Policy) -> Policy:
  """The policy with the sampler's options."""
  return dataclasses.replace(policy, int8_cache=c.int8_cache)


def form(c: Sampling, policy: Policy, fits: plan.RolloutPlan) -> str:
  """How rollouts of a step are decoded, in a few words."""
  if _shares_prefixes(c, policy, fits, c.chunk):
    return f"a row for each prefix, of at most {c.max_new_tokens} tokens"
  return fits.line()


def rounds_of(c: Sampling, most: int) -> stopping.Rounds:
  """When a prompt stops, with allocation 'stop'.

  Args:
    c: The rule.
    most: Last round that the budget allows; 0: all.
  """
  after = tuple(n for n in c.cumulative if n <= (most or c.n))
  return stopping.Rounds(after, c.stop_right, c.stop_wrong)


class Stops(NamedTuple):
  """Rounds until right and wrong rollouts suffice, see `rounds.Rule`."""

  rounds: stopping.Rounds

  def first(self, p: int) -> int:
    return self.rounds.after[0]

  def more(self, reward, valid) -> int:
    right = int((reward >= 1.0).sum())
    return stopping.further(self.rounds, right=right, drawn=len(reward))


class _Chosen(NamedTuple):
  """Numbers that were chosen before anything is drawn."""

  n: Mapping[int, int]

  def first(self, p: int) -> int:
    return self.n[p]

  def more(self, reward, valid) -> int:
    return 0


def plan_of(
  c: Sampling, *, candidates: int
) -> Callable[[RunState, Sequence[int]], rounds.Plan]:
  """(run state, candidates) -> how many rollouts each of them gets.

  Args:
    c: The rule and its numbers.
    candidates: Most of a step.
  """
  if c.allocation == "fixed":
    return lambda progress, step: rounds.fixed(c.n)
  if c.allocation == "stop":

    def stops(progress: RunState, step: Sequence[int]) -> rounds.Plan:
      rule = Stops(rounds_of(c, progress.most))
      return rounds.Plan(c.chunk, c.n, rule)

    return stops

  choose = jax.jit(
    functools.partial(
      allocation.allocate,
      allocation.VALUES[c.allocation],
      least=c.chunk,
      most=c.n,
      each=c.samples / c.prompts,
    )
  )

  def chosen(progress: RunState, step: Sequence[int]) -> rounds.Plan:
    # Of one shape, on the CPU, as in `advantages.filter_stage`.
    right, drawn = np.zeros((2, candidates), np.float32)
    for i, p in enumerate(step):
      right[i], drawn[i] = progress.seen.get(p, (0.0, 0.0))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      p = allocation.estimate(jnp.asarray(right), jnp.asarray(drawn))
      n = np.asarray(choose(p, jnp.asarray(drawn > 0))).tolist()
    numbers = dict(zip(step, n[: len(step)], strict=True))
    return rounds.Plan(c.chunk, c.n, _Chosen(numbers))

  return chosen


def after_step(
  c: Sampling,
) -> Callable[[RunState, types.Groups], RunState]:
  """What the next step's plan needs to know of this one's rollouts."""
  if c.allocation == "fixed":
    return lambda progress, groups: progress

  def remembered(progress: RunState, groups: types.Groups) -> RunState:
    n = groups.rollouts.drawn.sum(axis=1).tolist()
    right = groups.right.sum(axis=1).tolist()
    if c.allocation == "stop":
      most = _allowed(c, progress.most or c.n, n, right)
      return dataclasses.replace(
        progress, most=0 if most == c.n else most, most_before=progress.most
      )
    return run_state.remembered(
      progress,
      groups.prompts.index.tolist(),
      right,
      n,
      forget=allocation.FORGET,
    )

  return remembered


def _allowed(
  c: Sampling, most: int, drawn: Sequence[int], right: Sequence[int]
) -> int:
  """The last round of the next step: the budget is a soft one.

  A step that drew more than `samples` gives the next one fewer rounds: as many
  as would have kept it below. One more is allowed again if it would have fit:
  every prompt that the last round left without enough goes on.
  """
  after, total = c.cumulative, sum(drawn)
  if total > c.samples:
    fit = [m for m in after if sum(min(n, m) for n in drawn) <= c.samples]
    return max(fit, default=after[0])
  at = after.index(most)
  if most == after[-1]:
    return most
  ends = rounds_of(c, most)
  left = [
    n == most and not ends.over(k, n - k)
    for n, k in zip(drawn, right, strict=True)
  ]
  more = sum(left) * (after[at + 1] - most)
  return after[at + 1] if total + more <= c.samples else most


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
