"""Stage 4: raw rewards -> the groups to keep and their advantages."""

import dataclasses
import functools

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

  r' = r * (truncated ? truncated_factor : 1) + part
  part: what config.reward.length adds, less repeat_penalty for each repetition

  With 'replace' the part is also what the other reward makes of r. `limit` is
  the longest response, in tokens.
  """
  rollouts, reward = groups.rollouts, jnp.asarray(groups.scores.reward)
  length = jnp.asarray(rollouts.mask).sum(axis=2)
  factor = jnp.where(rollouts.truncated, c.truncated_factor, 1.0)
  added, right = jnp.zeros_like(reward), reward >= 1.0
  low, high = c.length_range
  falls = functools.partial(length_penalty.cosine, length, limit=limit)
  if c.length == "cosine" and active:
    added = jnp.where(right, falls(eta_min=low, eta_max=high), 0.0)
  elif c.length == "replace" and active:
    wrong = falls(eta_min=0.0, eta_max=low)
    paid = jnp.where(right, falls(eta_min=0.5, eta_max=high), wrong)
    added = (paid - reward) * factor
  elif c.length == "overlong":
    over = length_penalty.overlong(length, limit=limit, buffer=c.length_buffer)
    added = high + (high - low) * over
  penalty, ngram = c.repeat_penalty
  if penalty and active:  # by prompt, as sorting takes memory
    each = zip(rollouts.tokens, rollouts.mask, strict=True)
    count = functools.partial(length_penalty.repeats, size=ngram)
    added -= penalty * jnp.stack([count(*of) for of in each])
  return reward * factor + added, added


def credit(phase: Phase, groups: Groups, progress: RunState) -> Credit:
  """Stage 4: shaped rewards -> advantages over all kept groups."""
  c, reward = phase.config, phase.config.reward
  if not len(groups.prompts.index):  # a mean over nothing is not finite
    none = np.zeros(groups.scores.reward.shape, np.float32)
    return Credit(none, none > 0, progress, {})
  on, off = reward.length_steps
  active = bool(length_penalty.is_active(progress.shaped, on=on, off=off))
  limit = c.sampling.max_new_tokens
  paid, added = shaped(reward, groups, limit=limit, active=active)
  counted = counts(reward, groups)
  valid, drawn = jnp.asarray(counted), groups.rollouts.drawn
  length = jnp.asarray(groups.rollouts.mask).sum(axis=2, dtype=jnp.float32)
  advantage = np.where(counted, phase.advantage(paid, valid, length), 0.0)
  if not np.isfinite(advantage).all():
    kind = f"config.advantage.kind = {c.advantage.kind!r}"
    must = "check the function, or choose another kind"
    raise FloatingPointError(f"{kind}: an advantage is not finite; {must}")
  right = (advantage * groups.right).sum()
  if boost := c.advantage.boost:
    advantage = np.where(counted & groups.right, advantage + boost, advantage)
  if reward.scheduled:  # its schedule starts when it is first on
    progress = dataclasses.replace(progress, shaped=progress.shaped + 1)
  metrics: dict[str, float | None] = {
    "reward/shaped_mean": float(paid.mean(where=drawn)),
    "reward/length_mean": float(added.mean(where=drawn)),
    "reward/length_active": float(active and reward.scheduled),
    # What `stats.coefficient` of the report expects.
    "theory/coefficient": float(right / drawn.sum()),
    "reward/masked_fraction": float(1.0 - valid.mean(where=drawn)),
  }
  return Credit(advantage, counted, progress, metrics)
