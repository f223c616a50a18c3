"""Token-level policy losses. Every loss is a `Mean`; the caller divides."""

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

  clip_fraction: Mean  # tokens whose gradient the clip removes, in [0, 1]
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
) -> tuple[Mean, PpoStats]:
  """Clipped surrogate with separate lower and upper clip.

    loss[b,t] = -min(rho * A[b], clip(rho, 1 - clip_low, 1 + clip_high) * A[b])
    rho       = exp(logp[b,t] - logp_old[b,t])

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

  Returns:
    The loss over valid tokens, to be minimised, and diagnostics.

  References:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.1: clip_high > clip_low.
  """
  logp_old, advantage = jax.lax.stop_gradient((logp_old, advantage))
  # Off-mask logits may be anything; a 0 log-ratio keeps exp finite there.
  log_ratio_BT = jnp.where(mask, logp - logp_old, 0.0)
  # exp overflows float32 at 88 nats, and 0 * inf in the gradient is NaN.
  log_ratio_BT = jnp.clip(log_ratio_BT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  ratio_BT = jnp.exp(log_ratio_BT)
  adv_B1 = advantage[:, None]

  free_BT = ratio_BT * adv_B1
  held_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high) * adv_B1
  weight_BT = per_token(weight, mask)
  loss = Mean.of(-jnp.minimum(free_BT, held_BT), mask, weight_BT)

  clipped_BT = (held_BT < free_BT).astype(jnp.float32)
  stats = PpoStats(
    clip_fraction=Mean.of(clipped_BT, mask, weight_BT),
    approx_kl=Mean.of(ratio_BT - 1.0 - log_ratio_BT, mask, weight_BT),
  )
  return loss, jax.lax.stop_gradient(stats)


def kl_k2(
  logp: Float[Array, "B T"],
  logp_ref: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  clamp: float,
  weight: Float[Array, " B"] | None = None,
) -> Mean:
  """The k2 estimate of KL(policy || reference) as a loss of its own.

    k2[b,t] = 1/2 * clip(logp[b,t] - logp_ref[b,t], -clamp, clamp)^2

  On policy its gradient is that of the reverse KL, which is not true of the
  popular k3 estimate used as a loss.

  Args:
    logp: Log-probability of the sampled token under the current parameters.
    logp_ref: The same under the reference policy. Constant.
    mask: True on tokens the policy chose.
    clamp: Largest log-ratio, in nats, that still gets a gradient.
    weight: How often each sequence counts; once if None.

  References:
    Schulman 2020, "Approximating KL divergence" (k1, k2, k3).
    ProRL v2: k2 with the log-ratio clamped to 10 nats.
  """
  gap_BT = jnp.where(mask, logp - jax.lax.stop_gradient(logp_ref), 0.0)
  k2_BT = 0.5 * jnp.clip(gap_BT, -clamp, clamp) ** 2
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
