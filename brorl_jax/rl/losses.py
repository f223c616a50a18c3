"""Policy losses. Every loss is a `Mean`; the caller divides.

The formulas, and a table of them; `policy_loss` has what they share, the
arguments that are not explained here among them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import shapes
from brorl_jax.rl.mean import Mean
from brorl_jax.rl.policy_loss import (
  OPTIONS,
  Loss,
  PpoStats,
  log_ratio,
  per_token,
  policy_loss,
  sequence_log_ratio,
)


def _ppo(logp, logp_old, advantage, mask, *, clip_low, clip_high):
  del mask
  ratio, adv_B1 = jnp.exp(log_ratio(logp, logp_old)), advantage[:, None]
  value, clipped = _surrogate(ratio, adv_B1, clip_low, clip_high)
  return -value, clipped


def _gspo(logp, logp_old, advantage, mask, *, clip_low, clip_high):
  ratio = jnp.exp(sequence_log_ratio(logp, logp_old, mask))
  value, clipped = _surrogate(ratio, advantage, clip_low, clip_high)
  return -value, clipped


def _cispo(logp, logp_old, advantage, mask, *, clip_low, clip_high):
  del mask
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logp, logp_old)))
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return -held * advantage[:, None] * logp, held != ratio


def _reinforce(logp, logp_old, advantage, mask):
  del logp_old, mask
  return -advantage[:, None] * logp


def _surrogate(ratio, advantage, clip_low, clip_high):
  """What the clip leaves of ratio * advantage, and where it holds it."""
  free = ratio * advantage
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
  return jnp.minimum(free, held), held < free


LOSSES = {
  "ppo": Loss(_ppo, "token", OPTIONS),
  "gspo": Loss(_gspo, "sequence", ("clip_low", "clip_high")),
  "cispo": Loss(_cispo, "token", ("clip_low", "clip_high")),
  "reinforce": Loss(_reinforce, "token", ()),
}


def ppo_clip(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  weight: Float[Array, " B"] | None = None,
  correction: Float[Array, "B T"] | None = None,
) -> tuple[Mean, PpoStats]:
  """Clipped surrogate with separate lower and upper clip.

    loss[b,t] = -min(rho * A[b], clip(rho, 1 - clip_low, 1 + clip_high) * A[b])
    rho       = exp(logp[b,t] - logp_old[b,t])

  Args:
    clip_low: How far rho may fall below 1 and still get a gradient.
    clip_high: How far rho may rise above 1 and still get a gradient.

  Returns:
    The loss over valid tokens, to be minimised, and diagnostics.

  References:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.1: clip_high > clip_low.
  """
  return policy_loss(
    LOSSES["ppo"],
    logp,
    logp_old,
    advantage,
    mask,
    weight=weight,
    correction=correction,
    clip_low=clip_low,
    clip_high=clip_high,
  )


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
    clip_low: How far s may fall below 1 and still get a gradient.
    clip_high: How far s may rise above 1 and still get a gradient.

  Returns:
    The loss over sequences, to be minimised, and diagnostics: the clip
    fraction over sequences, the KL over valid tokens.

  References:
    Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 to 7.
  """
  return policy_loss(
    LOSSES["gspo"],
    logp,
    logp_old,
    advantage,
    mask,
    weight=weight,
    correction=correction,
    clip_low=clip_low,
    clip_high=clip_high,
  )


def cispo(
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  weight: Float[Array, " B"] | None = None,
  correction: Float[Array, "B T"] | None = None,
) -> tuple[Mean, PpoStats]:
  """REINFORCE with a clipped importance weight: no token loses its gradient.

    loss[b,t] = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A[b] * logp[b,t]
    rho       = exp(logp[b,t] - logp_old[b,t]),  sg: its gradient is 0

  The paper has no lower bound, which is clip_low = 1, and tunes the upper one
  alone.

  Returns:
    The loss over valid tokens, to be minimised, and diagnostics. Its value says
    little; its gradient is what is meant.

  References:
    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5.
  """
  return policy_loss(
    LOSSES["cispo"],
    logp,
    logp_old,
    advantage,
    mask,
    weight=weight,
    correction=correction,
    clip_low=clip_low,
    clip_high=clip_high,
  )


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
    logp_ref: As `logp`, under the reference policy. Constant.
    clamp: What a token counts at most, in nats. Beyond a log-ratio of
      sqrt(2 * clamp), 4.5 nats for a clamp of 10, it gets no gradient.

  References:
    Schulman 2020, "Approximating KL divergence" (k1, k2, k3).
    ProRL v2: k2 clamped to 10. The released recipes clamp the log-ratio to 20
    nats and the value to 10.
  """
  shapes.check(
    logp=(logp, "BT"),
    logp_ref=(logp_ref, "BT"),
    mask=(mask, "BT"),
    weight=(weight, "B"),
  )
  gap_BT = log_ratio(logp, jax.lax.stop_gradient(logp_ref))
  k2_BT = jnp.minimum(0.5 * jnp.where(mask, gap_BT, 0.0) ** 2, clamp)
  return Mean.of(k2_BT, mask, per_token(weight, mask))


def token_logp(
  logits: Float[Array, "*axes V"], tokens: Int[Array, "*axes"]
) -> tuple[Float[Array, "*axes"], Float[Array, "*axes"]]:
  """Log-probability of `tokens` and entropy of the distribution, in nats."""
  shapes.check(logits=(logits, "*V"), tokens=(tokens, "*"))
  logp = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)
