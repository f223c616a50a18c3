"""The weight of a prompt whose number of rollouts is not that of the others.

A step's loss is a mean over tokens or rollouts, in which a prompt with n of
them counts n times. `pooled` wraps any advantage so that every prompt counts
once: A[p,n] * mean(n) / n[p], over all of its rollouts.

Where a prompt stops depends on its rewards, so the estimate K (n - K) / n (n -
1) of p (1 - p), the size of its gradient, is biased: in rounds of 16, 64, 256
and 1,024 it is 3.02 times too large at p = .001 if one right and one wrong
rollout suffice, 2.09 times at p = .01, and there 1.18 times if four do.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import shapes

# An advantage that may take `weight`, see `advantages.WHITENED`.
Function = Callable[..., Array]


def pooled(
  function: Function,
  reward: Float[Array, "P N"],
  valid: Bool[Array, "P N"],
  length: Float[Array, "P N"],
  *,
  whitened: bool,
) -> Float[Array, "P N"]:
  """Every prompt counts once, whatever its number of rollouts.

  Args:
    function: The advantage.
    reward: Rewards of the rollouts.
    valid: Rollouts that count; the others get 0.
    length: Tokens.
    whitened: Whether `function` takes `weight`.
  """
  shapes.check(
    reward=(reward, "PN"), valid=(valid, "PN"), length=(length, "PN")
  )
  n = jnp.sum(valid, axis=1, keepdims=True)
  drawn = jnp.maximum(jnp.sum(n > 0), 1)
  once = jnp.where(n > 0, jnp.sum(n) / drawn / jnp.maximum(n, 1), 0.0)
  more: dict[str, Any] = {"weight": once} if whitened else {}
  return function(reward, valid, length, **more) * once
