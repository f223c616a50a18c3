"""Stage 5: kept groups and their advantages -> optimizer updates."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brorl_jax import types
from brorl_jax.config.run import Guard
from brorl_jax.learner import packing, theory, update
from brorl_jax.learner import state as states
from brorl_jax.learner.objective import Stats
from brorl_jax.learner.state import updates_done
from brorl_jax.model import sharding
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import metrics, run_state
from brorl_jax.types import RunState

# In a row that were starved or skipped an update. One such step is bad luck; a
# run that learns from none of five has a cause that does not pass.
_BAD_STEPS = 5


def update_policy(
  this: Run,
  phase: Phase,
  state: types.State,
  kept: types.Groups,
  credit: types.Credit,
  gives_up: Callable[[], bool] = lambda: False,
) -> tuple[types.State, types.Updated]:
  """Stage 5: `optim.minibatches` optimizer updates over whole groups. Raises
  Interrupted before the batch for which it `gives_up`.
  """
  if not len(credit.advantage):
    state = dataclasses.replace(state, step=state.step + 1)
    return state, types.Updated({"update/skipped": 0.0})
  c, goal, mesh = phase.config, phase.objective, this.mesh
  response_logp, step = phase.trainer.response_logp, int(state.step) + 1
  watch, measured = _theorem(phase, kept)
  unit, most = goal.loss.unit, c.sampling.max_new_tokens
  scale = functools.partial(
    packing.loss_scale, unit=unit, mean=c.loss.mean, constant=most
  )
  groups = kept, credit.advantage, credit.counts, phase.layout
  count, seed = c.optim.minibatches, (c.run.seed, step)
  plans = update.minibatches(*groups, count=count, seed=seed, scale=scale)
  shares = update.packing_metrics(plans, int(credit.counts.sum()))
  logp_of = functools.partial(
    update.logp_of, temperature=goal.temperature, response_logp=response_logp
  )
  later, kl_term = [plan.later for plan in plans], bool(goal.kl_weight)
  parts = update.scored(later, state, mesh, logp_of=logp_of, kl_term=kl_term)
  one = functools.partial(
    update.minibatch_step,
    tx=phase.tx,
    response_logp=response_logp,
    objective=goal,
    watch=watch,
    most_norm=run_state.most_norm(c.optim.spike, credit.progress.grad_norms),
    groups=phase.memory.rollouts.groups,
  )
  state, stats = update.apply(state, parts, mesh, one, gives_up)
  jax.block_until_ready((state, stats))
  last = max(updates_done(state.opt) - 1, 0)
  scalars = {
    **update.update_metrics(stats, goal),
    "optim/lr": float(np.asarray(phase.lr(last))),
    **shares,
    **measured(state, stats),
  }
  norms = tuple(float(s.grad_norm) for s in stats if not s.skipped)
  skipped = update.skipped(stats, state.params, step)
  return state, types.Updated(scalars, norms, skipped)


def _theorem(
  phase: Phase, kept: types.Groups
) -> tuple[Callable[[PyTree], Float[Array, ""]] | None, Callable]:
  """What an update watches, or None; and (new state, stats) -> metrics."""
  if not (count := phase.config.theory.prompts):
    return None, lambda *_: theory.unmeasured()
  prompts, rollouts, scores = kept
  probe = theory.probe(prompts, rollouts, scores.reward, count=count)

  def measured(state: types.State, stats: Sequence[Stats]):
    after = theory.compiled_mass(phase.mass, probe, state.params)
    first_order = sum(float(s.watched) for s in stats)
    return theory.measure(probe, sharding.to_host(after), first_order)

  return jax.tree_util.Partial(phase.mass.mean, probe), measured


def check_guards(
  c: Guard,
  progress: RunState,
  scalars: Mapping[str, Any],
  sampled: SampledGroups,
  updated: types.Updated,
) -> tuple[RunState, types.Judgement]:
  """Compares a step with the bounds of the config, see run_state.watched."""
  # Before the guards: one NaN would stay in the means of the first steps.
  shown, lost = metrics.only_finite(scalars)
  progress, alarms = run_state.watched(c, progress, shown)
  short = sampled.shortage()
  bad = [*([short] if short else []), *updated.skipped]
  progress = run_state.learned(progress, updated.norms, bad=bool(bad))
  shown["guard/alarms"] = float(len(alarms))
  shown["sampling/starved"] = float(bool(short))
  # First what may explain the others.
  new = [{**a._asdict(), "why": a.text} for a in alarms if a.steps == 1]
  events = [{"event": "guard", **alarm} for alarm in new]
  events += [{"event": "starved", "why": short}] if short else []
  events += [{"event": "skip", "why": why} for why in updated.skipped]
  if lost and not bad:
    events.append({"event": "not finite", "metrics": lost})
  end = run_state.ends(c, alarms)
  if progress.bad >= _BAD_STEPS:
    end = f"{progress.bad} bad steps in a row, the last: {bad[-1]}"
  return progress, types.Judgement(shown, events, end)


def reset_reference(
  phase: Phase,
  best: Callable[[PyTree], tuple[int, float, PyTree] | None],
  state: types.State,
  progress: RunState,
) -> tuple[types.State, RunState, str | None]:
  """After a step: the policy becomes the reference when the config asks for it.

  The text is the reason, None without a reset. `best` reads the saved step of
  the best score, and that, for parameters like the policy's.
  """
  if state.reference is None:
    return state, progress, None
  c = phase.config.reference
  progress = dataclasses.replace(progress, since_reset=progress.since_reset + 1)
  every, stalled = c.reset_every, c.reset_stalled
  reason = run_state.reset_reason(progress, every=every, stalled=stalled)
  if reason is None:
    return state, progress, None
  if c.reset_to == "best" and (saved := best(state.params)) is not None:
    step, score, params = saved
    # Unless the best is this step, which is saved later: the score of an older
    # one is not above what is on disk.
    if progress.score is None or progress.score <= score:
      state = dataclasses.replace(state, params=params)
      reason = f"{reason}; back to step {step}, of score {score:.3g}"
  anew = c.reset_to == "anew"
  state = states.reset_reference(state, phase.tx, reset_optimizer=anew)
  return state, run_state.was_reset(progress), reason
