"""The loss of a microbatch, and what is measured with it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax.model import adapters
from brorl_jax.rl import corrections, losses
from brorl_jax.rl.arrays import Mean
from brorl_jax.rl.losses import PolicyLoss, log_ratio, per_token, policy_loss
from brorl_jax.types import Batch

# (params, prompt [P,S], its mask, response [P,M,T], temperature, trees or None)
# -> log-probabilities and entropies [P,M,T]
ResponseLogp = Callable[..., tuple[Array, Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Sums over a minibatch. `Mean`s of microbatches are added."""

  loss: Mean  # policy loss alone, in the mean that the config selects
  kl_ref: Mean  # k2 to the reference, nats per token; 0 without a reference
  kl_old: Mean  # k3 to the old policy, nats per token
  clip_fraction: Mean
  # Trainer against sampler before any update: k3 of KL(sampler || trainer), the
  # mean weight, and the share of cut weights. 0 without a correction.
  kl_sampler: Mean
  correction: Mean
  corrected: Mean
  entropy: Mean  # of the policy at the sampled positions, nats per token
  logp_gap: Mean  # |trainer - sampler| in nats; rounding, before any update
  logp_gap_old: Mean  # of tokens that were drawn in an earlier step
  logp_gap_max: Float[Array, ""]
  grad_norm: Float[Array, ""]  # before clipping
  # In tree order: of the gradient if skipped, else of the new parameters.
  finite: Bool[Array, " leaves"]
  skipped: Bool[Array, ""]  # the update changed nothing; see update._apply
  watched: Float[Array, ""]  # first-order change of `watch`; 0 without it

  @staticmethod
  def zero(params: PyTree) -> "Stats":
    """Statistics of no tokens: the start of a sum."""
    zero, none = jnp.zeros(()), Mean(jnp.zeros(()), jnp.zeros(()))
    zeros: dict[str, Any] = {
      x.name: none if x.type is Mean else zero
      for x in dataclasses.fields(Stats)
    }
    trained, _ = adapters.split(params)
    finite = jnp.ones(len(jax.tree.leaves(trained)), bool)
    zeros |= {"finite": finite, "skipped": jnp.zeros((), bool)}
    return Stats(**zeros)


class Correction(NamedTuple):
  """Importance weights for the gap between sampler and trainer."""

  kind: Literal["truncated", "banded", "sequence"]  # see rl/corrections.py
  low: float  # not used by "truncated"
  high: float


@dataclasses.dataclass(frozen=True)
class Objective:
  """Constants of the loss; hashable, so it can be a static argument."""

  clip_low: float
  clip_high: float
  kl_weight: float  # beta
  kl_clamp: float  # of the k2 term, nats per token
  temperature: float  # of the sampler
  loss: PolicyLoss = losses.LOSSES["ppo"]
  dual_clip: float = 0.0  # of "ppo"; 0: none
  entropy_weight: float = 0.0
  correction: Correction | None = None


def loss_and_stats(
  params: PyTree,
  micro: Batch,
  *,
  response_logp: ResponseLogp,
  objective: Objective,
) -> tuple[Float[Array, ""], Stats]:
  """Summed loss of one microbatch, to be divided by the minibatch's tokens.

    total = sum over tokens of weight * (scale * correction * loss + beta * k2
                                         - entropy_weight * entropy)

  If the unit of the loss is a sequence, its loss stands once for all of its
  tokens. `packing.loss_scale` gives the scales that turn the mean over tokens
  into another mean. The KL and entropy terms are always means over tokens.
  `micro` is a `Batch` without its leading axis; without `logp_ref` there is no
  KL term. Statistics have no gradient.
  """
  # Blocks and rows in one axis: every row counts alike, whatever its block.
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  mask, weight = flat(micro.mask), flat(micro.weight)
  sampled = flat(micro.logp_sampled)
  texts = micro.prompt, micro.prompt_mask, micro.response
  found = response_logp(params, *texts, objective.temperature, micro.trees)
  logp, entropy = map(flat, found)
  logp_old = sampled  # of the old policy, the denominator of the ratio
  if micro.logp_old is not None:
    logp_old = flat(micro.logp_old)
  elif objective.correction is not None:
    # With a single minibatch the old policy is this one: the ratio is 1, and
    # the correction alone accounts for the sampler.
    logp_old = jax.lax.stop_gradient(logp)
  weights, correction = _corrected(logp_old, sampled, mask, weight, objective)
  loss, ppo = policy_loss(
    objective.loss,
    logp,
    logp_old,
    flat(micro.advantage),
    mask,
    weight=weight,
    scale=None if micro.scale is None else flat(micro.scale),
    correction=weights,
    **{name: getattr(objective, name) for name in objective.loss.options},
  )
  total, kl_ref = loss.total, Mean(jnp.zeros(()), jnp.zeros(()))
  if micro.logp_ref is not None:
    kl_ref = losses.kl_k2(
      logp, flat(micro.logp_ref), mask, clamp=objective.kl_clamp, weight=weight
    )
    total += objective.kl_weight * kl_ref.total

  # A bug in the cache or the masks shows here first: float32 rounding is at
  # most 3e-5 nats, and bfloat16 .1.
  gap = jnp.where(mask, jnp.abs(logp - sampled), 0.0)
  weight_BT = per_token(weight, mask)
  entropy_mean = Mean.of(entropy, mask, weight_BT)
  if objective.entropy_weight:
    total -= objective.entropy_weight * entropy_mean.total
  old = mask & (False if micro.old is None else flat(micro.old))
  stats = dataclasses.replace(
    Stats.zero(params),
    **correction,
    loss=Mean(loss.total, entropy_mean.count),
    kl_ref=kl_ref,
    kl_old=ppo.approx_kl,
    clip_fraction=ppo.clip_fraction,
    entropy=entropy_mean,
    logp_gap=Mean.of(gap, mask, weight_BT),
    logp_gap_old=Mean.of(gap, old, weight_BT),
    logp_gap_max=jnp.max(gap),
  )
  return total, jax.lax.stop_gradient(stats)


def _corrected(
  logp_old, sampled, mask, weight, objective: Objective
) -> tuple[Array | None, dict[str, Mean]]:
  """The weights, and what is measured of them. By sequence, all tokens get the
  geometric mean of the sequence's ratios.
  """
  if objective.correction is None:
    return None, {}
  kind, low, high = objective.correction
  gap, logp = log_ratio(logp_old, sampled), logp_old
  if by_sequence := objective.loss.unit == "sequence":
    mean = losses.sequence_log_ratio(logp, sampled, mask)
    logp, sampled = jnp.where(mask, mean[:, None], 0.0), jnp.zeros_like(logp)
  plain = corrections.truncated_weight(logp, sampled, cap=math.inf)
  if kind == "truncated":
    weights = corrections.truncated_weight(logp, sampled, cap=high)
  elif kind == "banded":
    weights = corrections.banded_weight(logp, sampled, low=low, high=high)
  else:
    keep = corrections.sequence_mask(logp, sampled, mask, low=low, high=high)
    weights = jnp.where(keep[:, None], plain, 0.0)
  mean = functools.partial(Mean.of, where=mask, weight=per_token(weight, mask))
  means = {
    "kl_sampler": mean(jnp.exp(gap) - 1.0 - gap),
    "correction": mean(weights),
    "corrected": mean((weights != plain).astype(jnp.float32)),
  }
  if by_sequence:  # all tokens of a sequence have the same weight
    weights = jnp.max(weights, axis=1, where=mask, initial=0.0)
  return weights, means
