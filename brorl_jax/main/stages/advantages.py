"""Stage 4: raw rewards -> the groups to keep and their advantages."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brorl_jax.main import functions
from brorl_jax.main.stages import sampling
from brorl_jax.rl import (
  advantages,
  credit,
  filtering,
  length_penalty,
  stop_weight,
  stopping,
  subset,
)
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import run_state
from brorl_jax.runs.run_state import RunState
from brorl_jax.runs.sections.advantage import Advantage
from brorl_jax.runs.sections.filter import Filter
from brorl_jax.runs.sections.reward import Reward
from brorl_jax.runs.sections.sampling import Sampling
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
  rule = functions.keep(c)
  band = functools.partial(
    filtering.mean_inside, low=c.keep_above, high=c.keep_below
  )
  banded = (c.keep_above, c.keep_below) != (0.0, 1.0)

  @jax.jit
  def both(reward, valid):
    kept = rule(reward, valid)
    return kept & band(reward, valid=valid) if banded else kept

  def informative(groups: Groups) -> Bool[np.ndarray, " P"]:
    raw, valid = groups.scores.reward, counts(reward, groups)
    # Padded to one shape: each number of prompts would compile again. On the
    # CPU: the devices are busy with sampling.
    spare = [(0, max(places - len(raw), 0)), (0, 0)]
    padded = [np.pad(x, spare) for x in (raw, valid)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      return np.asarray(both(*padded))[: len(raw)]

  return informative


def visit_stage(
  c: Filter, sampled_by: Sampling
) -> Callable[[RunState, int, SampledGroups], RunState]:
  """Updates which prompts rest, and what the next step may draw of each.

  See filter.rest_after and sampling.allocation.
  """
  remembered = sampling.after_step(sampled_by)

  def visited(
    progress: RunState, step: int, sampled: SampledGroups
  ) -> RunState:
    progress = remembered(progress, sampled.groups)
    return run_state.visited(
      progress,
      step,
      sampled.groups.prompts.index.tolist(),
      sampled.kept.tolist(),
      rest_after=c.rest_after,
      rest_steps=c.rest_steps,
    )

  return visited


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
    shared = shared_credit(c, groups, paid, valid)
    length = jnp.asarray(groups.rollouts.mask).sum(axis=2, dtype=jnp.float32)
    advantage = function(shared, valid, length, groups, progress)
    advantage, trained = _chosen(c, groups, advantage, counted, progress)
    if not np.isfinite(advantage).all():
      raise FloatingPointError(
        f"config.advantage.kind = {c.kind!r}: an advantage is not finite; "
        "check the function, or choose another kind"
      )
    if reward.length_weight:  # its schedule starts when it is first on
      progress = dataclasses.replace(progress, shaped=progress.shaped + 1)
    return Credit(
      advantage,
      trained,
      progress,
      {
        "reward/shaped_mean": float(paid.mean(where=drawn)),
        "reward/length_mean": float(added.mean(where=drawn)),
        "reward/length_active": float(active and bool(reward.length_weight)),
        "reward/masked_fraction": float(1.0 - valid.mean(where=drawn)),
        "advantage/trained_fraction": float(trained.sum() / counted.sum()),
        **hidden_weights(sampled, groups, progress),
      },
    )

  return stage


def weighted(c: Advantage, sampled: Sampling) -> Callable[..., jax.Array]:
  """(reward, valid, length, groups, run state) -> advantages.

  See rl/stop_weight.py.
  """
  function = functions.advantage(c)
  whitened = c.kind in advantages.WHITENED

  def weigh(reward, valid, length, groups: Groups, progress: RunState):
    if sampled.allocation == "fixed":
      return function(reward, valid, length)
    rounds = sampling.rounds_of(sampled, progress.most_before)
    if c.stop_weight == "rounds":
      return stop_weight.by_round(
        function, reward, valid, length, rounds=rounds
      )
    out = stop_weight.pooled(function, reward, valid, length, whitened=whitened)
    if c.stop_weight == "pooled":
      return out
    ratio = [
      stopping.correction(rounds, right=right, drawn=drawn)
      for right, drawn in counted_ends(groups)
    ]
    return out * np.asarray(ratio, np.float32)[:, None]

  return weigh


def _chosen(
  c: Advantage,
  groups: Groups,
  advantage: Float[Array, "P N"],
  counted: Bool[np.ndarray, "P N"],
  progress: RunState,
) -> tuple[Float[np.ndarray, "P N"], Bool[np.ndarray, "P N"]]:
  """Advantages of the rollouts that are trained on, and which they are.

  The loss is a mean over what is trained on. A prompt with n rollouts of which
  m stand for it gets a factor n / m, over the same of all prompts together.
  """
  all_in = np.where(counted, advantage, 0.0)
  if not c.train_on:
    return all_in, counted
  choose = functools.partial(subset.CHOOSE[c.choose], m=c.train_on)
  # Another draw in each step, the same after a resume.
  key, count = jax.random.key(progress.samples % 2**31), jnp.asarray(counted)
  if c.choose == "random":
    some, weight = choose(count, key)
  elif c.choose == "different":
    some, weight = choose(jnp.asarray(groups.rollouts.alike()), count, key)
  else:
    some, weight = choose(jnp.asarray(groups.scores.reward), count)
  chosen, n = np.asarray(some), counted.sum(axis=1, keepdims=True)
  m = chosen.sum(axis=1, keepdims=True)
  factor = n / np.maximum(m, 1) * (m.sum() / n.sum())
  out = all_in * np.asarray(weight) * factor
  return out.astype(np.float32), chosen


def counted_ends(groups: Groups) -> list[tuple[int, int]]:
  """Right rollouts of each prompt, and all."""
  of = lambda some: some.sum(axis=1).tolist()
  return [*zip(of(groups.right), of(groups.rollouts.drawn), strict=True)]


def hidden_weights(
  sampled: Sampling, groups: Groups, progress: RunState
) -> dict[str, float | None]:
  """How much too large the weights of prompts are, by their pass rate.

  The sum of K (n - K) / n (n - 1) over that of its unbiased estimate, in each
  tenth; None where there is no prompt.
  """
  if sampled.allocation != "stop":
    return {}
  rounds = sampling.rounds_of(sampled, progress.most_before)
  sums = np.zeros((10, 2))
  for right, drawn in counted_ends(groups):
    biased = right * (drawn - right) / (drawn * (drawn - 1))
    ratio = stopping.correction(rounds, right=right, drawn=drawn)
    sums[min(10 * right // drawn, 9)] += biased, biased * ratio
  return {
    f"advantage/hidden_weight/below_{10 * i + 10}": float(a / b) if b else None
    for i, (a, b) in enumerate(sums)
  }


def shared_credit(
  c: Advantage,
  groups: Groups,
  reward: Float[Array, "P N"],
  valid: Bool[Array, "P N"],
) -> Float[Array, "P N"]:
  """Rewards after the correct rollouts of a group shared their credit."""
  if c.credit == "equal":
    return reward
  answer = jnp.asarray(groups.scores.answer)
  correct = jnp.asarray(groups.right)
  factor = credit.credit_by_answer(answer, correct, valid)
  return credit.share_credit(reward, factor, valid)
