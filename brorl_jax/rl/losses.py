"""Policy losses. Every loss is a `Mean`; the caller divides."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl.mean import Mean

_MAX_LOG_RATIO = 20.0  # nats; ratios beyond e^20 are numerics, not policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PpoStats:
  """What to look at when the loss looks wrong. Gradients are stopped."""

  # What the clip takes the gradient from, in [0, 1]: tokens, or sequences if
  # these are what the loss counts.
  clip_fraction: Mean
  approx_kl: Mean  # k3 estimate of KL(old || new), nats per token


def ppo_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  weight: Float[Array, " B"] | None = None,
  dual_clip: float | None = None,
  correction: Float[Array, "B T"] | None = None,
) -> tuple[Mean, PpoStats]:
  """Clipped surrogate with separate lower and upper clip.

    loss[b,t] = -min(rho * A[b], clip(rho, 1 - clip_low, 1 + clip_high) * A[b])
    rho       = exp(logp[b,t] - logp_old[b,t])

  With a dual clip the loss is at most -dual_clip * A[b] where A[b] < 0: a bad
  token that became much likelier gets no gradient either.

  Args:
    logp: Log-probability of the sampled token under the current parameters.
    logp_old: The same under the parameters that sampled it. Constant.
    advantage: One advantage for the whole sequence. Constant.
    mask: True on tokens the policy chose, the end-of-sequence token included.
    clip_low: How far rho may fall below 1 and still get a gradient.
    clip_high: How far rho may rise above 1 and still get a gradient.
    weight: How often each sequence counts; once if None. Identical rollouts of
      a group have equal advantage and log-probability, so that one of them
      with weight c is exactly c of them.
    dual_clip: How many times its advantage the loss of a bad token may be; it
      may be any number if None.
    correction: Multiplies the loss of each token; 1 if None. Constant. A token
      with correction 0 still counts in the mean. See `corrections`.

  Returns:
    The loss over valid tokens, to be minimised, and diagnostics.

  Raises:
    ValueError: `dual_clip` is not above 1.

  References:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.1: clip_high > clip_low.
    Ye et al. 2020, arXiv:1912.09729: the dual clip.
  """
  if dual_clip is not None and dual_clip <= 1.0:
    raise ValueError(
      f"dual_clip = {dual_clip} is not above 1, the ratio at rest"
    )
  logp_old, advantage = jax.lax.stop_gradient((logp_old, advantage))
  # Off-mask logits may be anything; a 0 log-ratio keeps exp finite there.
  log_ratio_BT = jnp.where(mask, log_ratio(logp, logp_old), 0.0)
  ratio_BT = jnp.exp(log_ratio_BT)
  adv_B1 = advantage[:, None]
  weight_BT = per_token(weight, mask)

  value_BT, clipped_BT = _surrogate(ratio_BT, adv_B1, clip_low, clip_high)
  if dual_clip is not None:
    floor_BT = jnp.where(adv_B1 < 0.0, dual_clip * adv_B1, -jnp.inf)
    clipped_BT |= value_BT < floor_BT
    value_BT = jnp.maximum(value_BT, floor_BT)
  if correction is not None:
    value_BT *= jnp.where(mask, jax.lax.stop_gradient(correction), 0.0)
  loss = Mean.of(-value_BT, mask, weight_BT)

  stats = PpoStats(
    clip_fraction=Mean.of(clipped_BT.astype(jnp.float32), mask, weight_BT),
    approx_kl=Mean.of(ratio_BT - 1.0 - log_ratio_BT, mask, weight_BT),
  )
  return loss, jax.lax.stop_gradient(stats)


def gspo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  weight: Float[Array, " B"] | None = None,
  correction: Float[Array, " B"] | None = None,
) -> tuple[Mean, PpoStats]:
  """`ppo_clip` with one ratio, one clip and one count for each sequence.

    loss[b] = -min(s * A[b], clip(s, 1 - clip_low, 1 + clip_high) * A[b])
    s       = exp(mean over valid t of logp[b,t] - logp_old[b,t])

  The mean makes s vary far less than the ratio of a token, and the clip must be
  narrower: the paper has 3e-4 and 4e-4.

  Args:
    logp: Log-probability of the sampled token under the current parameters.
    logp_old: The same under the parameters that sampled it. Constant.
    advantage: One advantage for the whole sequence. Constant.
    mask: True on tokens the policy chose. A sequence of none does not count.
    clip_low: How far s may fall below 1 and still get a gradient.
    clip_high: How far s may rise above 1 and still get a gradient.
    weight: How often each sequence counts; once if None.
    correction: Multiplies the loss of each sequence; 1 if None. Constant.

  Returns:
    The loss over sequences, to be minimised, and diagnostics: the clip
    fraction over sequences, the KL over valid tokens.

  References:
    Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 to 7.
  """
  logp_old, advantage = jax.lax.stop_gradient((logp_old, advantage))
  some_B = jnp.any(mask, axis=1)
  ratio_B = jnp.exp(sequence_log_ratio(logp, logp_old, mask))
  value_B, clipped_B = _surrogate(ratio_B, advantage, clip_low, clip_high)
  if correction is not None:
    value_B *= jnp.where(some_B, jax.lax.stop_gradient(correction), 0.0)
  loss = Mean.of(-value_B, some_B, weight)

  gap_BT = jnp.where(mask, log_ratio(logp, logp_old), 0.0)
  k3_BT = jnp.exp(gap_BT) - 1.0 - gap_BT
  stats = PpoStats(
    clip_fraction=Mean.of(clipped_B.astype(jnp.float32), some_B, weight),
    approx_kl=Mean.of(k3_BT, mask, per_token(weight, mask)),
  )
  return loss, jax.lax.stop_gradient(stats)


def _surrogate(ratio, advantage, clip_low, clip_high):
  """What the clip leaves of ratio * advantage, and where it holds it."""
  free = ratio * advantage
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
  return jnp.minimum(free, held), held < free


def log_ratio(
  logp: Float[Array, "*axes"], other: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
  """logp - other, in nats, at most 20 either way."""
  # exp overflows float32 at 88 nats, and 0 * inf in the gradient is NaN.
  return jnp.clip(logp - other, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_log_ratio(
  logp: Float[Array, "B T"],
  other: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
  """Mean of `log_ratio` over valid tokens; 0 for a sequence of none."""
  total_B = jnp.sum(log_ratio(logp, other), axis=1, where=mask)
  return total_B / jnp.maximum(jnp.sum(mask, axis=1), 1)


def kl_k2(
  logp: Float[Array, "B T"],
  logp_ref: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  clamp: float,
  weight: Float[Array, " B"] | None = None,
) -> Mean:
  """The k2 estimate of KL(policy || reference) as a loss of its own.

    k2[b,t] = min(1/2 * (logp[b,t] - logp_ref[b,t])^2, clamp)

  On policy, below the clamp, its gradient is that of the reverse KL, which is
  not true of the popular k3 estimate used as a loss.

  Args:
    logp: Log-probability of the sampled token under the current parameters.
    logp_ref: The same under the reference policy. Constant.
    mask: True on tokens the policy chose.
    clamp: What a token counts at most, in nats. Beyond a log-ratio of
      sqrt(2 * clamp), 4.5 nats for a clamp of 10, it gets no gradient.
    weight: How often each sequence counts; once if None.

  References:
    Schulman 2020, "Approximating KL divergence" (k1, k2, k3).
    ProRL v2: k2 clamped to 10. The released recipes clamp the log-ratio to 20
    nats and the value to 10.
  """
  gap_BT = log_ratio(logp, jax.lax.stop_gradient(logp_ref))
  k2_BT = jnp.minimum(0.5 * jnp.where(mask, gap_BT, 0.0) ** 2, clamp)
  return Mean.of(k2_BT, mask, per_token(weight, mask))


def per_token(
  weight: Float[Array, " B"] | None, mask: Bool[Array, "B T"]
) -> Float[Array, "B T"] | None:
  """Spreads one weight per sequence over its tokens."""
  if weight is None:
    return None
  return jnp.broadcast_to(weight[:, None], mask.shape)


def token_logp(
  logits: Float[Array, "*axes V"], tokens: Int[Array, "*axes"]
) -> tuple[Float[Array, "*axes"], Float[Array, "*axes"]]:
  """Log-probability of `tokens` and entropy of the distribution, in nats."""
  logp = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)
