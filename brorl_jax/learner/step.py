"""The updates of one step: minibatches of groups, one update for each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, PyTree

from brorl_jax.learner import packing, update
from brorl_jax.learner.objective import Objective, ResponseLogp, Stats
from brorl_jax.many import meshes
from brorl_jax.model import sharding
from brorl_jax.types import Batch, Groups, State

Minibatches = list[list[Batch]]  # the batches of each minibatch


def minibatches(
  kept: Groups,
  advantage: Float[np.ndarray, "P N"],
  counted: Bool[np.ndarray, "P N"],
  layout: packing.Layout,
  *,
  count: int,
  seed: tuple[int, int],
  scale: Callable[[np.ndarray], np.ndarray | None],
) -> Minibatches:
  """Shuffles whole groups into minibatches and packs them, on the host.

  Args:
    counted: False for rollouts that are left out of the loss. They become
      empty, so that packing drops all of them but one.
    scale: From the lengths of a minibatch to the factors of its losses, see
      `packing.loss_scale`.
  """
  keep, rollouts = counted[..., None], kept.rollouts
  if not keep.all():  # otherwise this would copy gigabytes of long rollouts
    rollouts = dataclasses.replace(
      rollouts,
      tokens=np.where(keep, rollouts.tokens, 0),
      mask=rollouts.mask & keep,
    )
  out = []
  for at in packing.split(len(counted), count, seed):
    take = functools.partial(jax.tree.map, lambda x, at=at: x[at])
    prompts, part = take(kept.prompts), take(rollouts)
    factors = scale(part.mask.sum(axis=2))
    out.append(packing.pack(prompts, part, advantage[at], layout, factors))
  return out


def scored(
  parts: Minibatches,
  state: State,
  mesh: Mesh,
  *,
  logp_of: Callable[[PyTree, Batch], jax.Array],
  kl_term: bool,
) -> Minibatches:
  """Batches with the log-probabilities that the loss needs, on the host.

  One batch at a time is on the devices.

  Args:
    state: Before the first update of the step.
    logp_of: (parameters, batch) -> log-probabilities of the responses.
    kl_term: Whether the loss compares with the reference.
  """
  of = {}
  # From the second minibatch on the policy is not the one that sampled.
  if len(parts) > 1:
    of["logp_old"] = state.params
  if kl_term and state.reference is not None:
    of["logp_ref"] = sharding.on_device(state.reference)

  def score(batch: Batch) -> Batch:
    there = placed(batch, mesh)
    logp = {
      name: sharding.to_host(logp_of(at, there)) for name, at in of.items()
    }
    return dataclasses.replace(batch, **logp)

  return [[score(batch) for batch in part] for part in parts] if of else parts


def placed(batch: Batch, mesh: Mesh) -> Batch:
  """A batch of the host on the mesh: blocks are spread over its rows."""
  spread = lambda x: PartitionSpec(*(None, meshes.rows(mesh))[: x.ndim])
  return jax.tree.map(lambda x: sharding.to_mesh(mesh, spread(x), x), batch)


def apply(
  state: State,
  parts: Minibatches,
  mesh: Mesh,
  *,
  tx: optax.GradientTransformation,
  response_logp: ResponseLogp,
  objective: Objective,
  watch: Callable[[PyTree], jax.Array] | None,
  most_norm: float = math.inf,
) -> tuple[State, list[Stats]]:
  """One optimizer update per minibatch; see `update.minibatch_step`.

  A batch is placed when its turn comes: those of 128 x 512 rollouts of 15,360
  tokens are 17 GB.
  """
  stats = []
  for part in parts:
    state, of_part = update.minibatch_step(
      state,
      (placed(batch, mesh) for batch in part),
      tx=tx,
      response_logp=response_logp,
      objective=objective,
      watch=watch,
      most_norm=most_norm,
    )
    stats.append(of_part)
  return dataclasses.replace(state, step=state.step + 1), stats


def skipped(
  stats: Sequence[Stats], params: PyTree, step: int
) -> tuple[str, ...]:
  """Why each update of a step that was skipped was.

  Raises:
    FloatingPointError: An update that was applied made a parameter that is not
      finite. The state must not be saved.
  """
  found = []
  for i, of_part in enumerate(stats):
    path = update.first_bad_path(params, sharding.to_host(of_part.finite))
    if not of_part.skipped:
      if path is not None:
        raise FloatingPointError(
          f"step {step}: {path} is not finite after the update; lower "
          "config.optim.lr"
        )
      continue
    norm, loss = float(of_part.grad_norm), float(of_part.loss.value)
    why = f"its norm is {norm:.3g}, a spike"
    if not math.isfinite(of_part.logp_gap_max):
      why = "a log-probability of sampler or trainer is not finite"
    elif not math.isfinite(loss):
      why = f"the loss is {loss}"
    elif path is not None:
      why = f"that of {path} is not finite"
    elif not math.isfinite(norm):
      why = f"its norm is {norm}"
    found.append(f"the gradient of update {i + 1} was not applied: {why}")
  return tuple(found)


def packing_metrics(parts: Minibatches, rollouts: int) -> dict[str, float]:
  """How much packing saved and how much of the batches is padding.

  Args:
    rollouts: That count in the loss.
  """
  batches = [batch for part in parts for batch in part]
  weights = [batch.weight * batch.mask.any(axis=-1) for batch in batches]
  rows = sum(map(np.count_nonzero, weights))  # empty rows do not count
  return {
    "update/distinct_fraction": rows / max(rollouts, 1),
    "update/padding_fraction": packing.padding_fraction(batches),
  }


def _mean(stats: Sequence[Stats], name: str) -> float | None:
  """The mean over the updates that were applied; None if none was."""
  values = [getattr(s, name) for s in stats if not s.skipped]
  values = [getattr(x, "value", x) for x in values]
  return float(np.mean(values)) if values else None


def update_metrics(
  stats: Sequence[Stats], objective: Objective
) -> dict[str, float | None]:
  """Metrics of a step's updates."""
  mean = functools.partial(_mean, stats)
  kl = mean("kl_ref") if objective.kl_weight else None
  # A user's own loss may not count clipped tokens.
  clips = all(s.clip_fraction.count > 0 for s in stats)
  if (total := mean("loss")) is not None:
    total += objective.kl_weight * (kl or 0.0)
    total -= objective.entropy_weight * (mean("entropy") or 0.0)
  # The sampler against the trainer, with the parameters that sampled.
  corrected = {
    f"correction/{name}": mean(field) if objective.correction else None
    for name, field in (
      ("weight_mean", "correction"),
      ("changed_fraction", "corrected"),
      ("kl_sampler", "kl_sampler"),
    )
  }
  return {
    "policy/entropy": mean("entropy"),
    "policy/kl_ref": kl,
    "policy/kl_old": mean("kl_old"),
    "policy/clip_fraction": mean("clip_fraction") if clips else None,
    # Before the first update trainer and sampler have the same parameters, and
    # the gap is rounding; with config.run.pipeline it is also one step of
    # training.
    "policy/logp_gap_max": float(stats[0].logp_gap_max),
    "policy/logp_gap_mean": float(stats[0].logp_gap.value),
    **corrected,
    "loss/total": total,
    "optim/grad_norm": mean("grad_norm"),
    "update/skipped": float(sum(bool(s.skipped) for s in stats)),
  }
