"""What all policy losses share; `losses` has their formulas.

A loss, also your own, contains only the formula:

    def loss(logp, logp_old, advantage, mask, **options):
      return ...  # [B, T]: a value for each token, or [B]: for each sequence

`policy_loss` does the rest: constants get no gradient, positions off the mask
do not count, weights and corrections multiply.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import shapes
from brorl_jax.rl.mean import Mean

_MAX_LOG_RATIO = 20.0  # nats; ratios beyond e^20 are numerics, not policy

# What a loss may be told; it gets those that its signature names.
OPTIONS = ("clip_low", "clip_high")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PpoStats:
  """What to look at when the loss looks wrong. Gradients are stopped."""

  # Where the clip changes the loss, in [0, 1]: of tokens, or of sequences if
  # these are the loss's unit. Of nothing if the loss does not say.
  clip_fraction: Mean
  approx_kl: Mean  # k3 estimate of KL(old || new), nats per token


@dataclasses.dataclass(frozen=True)
class Loss:
  """A policy loss as a value: hashable, so that jit may close over it."""

  # (logp [B,T], logp_old [B,T], advantage [B], mask [B,T], **options) -> what
  # is minimised, [B,T] or [B]; or that and where a clip changed it, as a mask.
  function: Callable[..., Any]
  unit: Literal["token", "sequence"]  # what it has one value of
  options: tuple[str, ...]  # those of OPTIONS that it takes


def own(function: Callable[..., Any], **options: Any) -> Loss:
  """A user's function as a loss. Its unit is the rank of what it returns.

  Args:
    function: See `Loss`.
    **options: Values of OPTIONS, with which it is tried.

  Raises:
    ValueError: It cannot be called, or returns another shape; in one line.
  """
  parameters = list(inspect.signature(function).parameters.values())
  takes = tuple(p.name for p in parameters[4:] if p.name in OPTIONS)
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    takes = OPTIONS
  tokens = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  returned = shapes.result(
    function,
    tokens,
    tokens,
    jax.ShapeDtypeStruct((3,), jnp.float32),
    jax.ShapeDtypeStruct((3, 5), jnp.bool_),
    **{name: options[name] for name in takes},
  )
  given = returned if isinstance(returned, tuple) else (returned,)
  shown = [shapes.described(x) for x in given]
  if shown in (["float32[3,5]"], ["float32[3,5]", "bool[3,5]"]):
    return Loss(function, "token", takes)
  if shown in (["float32[3]"], ["float32[3]", "bool[3]"]):
    return Loss(function, "sequence", takes)
  raise ValueError(
    f"returns {', '.join(shown)} for 3 sequences of 5 tokens; it must be "
    "float32[3,5], a loss for each token, or float32[3], for each sequence"
  )


def policy_loss(
  loss: Loss,
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
    loss: A value of `LOSSES`, or from `own`.
    logp: Log-probability of the sampled token under the current parameters.
    logp_old: The same under the parameters that sampled it. Constant.
    advantage: One advantage for the whole sequence. Constant.
    mask: True on tokens the policy chose, the end-of-sequence token included. A
      sequence of none does not count.
    weight: How often each sequence counts; once if None. Identical rollouts of
      a group have equal advantage and log-probability, so that one of them
      with weight c is exactly c of them.
    scale: Multiplies the loss of each sequence; 1 if None. The diagnostics do
      not see it.
    correction: Multiplies the loss of each token, or sequence if that is the
      unit; 1 if None. Constant. What has correction 0 still counts in the
      mean. See `corrections`.
    **options: Those that the loss takes.

  Returns:
    The loss over its unit, to be minimised, and diagnostics.
  """
  by_token = loss.unit == "token"
  shapes.check(
    logp=(logp, "BT"),
    logp_old=(logp_old, "BT"),
    advantage=(advantage, "B"),
    mask=(mask, "BT"),
    weight=(weight, "B"),
    scale=(scale, "B"),
    correction=(correction, "BT" if by_token else "B"),
  )
  logp_old, advantage, correction = jax.lax.stop_gradient(
    (logp_old, advantage, correction)
  )
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
  if scale is not None:
    value *= spread(scale)
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
  """logp - other, in nats, at most 20 either way."""
  shapes.check(logp=(logp, "*"), other=(other, "*"))
  # exp overflows float32 at 88 nats, and 0 * inf in the gradient is NaN.
  return jnp.clip(logp - other, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_log_ratio(
  logp: Float[Array, "B T"],
  other: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
  """Mean of `log_ratio` over valid tokens; 0 for a sequence of none."""
  shapes.check(logp=(logp, "BT"), other=(other, "BT"), mask=(mask, "BT"))
  total_B = jnp.sum(log_ratio(logp, other), axis=1, where=mask)
  return total_B / jnp.maximum(jnp.sum(mask, axis=1), 1)


def per_token(
  weight: Float[Array, " B"] | None, mask: Bool[Array, "B T"]
) -> Float[Array, "B T"] | None:
  """Spreads one weight per sequence over its tokens."""
  if weight is None:
    return None
  shapes.check(weight=(weight, "B"), mask=(mask, "BT"))
  return jnp.broadcast_to(weight[:, None], mask.shape)
