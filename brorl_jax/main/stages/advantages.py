"""Stage 4: raw rewards -> the groups to keep and their advantages."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brorl_jax.config.learning import Advantage
from brorl_jax.config.reward import Reward
from brorl_jax.config.sampling import Filter, Sampling
from brorl_jax.main import functions
from brorl_jax.rl import advantages, length_penalty, stop_weight
from brorl_jax.runs.run_state import RunState
from brorl_jax.train import Credit
from brorl_jax.types import Groups


def counts(c: Reward, groups: Groups) -> Bool[np.ndarray, "P N"]:
  """The rollouts that count in baseline, whitening and loss."""
  if c.mask_truncated:
    return groups.scores.valid & ~groups.rollouts.truncated
  return groups.scores.valid


def filter_stage(
  c: Filter, reward: Reward, *, places: int
) -> Callable[[Groups], Bool[np.ndarray, " P"]]:
  """The rule of dynamic sampling, which sees raw rewards.

  Args:
    c: The rule.
    reward: Whether truncated rollouts count.
    places: Largest number of prompts that are scored at one time.

  Raises:
    ValueError: The config names no valid rule.
  """
  rule = jax.jit(functions.keep(c))

  def informative(groups: Groups) -> Bool[np.ndarray, " P"]:
    raw, valid = groups.scores.reward, counts(reward, groups)
    # Padded to one shape: each number of prompts would compile again. On the
    # CPU: the devices are busy with sampling.
    spare = [(0, max(places - len(raw), 0)), (0, 0)]
    padded = [np.pad(x, spare) for x in (raw, valid)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      return np.asarray(rule(*padded))[: len(raw)]

  return informative


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


def advantages_stage(
  c: Advantage, reward: Reward, sampled: Sampling
) -> Callable[[Groups, RunState], Credit]:
  """Stage 4: shaped rewards -> advantages over all kept groups.

  Args:
    c: The advantage.
    reward: Rewards for the length.
    sampled: How many rollouts prompts have, and their longest response.

  Raises:
    ValueError: The config names no valid advantage.
  """
  function, limit = weighted(c, sampled), sampled.max_new_tokens
  on, off = reward.length_steps

  def stage(groups: Groups, progress: RunState) -> Credit:
    if not len(groups.prompts.index):  # a mean over nothing is not finite
      none = np.zeros(groups.scores.reward.shape, np.float32)
      return Credit(none, none > 0, progress, {})
    active = bool(length_penalty.is_active(progress.shaped, on=on, off=off))
    paid, added = shaped(reward, groups, limit=limit, active=active)
    counted = counts(reward, groups)
    valid, drawn = jnp.asarray(counted), groups.rollouts.drawn
    length = jnp.asarray(groups.rollouts.mask).sum(axis=2, dtype=jnp.float32)
    advantage = np.where(counted, function(paid, valid, length), 0.0)
    if not np.isfinite(advantage).all():
      raise FloatingPointError(
        f"config.advantage.kind = {c.kind!r}: an advantage is not finite; "
        "check the function, or choose another kind"
      )
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
        "reward/masked_fraction": float(1.0 - valid.mean(where=drawn)),
      },
    )

  return stage


def weighted(c: Advantage, sampled: Sampling) -> advantages.Advantage:
  """The advantage, in which every prompt counts once, see rl/stop_weight.py."""
  function = functions.advantage(c)
  if not sampled.rounds:
    return function
  return functools.partial(
    stop_weight.pooled, function, whitened=c.kind in advantages.WHITENED
  )
