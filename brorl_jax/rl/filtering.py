"""Rules of dynamic sampling, and how many prompts a rule keeps.

The strict rule is `advantages.informative`: not all rewards are equal. For
binary rewards all rules agree. For other rewards they do not, and the papers do
not say which one BroRL uses. All of them read raw rewards: a penalty on length
would make groups of wrong answers look informative. `KEEP` is the table of what
a run may choose.

Sources: Hu et al. 2025 (BroRL), arXiv:2510.01180, section 3; Yu et al. 2025
(DAPO), arXiv:2503.14476, eq. 11.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import arrays
from brorl_jax.rl.advantages import informative
from brorl_jax.rl.pass_at_k import pass_at_k


def partly_solved(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Bool[Array, " P"]:
  """Which prompts some rollouts solve and some do not.

    0 < #{n: reward[p,n] >= 1} < number of rollouts

  Rewards are raw. Only `valid` rollouts count; all if it is None.
  """
  arrays.check(reward=(reward, "PN"), valid=(valid, "PN"))
  solved = jnp.sum(reward >= 1.0, axis=1, where=valid)
  count = jnp.sum(jnp.ones_like(reward), axis=1, where=valid)
  return (solved > 0) & (solved < count)


# (raw reward [P,N], valid [P,N]) -> which prompts are trained on [P]. Rollouts
# that do not count (valid is False) may hold anything.
Rule = Callable[[Array, Array], Array]
KEEP: dict[str, Rule] = {
  "differ": informative,
  "solved": partly_solved,
  "all": lambda reward, valid: jnp.ones(len(reward), bool),
}


# A user's function, if it can stand in `KEEP`.
from_user = functools.partial(arrays.from_user, takes=2, gives="bool[4]")


def expected_pass_rate(p: Float[Array, " P"], n: int) -> Float[Array, ""]:
  """The share of prompts that is informative with n rollouts of reward 0 or 1.

    1 - mean_p p^n - mean_p (1 - p)^n

  p is the probability that a rollout of a prompt is right. Estimated from the
  same rollouts this is too low on average, because it is concave in p (Jensen).
  `pass_rate_at` is unbiased. Raises ValueError if n is not positive.
  """
  if n < 1:
    raise ValueError(f"n = {n} rollouts: at least 1 is needed")
  arrays.check(p=(p, "P"))
  # p and 1 - p give the same. With the smaller one nothing cancels.
  rare = jnp.minimum(p, 1.0 - p)
  return jnp.mean(-jnp.expm1(n * jnp.log1p(-rare)) - rare**n)


def pass_rate_at(m: int, correct: Int[Array, " P"], n: int) -> Float[Array, ""]:
  """The share of prompts that m of their n rewards, 0 or 1, make informative.

    mean_p (1 - C(c,m) / C(n,m) - C(n-c,m) / C(n,m))

  with c = correct[p]: the mean over all choices of m rollouts, hence an
  unbiased estimate of the rate with m. Raises ValueError if m is not in [1, n].
  """
  if not 1 <= m <= n:
    raise ValueError(f"m = {m} is not in [1, {n}]: only {n} were drawn")
  arrays.check(correct=(correct, "P"))
  # Some are right, and some are wrong, less "some are right or wrong".
  some_right, some_wrong = (pass_at_k(n, x, m) for x in (correct, n - correct))
  return jnp.mean(some_right + some_wrong - 1.0)
