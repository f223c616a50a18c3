"""Importance weights for a sampler that is not quite the trainer.

The sampler runs other kernels than the trainer, in another precision. So its
token probabilities q differ from the trainer's p. The weight of a token is

    w = exp(logp_train - logp_sampler) = p / q.

The expectation over one draw from q becomes that over one from p with it. A
response is many draws, and its weight would be the product of its tokens',
whose variance grows with the length. A weight of each token alone leaves the
tokens before it as q draws them: less variance, and a bias for every response
of more than one token.

`logp_train` is recomputed by the trainer, with the parameters that sampled;
`logp_sampler` is what the sampler said. All weights are constants for the
gradient and multiply a policy loss (see `correction` of `policy_loss`).
Positions off the mask may hold anything; the loss ignores them.

Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training" (truncated importance sampling, TIS); Hu et al. 2025
(BroRL), arXiv:2510.01180, section 3, uses TIS.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import arrays
from brorl_jax.rl.losses import log_ratio, sequence_log_ratio


def truncated_weight(
  logp_train: Float[Array, "*axes"],
  logp_sampler: Float[Array, "*axes"],
  *,
  cap: float,
) -> Float[Array, "*axes"]:
  """TIS: min(exp(logp_train - logp_sampler), cap).

  The cap bounds the variance. Unbiased for responses of one token while no
  weight reaches it; for longer ones the text above says what remains.

  >>> p, q = jnp.array([0.5, 0.2]), jnp.array([0.25, 0.4])  # ratios 2 and 1/2
  >>> truncated_weight(jnp.log(p), jnp.log(q), cap=1.5).round(2).tolist()
  [1.5, 0.5]
  """
  return jnp.minimum(_ratio(logp_train, logp_sampler), cap)


def banded_weight(
  logp_train: Float[Array, "*axes"],
  logp_sampler: Float[Array, "*axes"],
  *,
  low: float,
  high: float,
) -> Float[Array, "*axes"]:
  """IcePop: exp(logp_train - logp_sampler) in [low, high], 0 outside.

  A token on which the two disagree that much is left out, not weighed less.
  Source: Ling Team 2025 (Ring-1T), arXiv:2510.18855: IcePop.

  >>> p, q = jnp.array([0.5, 0.2]), jnp.array([0.25, 0.4])  # ratios 2 and 1/2
  >>> banded_weight(jnp.log(p), jnp.log(q), low=0.4, high=1.5).round(2).tolist()
  [0.0, 0.5]
  """
  ratio = _ratio(logp_train, logp_sampler)
  return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def sequence_mask(
  logp_train: Float[Array, "B T"],
  logp_sampler: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  *,
  low: float,
  high: float,
) -> Bool[Array, " B"]:
  """Sequences whose geometric mean of token ratios is in [low, high].

  `low` is at most 1, `high` at least 1.

  >>> logp = jnp.log(jnp.array([[0.8, 0.2], [0.8, 0.8]]))
  >>> other = jnp.log(jnp.full((2, 2), 0.4))  # ratios 2 and 1/2, 2 and 2
  >>> mask = jnp.ones((2, 2), bool)
  >>> sequence_mask(logp, other, mask, low=0.5, high=1.5).tolist()
  [True, False]
  """
  ratio = jnp.exp(sequence_log_ratio(logp_train, logp_sampler, mask))
  return (ratio >= low) & (ratio <= high)


def _ratio(logp_train, logp_sampler):
  arrays.check(logp_train=(logp_train, "*"), logp_sampler=(logp_sampler, "*"))
  return jax.lax.stop_gradient(jnp.exp(log_ratio(logp_train, logp_sampler)))
