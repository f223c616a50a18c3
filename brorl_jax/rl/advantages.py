"""From the rewards of N rollouts of the same prompt to advantages.

REINFORCE++-baseline, as ProRL v2 and BroRL use it, is `center_by_group`
followed by one of the two whitenings:

    A'[p,n] = r[p,n] - mean_n r[p,:]
    A[p,n]  = (A'[p,n] - mean(A')) / std(A')

with mean and std over every rollout of the step that is trained on. The paper
writes the mean over trajectories; the released implementations weight each
trajectory by its number of tokens. Both are here, as two functions.

References:
  Hu et al. 2025 (BroRL), arXiv:2510.01180, section 3.
  Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, the baseline variant.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Rewards are O(1): a smaller variance is rounding, and must not be divided by.
_MIN_VARIANCE = 1e-8


def informative(reward: Float[Array, "P N"]) -> Bool[Array, " P"]:
  """Which prompts carry a gradient: their N raw rewards are not all equal.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11 (dynamic sampling), for
    binary rewards; for continuous ones this is its strict reading.
  """
  return jnp.max(reward, axis=1) > jnp.min(reward, axis=1)


def center_by_group(reward: Float[Array, "P N"]) -> Float[Array, "P N"]:
  """Subtracts each prompt's mean reward: A'[p,n] = r[p,n] - mean_n r[p,:].

  A group of equal rewards becomes exactly 0, whatever the rounding of its mean.
  """
  centered = reward - jnp.mean(reward, axis=1, keepdims=True)
  return jnp.where(informative(reward)[:, None], centered, 0.0)


def whiten_by_batch(
  advantage: Float[Array, "P N"],
  length: Float[Array, "P N"],
  where: Bool[Array, " P"],
) -> Float[Array, "P N"]:
  """Whitens over the tokens of all kept prompts.

    mean = sum(length * A') / sum(length)
    A    = (A' - mean) / sqrt(sum(length * (A' - mean)^2) / sum(length))

  Wrong answers that are longer than right ones make the mean negative, so that
  every rollout gets a shift that depends on the lengths of the batch.

  Args:
    advantage: Centered by group.
    length: Response tokens of each rollout, the end token included.
    where: Prompts that are kept. The others get exactly 0 and do not count.

  Returns:
    Advantages with mean 0 and variance 1 over the tokens of kept prompts.
  """
  return _whiten(advantage, length, where)


def whiten_by_trajectory(
  advantage: Float[Array, "P N"], where: Bool[Array, " P"]
) -> Float[Array, "P N"]:
  """`whiten_by_batch` with every rollout counted once, as the paper writes it.

  The mean over trajectories of group-centered rewards is 0, so only the scale
  changes.
  """
  return _whiten(advantage, jnp.ones_like(advantage), where)


def _whiten(advantage, weight, where):
  weight = jnp.where(where[:, None], weight, 0.0)
  advantage = jnp.where(where[:, None], advantage, 0.0)  # 0 * nan is nan
  total = jnp.maximum(jnp.sum(weight), 1.0)
  shifted = advantage - jnp.sum(weight * advantage) / total
  variance = jnp.sum(weight * shifted**2) / total
  scaled = shifted / jnp.sqrt(jnp.maximum(variance, _MIN_VARIANCE))
  return jnp.where(where[:, None], scaled, 0.0)
