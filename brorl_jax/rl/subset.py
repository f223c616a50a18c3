"""Training on m of the N rollouts of a prompt, after all N had their advantage.

With long answers the update is the step, and no two rollouts are equal. The
advantages use all N, and the m that are chosen stand for the others:

    sum over chosen n of weight[p,n] A[p,n] f(p,n)  /  m
      is, in expectation,  sum over all n of A[p,n] f(p,n)  /  N

for any f, such as the gradient of a rollout's log-probability. Among rollouts
of equal reward the first in the order of n are as good as any. Among all they
are not if the rewards of the first ones decided how many follow, see rounds.py.

    random       m of them, drawn; weight 1
    stratified   half of them above the mean reward and half below, as far as
                 there are so many; weight: share of all over share of chosen
    variance     the highest and the lowest rewards (PODS). For two values of
                 the reward it is 'stratified', for more it is biased
    different    m of the D different responses, each standing for all equal
                 ones; weight: its count times D / N

References:
  Xu et al. 2025 (PODS), arXiv:2504.13818: m of N by the largest variance. There
    the advantages are those of the chosen ones, without weights.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from brorl_jax.rl import shapes
from brorl_jax.rl.credit import times_and_first

Chosen = tuple[Array, Array]  # [P,N]: which are trained on, and their weights


def drawn(valid: Bool[Array, "P N"], key: Key[Array, ""], *, m: int) -> Chosen:
  """m of the rollouts that count.

  Args:
    valid: Rollouts that count.
    key: Of the draw, without replacement.
    m: How many of each prompt, at most.
  """
  shapes.check(valid=(valid, "PN"))
  order = jnp.where(valid, jax.random.uniform(key, valid.shape), jnp.inf)
  chosen = valid & (_rank(jnp.argsort(order, axis=1)) < m)
  return chosen, chosen.astype(jnp.float32)


def stratified(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"], *, m: int
) -> Chosen:
  """As many above the group's mean as not, where there are so many.

  Args:
    reward: Rewards of the rollouts.
    valid: Rollouts that count.
    m: How many of each prompt, at most.
  """
  shapes.check(reward=(reward, "PN"), valid=(valid, "PN"))
  above, below = _halves(reward, valid)
  a, b, take = _numbers(above, below, m)
  chosen = _first_of(above, take) | _first_of(below, m - take)
  return chosen, _weights(chosen, above, below, a, b)


def extremes(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"], *, m: int
) -> Chosen:
  """The highest and the lowest rewards: m with the largest variance.

  Args:
    reward: Rewards of the rollouts.
    valid: Rollouts that count.
    m: How many of each prompt, at most.
  """
  shapes.check(reward=(reward, "PN"), valid=(valid, "PN"))
  n = jnp.sum(valid, axis=1, keepdims=True)
  high = jnp.argsort(jnp.where(valid, -reward, jnp.inf), axis=1, stable=True)
  low = jnp.argsort(jnp.where(valid, reward, jnp.inf), axis=1, stable=True)
  some = jnp.minimum(m, n)  # [P, 1]
  k = jnp.arange(m + 1)[None]  # so many of the highest
  spread = jax.vmap(_spread, in_axes=(0, 0, 0, 0, None))(
    reward, high, low, some[:, 0], m
  )
  best = jnp.argmax(jnp.where(k <= some, spread, -jnp.inf), axis=1)[:, None]
  chosen = (_rank(high) < best) | (_rank(low) < some - best)
  above, below = _halves(reward, valid)
  a, b, _ = _numbers(above, below, m)
  return chosen & valid, _weights(chosen & valid, above, below, a, b)


def different(
  group: Int[Array, "P N"],
  valid: Bool[Array, "P N"],
  key: Key[Array, ""],
  *,
  m: int,
) -> Chosen:
  """m of the different responses of each prompt.

  Args:
    group: The same number for equal responses of a prompt.
    valid: Rollouts that count.
    key: Of the draw, without replacement.
    m: How many of each prompt, at most.
  """
  shapes.check(group=(group, "PN"), valid=(valid, "PN"))
  # One prompt at a time: [P,N,N] would be large at N = 512.
  count, one = jax.lax.map(times_and_first, (group, valid))
  D = jnp.sum(one, axis=1, keepdims=True)
  chosen, _ = drawn(one, key, m=m)
  taken = jnp.minimum(m, D)
  n = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1)
  # Sum of weights over the chosen ones is `taken` in expectation.
  return chosen, jnp.where(chosen, count * D / n, 0.0) * (taken > 0)


def _halves(reward, valid):
  """What counts above the mean reward of its group, and what does not."""
  above = valid & (
    reward > jnp.mean(reward, axis=1, keepdims=True, where=valid)
  )
  return above, valid & ~above


def _first_of(mask: Bool[Array, "P N"], count) -> Bool[Array, "P N"]:
  return mask & (jnp.cumsum(mask, axis=1) <= count)


def _rank(order: Int[Array, "P N"]) -> Int[Array, "P N"]:
  """The place of each in an order."""
  return jnp.argsort(order, axis=1)


def _numbers(above, below, m: int):
  """How many are above and below, and how many above are taken, all [P, 1]."""
  a = jnp.sum(above, axis=1, keepdims=True)
  b = jnp.sum(below, axis=1, keepdims=True)
  return a, b, jnp.minimum(a, jnp.maximum(m // 2, m - b))


def _weights(chosen, above, below, a, b):
  """Share of all over share of the chosen, above and below."""
  n = jnp.maximum(a + b, 1)
  m = jnp.maximum(jnp.sum(chosen, axis=1, keepdims=True), 1)
  of = lambda part, total: (
    total
    / n
    * m
    / jnp.maximum(jnp.sum(chosen & part, axis=1, keepdims=True), 1)
  )
  weight = jnp.where(above, of(above, a), of(below, b))
  return jnp.where(chosen, weight, 0.0)


def _spread(reward, high, low, some, m: int) -> Float[Array, " K"]:
  """Variance of the k highest and some - k lowest rewards, for k up to m."""
  size = jnp.arange(m + 1)
  sums = lambda order, power: jnp.concatenate(
    [jnp.zeros(1), jnp.cumsum(reward[order[:m]] ** power)]
  )
  rest = jnp.clip(some - size, 0, m)
  both = lambda power: (sums(high, power)[size] + sums(low, power)[rest]) / some
  return both(2) - both(1) ** 2


CHOOSE: dict[str, Callable[..., Chosen]] = {
  "random": drawn,
  "stratified": stratified,
  "variance": extremes,
  "different": different,
}
