"""From the rewards of N rollouts of the same prompt to advantages.

REINFORCE++-baseline, as ProRL v2 and BroRL use it, is `center_by_group`
followed by one of the two whitenings:

    A'[p,n] = r[p,n] - mean_n r[p,:]
    A[p,n]  = (A'[p,n] - mean(A')) / std(A')

with mean and std over every rollout of the step that is trained on. The paper
writes the mean over trajectories; the released implementations weight each
trajectory by its number of tokens. Both are here, as two functions.

`normalize_by_group` is GRPO's scale instead. The two `credit_by_...` are
options of this project and no part of BroRL.

Rollouts that do not count (`valid` is False) get exactly 0 everywhere, do not
influence the others, and may hold anything.

References:
  Hu et al. 2025 (BroRL), arXiv:2510.01180, section 3.
  Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, the baseline variant.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Rewards are O(1): a smaller variance is rounding, and must not be divided by.
_MIN_VARIANCE = 1e-8

# Added to the standard deviation of a group. One right answer among 1024 has
# 0.03, which this changes by less than a part in 10^4.
_MIN_STD = 1e-6


def informative(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Bool[Array, " P"]:
  """Which prompts carry a gradient: their N raw rewards are not all equal.

  Args:
    reward: Raw rewards, before any penalty on length.
    valid: Rollouts that count; all if None. A group in which fewer than two
      count is not informative.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11 (dynamic sampling), for
    binary rewards; for continuous ones this is its strict reading.
  """
  high = jnp.max(reward, axis=1, initial=-jnp.inf, where=valid)
  low = jnp.min(reward, axis=1, initial=jnp.inf, where=valid)
  return high > low  # -inf > inf where none counts


def center_by_group(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Subtracts each prompt's mean reward: A'[p,n] = r[p,n] - mean_n r[p,:].

  A group of equal rewards becomes exactly 0, whatever the rounding of its mean.
  Without a whitening after it this is the plain advantage over the group mean.

  Args:
    reward: Rewards of the rollouts.
    valid: Rollouts that count in the mean; all if None. The others get 0.
  """
  centered = reward - jnp.mean(reward, axis=1, keepdims=True, where=valid)
  return jnp.where(_carries(reward, valid), centered, 0.0)


def normalize_by_group(
  centered: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Divides by the standard deviation of each prompt's rewards, as GRPO does.

    A[p,n] = A'[p,n] / (std_n A'[p,:] + 1e-6)

  Every prompt gets the same scale, so that a single right answer among N weighs
  sqrt(N - 1). A group of equal rewards becomes exactly 0.

  Args:
    centered: From `center_by_group`.
    valid: Rollouts that count in the deviation; all if None. The others get 0.

  References:
    Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2. It does
    not say which deviation; this is the one that divides by N.
  """
  std = jnp.std(centered, axis=1, keepdims=True, where=valid)
  scaled = centered / (std + _MIN_STD)
  return jnp.where(_carries(centered, valid), scaled, 0.0)


def _carries(reward, valid):
  """Rollouts that count, of informative groups: the others get exactly 0."""
  kept = informative(reward, valid)[:, None]
  return kept if valid is None else kept & valid


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
    length: Response tokens of each rollout, the end token included. 0 for a
      rollout that does not count: it gets exactly 0.
    where: Prompts that are kept. The others get exactly 0 and do not count.

  Returns:
    Advantages with mean 0 and variance 1 over the tokens of kept prompts.
  """
  return _whiten(advantage, length, where)


def whiten_by_trajectory(
  advantage: Float[Array, "P N"],
  where: Bool[Array, " P"],
  valid: Bool[Array, "P N"] | None = None,
) -> Float[Array, "P N"]:
  """`whiten_by_batch` with every rollout counted once, as the paper writes it.

  The mean over trajectories of group-centered rewards is 0, so only the scale
  changes.

  Args:
    advantage: Centered by group.
    where: Prompts that are kept. The others get exactly 0 and do not count.
    valid: Rollouts that count; all if None. The others get exactly 0.
  """
  once = jnp.ones_like(advantage)
  if valid is not None:
    once = jnp.where(valid, once, 0.0)
  return _whiten(advantage, once, where)


def _whiten(advantage, weight, where):
  counts = where[:, None] & (weight > 0.0)
  weight = jnp.where(counts, weight, 0.0)
  advantage = jnp.where(counts, advantage, 0.0)  # 0 * nan is nan
  total = jnp.maximum(jnp.sum(weight), 1.0)
  shifted = advantage - jnp.sum(weight * advantage) / total
  variance = jnp.sum(weight * shifted**2) / total
  scaled = shifted / jnp.sqrt(jnp.maximum(variance, _MIN_VARIANCE))
  return jnp.where(counts, scaled, 0.0)


def credit_by_answer(
  answer: Int[Array, "P N"],
  correct: Bool[Array, "P N"],
  valid: Bool[Array, "P N"] | None = None,
) -> Float[Array, "P N"]:
  """Factors that give each distinct correct answer of a group equal credit.

    factor[n] = c / (D * #{correct m: answer[m] = answer[n]})  if n is correct
    factor[n] = 1                                              otherwise

  with c correct rollouts and D distinct answers among them. The factors of the
  correct rollouts add up to c, so that centered binary advantages times the
  factors still add up to 0. An option of this project, not of BroRL.

  Args:
    answer: Any number that is the same for the same answer to one prompt.
    correct: Rollouts with a right answer.
    valid: Rollouts that count; all if None. The others get 1.
  """
  counted = correct if valid is None else correct & valid
  # One prompt at a time: [P,N,N] would be large at N = 512.
  return jax.lax.map(_share_by_answer, (answer, counted))


def _share_by_answer(xs):
  answer, counted = xs
  same = (answer[:, None] == answer[None, :]) & counted[None, :]
  times = jnp.sum(same, axis=1)
  # Counted by the first of each: a sum of 1 / times would be rounded.
  first = counted & ~jnp.any(jnp.tril(same, -1), axis=1)
  share = jnp.sum(counted) / jnp.maximum(jnp.sum(first) * times, 1)
  return jnp.where(counted, share, 1.0)


def credit_by_probability(
  logp: Float[Array, "P N"],
  correct: Bool[Array, "P N"],
  valid: Bool[Array, "P N"] | None = None,
) -> Float[Array, "P N"]:
  """Factors that give unlikely correct rollouts of a group more credit.

    factor[n] = c * (1 / p[n]) / sum_{correct m} 1 / p[m]  if n is correct
    factor[n] = 1                                          otherwise

  with c correct rollouts and p = exp(logp). As in `credit_by_answer` they add
  up to c. Whole responses differ by many nats, and then nearly all credit goes
  to one of them; a mean over the tokens is milder. An option of this project,
  not of BroRL.

  Args:
    logp: Log-probability of each rollout, in nats.
    correct: Rollouts with a right answer.
    valid: Rollouts that count; all if None. The others get 1.
  """
  counted = correct if valid is None else correct & valid
  c = jnp.sum(counted, axis=1, keepdims=True)
  # The softmax takes the largest off: 1 / p of -3000 nats is not a float.
  share = jax.nn.softmax(-logp, axis=1, where=counted)
  return jnp.where(counted, share * c, 1.0)
