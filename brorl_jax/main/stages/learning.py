"""Stage 5: kept groups and their advantages -> optimizer updates."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from brorl_jax import meshes, train, types
from brorl_jax.config import Config
from brorl_jax.config.learning import Loss, Optim, Reference
from brorl_jax.config.run import Guard, Theory
from brorl_jax.config.sampling import Sampling
from brorl_jax.learner import packing, theory, update
from brorl_jax.learner import state as states
from brorl_jax.learner import step as steps
from brorl_jax.learner.layout import Layout
from brorl_jax.learner.objective import Correction, Objective, Stats
from brorl_jax.learner.optimizer import adamw, updates_done
from brorl_jax.main import functions, settings
from brorl_jax.model import sharding
from brorl_jax.model.policy import Policy
from brorl_jax.rl import lr_scaling
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import guards, metrics, run_state
from brorl_jax.runs.run_state import RunState

# Of loss.correction_range, where it is empty.
_USUAL_RANGE = {
  "truncated": (0.0, 2.0),
  "banded": (0.5, 5.0),
  "sequence": (0.999, 1.002),
}
# Nats: what a token counts at most in the KL term. ProRL v2 states it.
_KL_CLAMP = 10.0
# In a row that were starved or skipped an update. One such step is bad luck; a
# run that learns from none of five has a cause that does not pass.
_BAD_STEPS = 5


def scaled_lr(c: Optim, sampled: Sampling) -> float:
  """The learning rate of a step, for its number of samples."""
  if not c.lr_samples:
    return c.lr
  return lr_scaling.sqrt_scaled(
    c.lr, samples=sampled.samples, base_samples=c.lr_samples
  )


def optimizer(c: Optim, sampled: Sampling):
  """AdamW with a warm-up, and the rate of each update."""
  return adamw(
    lr=scaled_lr(c, sampled),
    warmup=c.warmup,
    b1=c.b1,
    b2=c.b2,
    eps=c.eps,
    weight_decay=c.weight_decay,
    max_grad_norm=c.max_grad_norm,
  )


def keeps_reference(c: Config) -> bool:
  """Whether any phase of the run has a KL term."""
  return any(p.config.reference.kl_weight > 0.0 for p in settings.phases(c))


def objective(
  c: Loss, reference: Reference, *, temperature: float
) -> Objective:
  """The loss with its constants; raises ValueError if there is no such loss."""
  correction = None
  if c.correction != "none":
    low, high = map(float, c.correction_range or _USUAL_RANGE[c.correction])
    correction = Correction(c.correction, low, high)
  return Objective(
    clip_low=c.clip_low,
    clip_high=c.clip_high,
    loss=functions.loss(c),
    kl_weight=reference.kl_weight,
    kl_clamp=_KL_CLAMP,
    entropy_weight=c.entropy_weight,
    correction=correction,
    temperature=temperature,
  )


def layout(c: Config, devices: int) -> Layout:
  """Shapes of the batches of an update, for so many rows of devices."""
  return Layout(
    c.optim.rows,
    c.optim.blocks,
    c.sampling.max_new_tokens,
    c.data.prompt_tokens,
    devices,
  )


def update_stage(
  c: Config, policy: Policy, tx, schedule, mesh: Mesh
) -> Callable[..., tuple[types.State, train.Updated]]:
  """Stage 5: `optim.minibatches` optimizer updates over whole groups."""
  policy = dataclasses.replace(policy, remat=c.devices.remat, mesh=mesh)
  shapes = layout(c, meshes.of(mesh).rows)
  goal = objective(c.loss, c.reference, temperature=c.sampling.temperature)
  scale = functools.partial(
    packing.loss_scale,
    unit=goal.loss.unit,
    mean=c.loss.mean,
    constant=c.sampling.max_new_tokens,
  )
  logp_of = lambda params, batch: update.logp_of(
    params,
    batch,
    temperature=c.sampling.temperature,
    response_logp=policy.response_logp,
  )
  probe_of, theory_metrics = _theory(c.theory, policy, c.sampling)

  def apply(state: types.State, kept: types.Groups, credit: train.Credit):
    if not len(credit.advantage):
      state = dataclasses.replace(state, step=state.step + 1)
      return state, train.Updated({"update/skipped": 0.0})
    step = int(state.step) + 1
    probe, watch = probe_of(kept)
    parts = steps.minibatches(
      kept,
      credit.advantage,
      credit.counts,
      shapes,
      count=c.optim.minibatches,
      seed=(c.run.seed, step),
      scale=scale,
    )
    shares = steps.packing_metrics(parts, int(credit.counts.sum()))
    kl_term = bool(c.reference.kl_weight)
    parts = steps.scored(parts, state, mesh, logp_of=logp_of, kl_term=kl_term)
    state, stats = steps.apply(
      state,
      parts,
      mesh,
      tx=tx,
      response_logp=policy.response_logp,
      objective=goal,
      watch=watch,
      most_norm=guards.most_norm(c.optim.spike, credit.progress.grad_norms),
    )
    jax.block_until_ready((state, stats))
    skipped = steps.skipped(stats, state.params, step)
    metrics = {
      **steps.update_metrics(stats, goal),
      "optim/lr": float(schedule(max(updates_done(state.opt) - 1, 0))),
      **shares,
      **theory_metrics(probe, state, stats),
    }
    norms = tuple(float(s.grad_norm) for s in stats if not s.skipped)
    return state, train.Updated(metrics, norms, skipped)

  return apply


def guard_stage(c: Guard) -> Callable[..., tuple]:
  """Compares a step with the bounds of the config, see runs/guards.py."""

  def guard(
    progress: RunState,
    scalars: Mapping[str, Any],
    sampled: SampledGroups,
    updated: train.Updated,
  ):
    # Before the guards: one NaN would stay in the means of the first steps.
    shown, lost = metrics.only_finite(scalars)
    progress, alarms = guards.watched(c, progress, shown)
    short = sampled.shortage()
    bad = [*([short] if short else []), *updated.skipped]
    progress = guards.learned(progress, updated.norms, bad=bool(bad))
    shown["guard/alarms"] = float(len(alarms))
    shown["sampling/starved"] = float(bool(short))
    # First what may explain the others.
    new = [{**a._asdict(), "why": a.text} for a in alarms if a.steps == 1]
    events = [{"event": "guard", **alarm} for alarm in new]
    events += [{"event": "starved", "why": short}] if short else []
    events += [{"event": "skip", "why": why} for why in updated.skipped]
    if lost and not bad:
      events.append({"event": "not finite", "metrics": lost})
    end = guards.ends(c, alarms)
    if progress.bad >= _BAD_STEPS:
      end = f"{progress.bad} bad steps in a row, the last: {bad[-1]}"
    return progress, train.Judged(shown, events, end)

  return guard


def mean_mass(
  policy: Policy, sampled: Sampling
) -> Callable[[theory.Probe, Any], jax.Array]:
  """(probe, parameters) -> mean mass of correct responses over its prompts."""
  mass = _mass(policy, sampled)
  return lambda probe, params: jnp.mean(mass(probe, params))


def _mass(policy: Policy, sampled: Sampling) -> Callable[..., jax.Array]:
  # The probe has few tokens; this keeps as little as possible of them for the
  # backward pass.
  lean = dataclasses.replace(policy, remat="layer")
  return functools.partial(
    theory.correct_mass,
    response_logp=lean.response_logp,
    temperature=sampled.temperature,
  )


def _theory(
  c: Theory, policy: Policy, sampled: Sampling
) -> tuple[Callable[..., Any], Callable[..., dict[str, Any]]]:
  """What measures the theorem in a step.

  Returns:
    kept groups -> the probe and the function of the parameters that the update
      watches, None if nothing is measured; and
    (probe, state after the updates, their stats) -> metrics.
  """
  mass = jax.jit(_mass(policy, sampled))
  watched = mean_mass(policy, sampled)

  def probe_of(kept: types.Groups):
    if not c.prompts:
      return None, None
    probe = theory.probe(
      kept.prompts,
      kept.rollouts,
      kept.scores.reward,
      count=c.prompts,
      rows=theory.RESPONSES,
      tokens=theory.TOKENS,
    )
    return probe, jax.tree_util.Partial(watched, probe)

  def metrics(probe, state: types.State, stats: Sequence[Stats]):
    if probe is None:
      return theory.unmeasured()
    after = sharding.to_host(mass(probe, state.params))
    first_order = sum(float(s.watched) for s in stats)
    return theory.measure(probe, after, first_order)

  return probe_of, metrics


def reference_stage(c: Reference, tx) -> Callable[..., tuple]:
  """After a step: the policy becomes the reference when the config asks for it.

  Returns:
    (state, run state) -> state, run state, and the reason for the reset, None
    without one.
  """

  def after(state: types.State, progress: RunState):
    if state.reference is None:
      return state, progress, None
    progress = dataclasses.replace(
      progress, since_reset=progress.since_reset + 1
    )
    reason = run_state.reset_reason(
      progress, every=c.reset_every, stalled=c.reset_stalled
    )
    if reason is None:
      return state, progress, None
    state = states.reset_reference(state, tx, reset_optimizer=c.reset_optimizer)
    return state, run_state.was_reset(progress), reason

  return after
