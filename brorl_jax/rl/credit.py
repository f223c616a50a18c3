"""How the correct rollouts of a group share their credit.

This is an option of this project, not a part of BroRL. It computes factors for
the rewards; any advantage can be computed from the changed rewards.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import shapes
from brorl_jax.rl.advantages import center_by_group


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
  factors still add up to 0.

  Args:
    answer: Any number that is the same for the same answer to one prompt.
    correct: Rollouts with a right answer.
    valid: Rollouts that count; all if None. The others get 1.
  """
  shapes.check(
    answer=(answer, "PN"), correct=(correct, "PN"), valid=(valid, "PN")
  )
  counted = correct if valid is None else correct & valid
  # One prompt at a time: [P,N,N] would be large at N = 512.
  return jax.lax.map(_share_by_answer, (answer, counted))


def times_and_first(
  xs: tuple[Int[Array, " N"], Bool[Array, " N"]],
) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
  """How often each number occurs among the counted, and if it is the first.

  Args:
    xs: Numbers, and which of them count.
  """
  number, counted = xs
  same = (number[:, None] == number[None, :]) & counted[None, :]
  first = counted & ~jnp.any(jnp.tril(same, -1), axis=1)
  return jnp.sum(same, axis=1), first


def _share_by_answer(xs):
  # Counted by the first of each: a sum of 1 / times would be rounded.
  times, first = times_and_first(xs)
  counted = xs[1]
  share = jnp.sum(counted) / jnp.maximum(jnp.sum(first) * times, 1)
  return jnp.where(counted, share, 1.0)


def share_credit(
  reward: Float[Array, "P N"],
  factor: Float[Array, "P N"],
  valid: Bool[Array, "P N"] | None = None,
) -> Float[Array, "P N"]:
  """Rewards that share the credit of a group by factors, for any advantage.

    r'[p,n] = mean r[p,:] + factor[p,n] * (r[p,n] - mean r[p,:])

  The mean stays what it was where the factors times the centered rewards add
  up to 0, as those of `credit_by_answer` do.

  Args:
    reward: Rewards of the rollouts.
    factor: Of each rollout.
    valid: Rollouts that count in the mean; all if None. The others get it.
  """
  shapes.check(
    reward=(reward, "PN"), factor=(factor, "PN"), valid=(valid, "PN")
  )
  mean = jnp.mean(reward, axis=1, keepdims=True, where=valid)
  return mean + factor * center_by_group(reward, valid)
