"""Stage 4: raw rewards -> which groups are kept, and their advantages."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brorl_jax import ledger as ledgers
from brorl_jax.collect import Drawn
from brorl_jax.ledger import Ledger
from brorl_jax.main.settings import Config
from brorl_jax.rl import advantages, filtering, length_penalty
from brorl_jax.train import Credit
from brorl_jax.types import Groups


def counts(c: Config, groups: Groups) -> Bool[np.ndarray, "P N"]:
  """Rollouts that baseline, whitening and loss count."""
  if c.mask_truncated:
    return groups.scores.valid & ~groups.rollouts.truncated
  return groups.scores.valid


def filter_stage(c: Config) -> Callable[[Groups], Bool[np.ndarray, " P"]]:
  """Dynamic sampling's rule, on raw rewards whatever is added to them later."""
  rule = {
    "differ": advantages.informative,
    "mean": functools.partial(filtering.mean_inside, low=0.0, high=1.0),
    "solved": filtering.partly_solved,
    "all": lambda reward, valid: jnp.ones(len(reward), bool),
  }[c.keep]
  band = functools.partial(
    filtering.mean_inside, low=c.keep_above, high=c.keep_below
  )
  banded = (c.keep_above, c.keep_below) != (0.0, 1.0)

  @jax.jit
  def both(reward, valid):
    kept = rule(reward, valid=valid)
    return kept & band(reward, valid=valid) if banded else kept

  def informative(groups: Groups) -> Bool[np.ndarray, " P"]:
    reward, valid = groups.scores.reward, counts(c, groups)
    # One shape, or each number of prompts would be compiled; and on the host,
    # or it would wait for what the devices sample.
    spare = [(0, max(c.in_flight // c.n - len(reward), 0)), (0, 0)]
    padded = [np.pad(x, spare) for x in (reward, valid)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      return np.asarray(both(*padded))[: len(reward)]

  return informative


def visit_stage(c: Config) -> Callable[[Ledger, int, Drawn], Ledger]:
  """What is remembered of prompts that come again."""

  def visited(ledger: Ledger, step: int, drawn: Drawn) -> Ledger:
    return ledgers.visited(
      ledger,
      step,
      drawn.groups.prompts.index.tolist(),
      drawn.kept.tolist(),
      rest_after=c.rest_after,
      rest_steps=c.rest_steps,
    )

  return visited


def shaped(
  c: Config, groups: Groups, *, active: bool
) -> tuple[Float[Array, "P N"], Float[Array, "P N"]]:
  """Rewards that the advantages see, and the length reward in them.

  r' = r * (truncated ? truncated_factor : 1)
       + length_weight * cosine + overlong_weight * overlong
  """
  rollouts, reward = groups.rollouts, jnp.asarray(groups.scores.reward)
  length = jnp.asarray(rollouts.mask).sum(axis=2)
  factor = jnp.where(rollouts.truncated, c.truncated_factor, 1.0)
  limit, added = c.max_new_tokens, jnp.zeros_like(reward)
  if c.length_weight and active:
    cosine = length_penalty.cosine(
      length, limit=limit, eta_min=c.length_min, eta_max=c.length_max
    )
    gets = jnp.ones_like(reward, bool) if c.length_wrong else reward >= 1.0
    added += c.length_weight * jnp.where(gets, cosine, 0.0)
  if c.overlong_weight:
    added += c.overlong_weight * length_penalty.overlong(
      length, limit=limit, buffer=c.overlong_buffer
    )
  return reward * factor + added, added


def advantages_stage(c: Config) -> Callable[[Groups, Ledger], Credit]:
  """Stage 4: shaped rewards -> advantages over all kept groups."""

  def stage(groups: Groups, ledger: Ledger) -> Credit:
    active = bool(
      length_penalty.is_active(ledger.shaped, on=c.length_on, off=c.length_off)
    )
    reward, added = shaped(c, groups, active=active)
    valid = jnp.asarray(counts(c, groups))
    found = advantages.center_by_group(reward, valid)
    found *= credit_factor(c, groups, valid)
    where = advantages.informative(reward, valid)
    length = jnp.asarray(groups.rollouts.mask).sum(axis=2, dtype=jnp.float32)
    found = {
      "tokens": lambda: advantages.whiten_by_batch(
        found, jnp.where(valid, length, 0.0), where
      ),
      "trajectories": lambda: advantages.whiten_by_trajectory(
        found, where, valid
      ),
      "grpo": lambda: advantages.normalize_by_group(found, valid),
      "centered": lambda: found,
    }[c.advantage]()
    if c.length_weight:  # its own count, so that it starts with the penalty
      ledger = dataclasses.replace(ledger, shaped=ledger.shaped + 1)
    return Credit(
      np.asarray(found),
      np.asarray(valid),
      ledger,
      {
        "reward/shaped_mean": float(reward.mean()),
        "reward/length_mean": float(added.mean()),
        "reward/length_active": float(active and bool(c.length_weight)),
        "reward/masked_fraction": float(1.0 - valid.mean()),
      },
    )

  return stage


def credit_factor(
  c: Config, groups: Groups, valid: Bool[Array, "P N"]
) -> Float[Array, "P N"]:
  """How the correct rollouts of a group share their credit.

  Advantages of a group still add up to 0 if correct ones have equal rewards,
  which a length reward changes.
  """
  correct = jnp.asarray(groups.scores.reward >= 1.0)
  if c.credit == "distinct":
    answer = jnp.asarray(groups.scores.answer)
    return advantages.credit_by_answer(answer, correct, valid)
  if c.credit == "inverse":
    logp = jnp.asarray(groups.rollouts.logp.sum(axis=2))
    return advantages.credit_by_probability(logp, correct, valid)
  return jnp.ones(correct.shape)
