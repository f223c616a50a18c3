"""How many rollouts each prompt gets, chosen before any of them is drawn.

From estimates of the pass rates p, of earlier visits, and a budget B for all:

    maximize  sum_p V(n[p], p)   with  sum_p n[p] <= B,  least <= n[p] <= most

V is concave in n, so that the next chunk of rollouts always goes where it adds
most (`allocate`). As n does not depend on the rewards that are then drawn, the
leave-one-out gradient of every prompt stays unbiased, see stop_weight.py.

    history    V = -1 / (p n), so that n ~ 1 / sqrt(p)
    knapsack   V = (1 - p^n - (1 - p)^n) p (1 - p)^2
    coba       V = (1 - exp(-n p (1 - p))) Beta(p; a, k - a), a by the failures

References:
  Xiong et al. 2025 (Reinforce-Ada), arXiv:2510.04996v3, the Est variant.
  Knapsack RL, arXiv:2509.25849: the value of a prompt.
  Yao et al. 2026 (CoBA-RL), arXiv:2602.03048.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import shapes

# (n [P, K], p [P, 1]) -> [P, K]; p strictly between 0 and 1.
Value = Callable[[Array, Array], Array]

# Of p before a visit: Jeffreys' prior. 0 of 16 right then mean p = .029.
PRIOR = 0.5
# An earlier visit counts half as much as the next one.
FORGET = 0.5
# Sum of both parameters of CoBA's Beta density: ours, the paper's is not known
# here. 6 makes it a hump half as wide as [0, 1].
_CONCENTRATION = 6.0


def estimate(
  right: Float[Array, " P"], drawn: Float[Array, " P"]
) -> Float[Array, " P"]:
  """Pass rates from (right + 1/2) / (drawn + 1)."""
  shapes.check(right=(right, "P"), drawn=(drawn, "P"))
  return (right + PRIOR) / (drawn + 2.0 * PRIOR)


def history(n: Array, p: Array) -> Array:
  """-1 / (p n), the variance of the estimate of log p: n ~ 1 / sqrt(p)."""
  return -1.0 / (p * n)


def knapsack(n: Array, p: Array) -> Array:
  """The chance of both outcomes, times the gain p (1 - p)^2."""
  both = 1.0 - p**n - (1.0 - p) ** n
  return both * p * (1.0 - p) ** 2


def coba(n: Array, p: Array) -> Array:
  """Saturating in n p (1 - p), times what p is worth now.

  The density's mode is the mean failure rate of these prompts, kept away from
  the ends: easy prompts first, hard ones once most succeed.
  """
  mode = jnp.clip(1.0 - jnp.mean(p), 0.1, 0.9)
  a = 1.0 + mode * (_CONCENTRATION - 2.0)
  b = _CONCENTRATION - a
  worth = p ** (a - 1.0) * (1.0 - p) ** (b - 1.0)
  return (1.0 - jnp.exp(-n * p * (1.0 - p))) * worth


VALUES: dict[str, Value] = {
  "history": history,
  "knapsack": knapsack,
  "coba": coba,
}


def allocate(
  value: Value,
  p: Float[Array, " P"],
  known: Bool[Array, " P"],
  *,
  least: int,
  most: int,
  each: float,
) -> Int[Array, " P"]:
  """Rollouts of each prompt, multiples of `least`.

  Args:
    value: V, increasing and concave in n.
    p: Estimates of the pass rates, strictly between 0 and 1.
    known: Prompts with an estimate; the others get `least`.
    least: Fewest rollouts, and the size of a chunk.
    most: A multiple of `least`.
    each: Budget of a known prompt, on average; each gets `least` whatever it
      is.
  """
  shapes.check(p=(p, "P"), known=(known, "P"))
  P, K = len(p), most // least
  # Not read, but for the mean of CoBA: padding must not change it.
  p = jnp.where(known, p, jnp.mean(p, where=known))
  n = least * jnp.arange(1.0, K + 1.0)[None]  # [1, K]
  of = value(jnp.broadcast_to(n, (P, K)), jnp.broadcast_to(p[:, None], (P, K)))
  # Of the 2nd, 3rd, .. chunk; rounding must not make a gain negative.
  gain = jnp.maximum(jnp.diff(of, axis=1), 0.0)
  gain = jnp.where(known[:, None], gain, -1.0)
  spare = jnp.sum(known) * (each - least)
  chunks = jnp.maximum(jnp.floor(spare / least), 0).astype(jnp.int32)
  # The largest gains, of equal ones those of the first prompts: concave values
  # make a prompt's chunks come in their order.
  order = jnp.argsort(-gain.ravel(), stable=True)
  rank = jnp.zeros(gain.size, jnp.int32).at[order].set(jnp.arange(gain.size))
  taken = (rank < chunks).reshape(P, K - 1) & known[:, None]
  return least * (1 + jnp.sum(taken, axis=1, dtype=jnp.int32))
