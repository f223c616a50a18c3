"""Stage 4: raw rewards -> the groups to keep and their advantages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brorl_jax.config.learning import Reward
from brorl_jax.plan.resolve import Phase
from brorl_jax.rl import length_penalty
from brorl_jax.types import Credit, Groups, RunState


def counts(c: Reward, groups: Groups) -> Bool[np.ndarray, "P N"]:
  """The rollouts that count in baseline, whitening and loss."""
  if c.mask_truncated:
    return groups.scores.valid & ~groups.rollouts.truncated
  return groups.scores.valid


def informative(phase: Phase, groups: Groups) -> Bool[np.ndarray, " P"]:
  """The rule of dynamic sampling, which sees raw rewards."""
  raw, valid = groups.scores.reward, counts(phase.config.reward, groups)
  # On the CPU: the devices are busy with sampling.
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    return np.asarray(phase.keep(raw, valid))


def shaped(
  c: Reward, groups: Groups, *, limit: int, active: bool
) -> tuple[Float[Array, "P N"], Float[Array, "P N"]]:
  """Shaped rewards for the advantages, and the part for the length.

  r' = r * (truncated ? truncated_factor : 1)
       + length_weight * cosine + overlong_weight * overlong

  `limit` is the longest response, in tokens.
  """
  rollouts, reward = groups.rollouts, jnp.asarray(groups.scores.reward)
  length = jnp.asarray(rollouts.mask).sum(axis=2)
  factor = jnp.where(rollouts.truncated, c.truncated_factor, 1.0)
  added = jnp.zeros_like(reward)
  if c.length_weight and active:
    cosine = length_penalty.cosine(
      length, limit=limit, eta_min=c.length_min, eta_max=c.length_max
    )
    added += c.length_weight * jnp.where(reward >= 1.0, cosine, 0.0)
  if c.overlong_weight:
    added += c.overlong_weight * length_penalty.overlong(
      length, limit=limit, buffer=c.overlong_buffer
    )
  return reward * factor + added, added


def credit(phase: Phase, groups: Groups, progress: RunState) -> Credit:
  """Stage 4: shaped rewards -> advantages over all kept groups."""
  c, reward = phase.config, phase.config.reward
  if not len(groups.prompts.index):  # a mean over nothing is not finite
    none = np.zeros(groups.scores.reward.shape, np.float32)
    return Credit(none, none > 0, progress, {})
  on, off = reward.length_steps
  active = bool(length_penalty.is_active(progress.shaped, on=on, off=off))
  paid, added = shaped(
    reward, groups, limit=c.sampling.max_new_tokens, active=active
  )
  counted = counts(reward, groups)
  valid, drawn = jnp.asarray(counted), groups.rollouts.drawn
  length = jnp.asarray(groups.rollouts.mask).sum(axis=2, dtype=jnp.float32)
  advantage = np.where(counted, phase.advantage(paid, valid, length), 0.0)
  if not np.isfinite(advantage).all():
    raise FloatingPointError(
      f"config.advantage.kind = {c.advantage.kind!r}: an advantage is not "
      "finite; check the function, or choose another kind"
    )
  right = (advantage * groups.right).sum()
  if reward.length_weight:  # its schedule starts when it is first on
    progress = dataclasses.replace(progress, shaped=progress.shaped + 1)
  return Credit(
    advantage,
    counted,
    progress,
    {
      "reward/shaped_mean": float(paid.mean(where=drawn)),
      "reward/length_mean": float(added.mean(where=drawn)),
      "reward/length_active": float(active and bool(reward.length_weight)),
      # What `stats.coefficient` of the report expects.
      "theory/coefficient": float(right / drawn.sum()),
      "reward/masked_fraction": float(1.0 - valid.mean(where=drawn)),
    },
  )
