"""The weight of a prompt whose number of rollouts is not that of the others.

A step's loss is a mean over tokens or rollouts, in which a prompt with n of
them counts n times. And where it stops depends on its rewards, see stopping.py.
Three treatments, each a wrapper of any advantage:

  pooled  every prompt counts once: A[p,n] * mean(n) / n[p], over all of its
          rollouts. Exact if n was chosen before drawing; after a stop as biased
          as `stopping.expected` says.
  exact   that, times `stopping.correction`: the unbiased estimate of p (1 - p)
          in place of K (n - K) / n (n - 1).
  rounds  each round is a group of its own, with its own baseline, and all are
          added up. The direction of a prompt's gradient is exact, and it counts
          E[n] times (Wald): more, the rarer its right rollouts are.

For the plain gradient of p, all with `leave_one_out`. Whatever comes after it
biases every treatment: clipping from the second minibatch on, and whitening,
which divides by a random number that the rewards have a part in.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import shapes
from brorl_jax.rl.stopping import Rounds

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


def by_round(
  function: Function,
  reward: Float[Array, "P N"],
  valid: Bool[Array, "P N"],
  length: Float[Array, "P N"],
  *,
  rounds: Rounds,
) -> Float[Array, "P N"]:
  """Each round of a prompt is a group of its own.

  Args:
    function: The advantage. It sees P groups for each round.
    reward: Rewards of the rollouts, in the order of n.
    valid: Rollouts that count; the others get 0.
    length: Tokens.
    rounds: Which rollouts are a round.
  """
  shapes.check(
    reward=(reward, "PN"), valid=(valid, "PN"), length=(length, "PN")
  )
  P, N = reward.shape
  at = jnp.arange(N)
  after = jnp.asarray(rounds.after)
  which = jnp.sum(at[None] >= after[:, None], axis=0)  # round of each n
  J = len(rounds.after)
  here = which[None] == jnp.arange(J)[:, None]  # J N
  own = valid[None] & here[:, None]  # J P N
  every = lambda x: jnp.broadcast_to(x[None], (J, P, N)).reshape(J * P, N)
  out = function(every(reward), own.reshape(J * P, N), every(length))
  return jnp.sum(out.reshape(J, P, N), axis=0)
