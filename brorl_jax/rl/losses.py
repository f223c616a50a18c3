"""Policy losses and the KL term. Every loss is a `Mean`; the caller divides.

A policy loss, also your own, contains only the formula:

    def loss(logp, logp_old, advantage, mask, **options):
      return ...  # [B, T]: a value for each token, or [B]: for each sequence

`policy_loss` does the rest: constants get no gradient, positions off the mask
do not count, weights and corrections multiply. `LOSSES` is the table of what a
run may choose.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import arrays
from brorl_jax.rl.arrays import Mean

_MAX_LOG_RATIO = 20.0  # nats; ratios beyond e^20 are numerics, not policy

# What a loss may ask for; it gets what its signature names.
OPTIONS = ("clip_low", "clip_high", "dual_clip")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PpoStats:
  """Diagnostics of a policy loss. Gradients are stopped."""

  # Where the clip changes the loss, in [0, 1]: of tokens, or of sequences if
  # these are the loss's unit. Of nothing if the loss does not say.
  clip_fraction: Mean
  approx_kl: Mean  # k3 estimate of KL(old || new), nats per token


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """A policy loss as a value: hashable, so that jit may close over it."""

  # (logp [B,T], logp_old [B,T], advantage [B], mask [B,T], **options) -> what
  # is minimised, [B,T] or [B]; or that and where a clip changed it, as a mask.
  function: Callable[..., Any]
  unit: Literal["token", "sequence"]  # what it has one value of
  options: tuple[str, ...]  # those of OPTIONS that it takes


def from_user(function: Callable[..., Any], **options: Any) -> PolicyLoss:
  """A user's function as a loss. Its unit is the rank of what it returns.

  It is tried with those of these values of `OPTIONS` that it names. Raises
  ValueError, in one line, if it cannot be called or returns another shape.

  >>> own = lambda logp, logp_old, advantage, mask: -advantage[:, None] * logp
  >>> from_user(own, clip_high=0.28).unit
  'token'
  """
  parameters = list(inspect.signature(function).parameters.values())
  takes = tuple(p.name for p in parameters[4:] if p.name in options)
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    takes = tuple(options)
  tokens = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  row, mask = tokens.update(shape=(3,)), tokens.update(dtype=jnp.bool_)
  chosen = {name: options[name] for name in takes}
  returned = arrays.result(function, tokens, tokens, row, mask, **chosen)
  given = returned if isinstance(returned, tuple) else (returned,)
  shown = [arrays.described(x) for x in given]
  if shown in (["float32[3,5]"], ["float32[3,5]", "bool[3,5]"]):
    return PolicyLoss(function, "token", takes)
  if shown in (["float32[3]"], ["float32[3]", "bool[3]"]):
    return PolicyLoss(function, "sequence", takes)
  raise ValueError(
    f"returns {', '.join(shown)} for 3 sequences of 5 tokens; it must be "
    "float32[3,5], a loss for each token, or float32[3], for each sequence"
  )


def policy_loss(
  loss: PolicyLoss,
  logp: Float[Array, "B T"],
  logp_old: Float[Array, "B T"],
  advantage: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  weight: Float[Array, " B"] | None = None,
  scale: Float[Array, " B"] | None = None,
  correction: Float[Array, "B T"] | Float[Array, " B"] | None = None,
  **options: float,
) -> tuple[Mean, PpoStats]:
  """A loss over the tokens, or sequences, that count.

  Args:
    logp: Log-probability of the sampled token under the current parameters.
    logp_old: The same under the parameters that sampled it. Constant.
    advantage: Constant.
    mask: True on tokens the policy chose, the end-of-sequence token included. A
      sequence of none does not count.
    weight: How often each sequence counts; once if None. Identical rollouts of
      a group have equal advantage and log-probability, so that one of them
      with weight c is exactly c of them.
    scale: Multiplies the loss of each sequence, not the diagnostics; 1 if None.
    correction: Multiplies the loss of each token, or sequence if that is the
      unit; 1 if None. Constant. What has correction 0 still counts in the
      mean. See `corrections`.

  >>> logp = jnp.log(jnp.array([[0.8, 0.5]]))
  >>> logp_old = jnp.log(jnp.array([[0.4, 0.5]]))  # ratios 2 and 1
  >>> args = LOSSES["ppo"], logp, logp_old, jnp.ones(1), jnp.ones((1, 2), bool)
  >>> loss, stats = policy_loss(*args, clip_low=0.2, clip_high=0.28)
  >>> round(float(loss.value), 3), float(stats.clip_fraction.value)
  (-1.14, 0.5)
  """
  by_token = loss.unit == "token"
  arrays.check(
    logp=(logp, "BT"),
    logp_old=(logp_old, "BT"),
    advantage=(advantage, "B"),
    mask=(mask, "BT"),
    weight=(weight, "B"),
    scale=(scale, "B"),
    correction=(correction, "BT" if by_token else "B"),
  )
  constants = logp_old, advantage, correction
  logp_old, advantage, correction = jax.lax.stop_gradient(constants)
  # Off-mask logits may be anything, and 0 * inf in the gradient is NaN.
  logp, logp_old = (jnp.where(mask, x, 0.0) for x in (logp, logp_old))
  # A row of none has all tokens there, so that a mean over it is not 0 / 0.
  has_tokens = jnp.any(mask, axis=1)
  tokens = mask | ~has_tokens[:, None]
  value = loss.function(logp, logp_old, advantage, tokens, **options)
  value, clipped = value if isinstance(value, tuple) else (value, None)
  where = mask if by_token else has_tokens
  if correction is not None:
    value *= jnp.where(where, correction, 0.0)
  spread = lambda x: per_token(x, mask) if by_token else x
  value = value if scale is None else value * spread(scale)
  mean = lambda x: Mean.of(x, where, spread(weight))
  nothing = Mean(jnp.zeros(()), jnp.zeros(()))
  gap_BT = log_ratio(logp, logp_old)
  k3_BT = jnp.exp(gap_BT) - 1.0 - gap_BT
  stats = PpoStats(
    clip_fraction=nothing if clipped is None else mean(jnp.float32(clipped)),
    approx_kl=Mean.of(k3_BT, mask, per_token(weight, mask)),
  )
  return mean(value), jax.lax.stop_gradient(stats)


def log_ratio(
  logp: Float[Array, "*axes"], other: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
  """logp - other, in nats, at most 20 either way.

  >>> log_ratio(jnp.array([-1.0, 0.0]), jnp.array([-1.5, -99.0])).tolist()
  [0.5, 20.0]
  """
  arrays.check(logp=(logp, "*"), other=(other, "*"))
  # exp overflows float32 at 88 nats, and 0 * inf in the gradient is NaN.
  return jnp.clip(logp - other, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_log_ratio(
  logp: Float[Array, "B T"],
  other: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
  """Mean of `log_ratio` over valid tokens; 0 for a sequence of none.

  Its exponential is the geometric mean of the token ratios, which does not fall
  with the length as their product.

  >>> logp = jnp.log(jnp.array([[0.4, 0.1, 0.9]]))
  >>> other = jnp.log(jnp.full((1, 3), 0.1))  # ratios 4, 1 and 9
  >>> mask = jnp.array([[True, True, False]])
  >>> jnp.exp(sequence_log_ratio(logp, other, mask)).round(2).tolist()
  [2.0]
  """
  arrays.check(logp=(logp, "BT"), other=(other, "BT"), mask=(mask, "BT"))
  total_B = jnp.sum(log_ratio(logp, other), axis=1, where=mask)
  return total_B / jnp.maximum(jnp.sum(mask, axis=1), 1)


def per_token(
  weight: Float[Array, " B"] | None, mask: Bool[Array, "B T"]
) -> Float[Array, "B T"] | None:
  """Spreads one weight per sequence over its tokens.

  >>> per_token(jnp.array([3.0]), jnp.ones((1, 2), bool)).tolist()
  [[3.0, 3.0]]
  """
  if weight is None:
    return None
  arrays.check(weight=(weight, "B"), mask=(mask, "BT"))
  return jnp.broadcast_to(weight[:, None], mask.shape)


def _ppo(
  logp, logp_old, advantage, mask, *, clip_low, clip_high, dual_clip=0.0
):
  """Clipped surrogate with separate lower and upper clip.

    loss[b,t] = -min(rho * A[b], clip(rho, 1 - clip_low, 1 + clip_high) * A[b])
    rho       = exp(logp[b,t] - logp_old[b,t])

  Where A[b] < 0 nothing bounds it as rho grows. With `dual_clip` = c above 1
  (0: without) it becomes

    min(loss[b,t], c * |A[b]|)      and has no gradient from rho = c on

  `clip_low` and `clip_high` are how far rho may fall below 1 and rise above it
  and still get a gradient.
  Sources: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025 (DAPO),
  arXiv:2503.14476, section 3.1: clip_high > clip_low; Ye et al. 2020,
  arXiv:1912.09729, eq. 5: dual clip, with c = 3.
  """
  ratio, advantage = jnp.exp(log_ratio(logp, logp_old)), advantage[:, None]
  loss, held = _clipped(ratio, advantage, clip_low, clip_high)
  if not dual_clip:
    return loss, held
  bounded = (advantage < 0.0) & (ratio > dual_clip)
  return jnp.where(bounded, -dual_clip * advantage, loss), held | bounded


def _gspo(logp, logp_old, advantage, mask, *, clip_low, clip_high):
  """`_ppo` with one ratio, one clip and one count for each sequence.

    loss[b] = -min(s * A[b], clip(s, 1 - clip_low, 1 + clip_high) * A[b])
    s       = exp(mean over valid t of logp[b,t] - logp_old[b,t])

  The mean makes s vary far less than the ratio of a token, and the clip must be
  narrower: the paper has 3e-4 and 4e-4. `correction` is [B].
  Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 to 7.
  """
  ratio = jnp.exp(sequence_log_ratio(logp, logp_old, mask))
  return _clipped(ratio, advantage, clip_low, clip_high)


def _cispo(logp, logp_old, advantage, mask, *, clip_low, clip_high):
  """REINFORCE with a clipped importance weight: no token loses its gradient.

    loss[b,t] = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A[b] * logp[b,t]
    rho       = exp(logp[b,t] - logp_old[b,t]),  sg: its gradient is 0

  The paper has no lower bound, which is clip_low = 1, and tunes the upper one
  alone. The value says little; the gradient is what is meant.
  Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5.
  """
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logp, logp_old)))
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return -held * advantage[:, None] * logp, held != ratio


def _reinforce(logp, logp_old, advantage, mask):
  return -advantage[:, None] * logp


def _clipped(ratio, advantage, clip_low, clip_high):
  """Minus what the clip leaves of ratio * advantage, and where it holds it."""
  free = ratio * advantage
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
  return -jnp.minimum(free, held), held < free


LOSSES = {
  "ppo": PolicyLoss(_ppo, "token", OPTIONS),
  "gspo": PolicyLoss(_gspo, "sequence", OPTIONS[:2]),
  "cispo": PolicyLoss(_cispo, "token", OPTIONS[:2]),
  "reinforce": PolicyLoss(_reinforce, "token", ()),
}


def kl_k2(
  logp: Float[Array, "B T"],
  logp_ref: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  clamp: float,
  weight: Float[Array, " B"] | None = None,
) -> Mean:
  """The k2 estimate of KL(policy || reference) as its own loss.

    k2[b,t] = min(1/2 * (logp[b,t] - logp_ref[b,t])^2, clamp)

  On policy, below the clamp, its gradient is that of the reverse KL, which is
  not true of the popular k3 estimate used as a loss. `logp_ref` is constant.
  `clamp` is what a token counts at most, in nats: beyond a log-ratio of
  sqrt(2 * clamp), 4.5 nats for a clamp of 10, it gets no gradient.
  Sources: Schulman 2020, "Approximating KL divergence" (k1, k2, k3). ProRL v2:
  k2 clamped to 10. The released recipes clamp the log-ratio to 20 nats and the
  value to 10.

  >>> logp, logp_ref = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -9.0]])
  >>> kl = kl_k2(logp, logp_ref, jnp.ones((1, 2), bool), clamp=10.0)
  >>> float(kl.value)  # (1/2 + 10) / 2, as 8^2 / 2 is above the clamp
  5.25
  """
  arrays.check(
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
  """Log-probability of `tokens` and entropy of the distribution, in nats.

  >>> logp, entropy = token_logp(jnp.zeros((1, 4)), jnp.array([2]))
  >>> float(jnp.exp(logp[0]).round(2)), float(jnp.exp(entropy[0]).round(2))
  (0.25, 4.0)
  """
  arrays.check(logits=(logits, "*V"), tokens=(tokens, "*"))
  logp = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
  prob = jnp.exp(logp)
  return chosen, -jnp.sum(prob * jnp.where(prob > 0.0, logp, 0.0), axis=-1)
