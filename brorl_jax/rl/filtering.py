"""Rules of dynamic sampling: which prompts a step trains on.

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
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import arrays
from brorl_jax.rl.advantages import informative


def partly_solved(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Bool[Array, " P"]:
  """Which prompts some rollouts solve and some do not.

    0 < #{n: reward[p,n] >= 1} < number of rollouts

  Rewards are raw. Only `valid` rollouts count; all if it is None.

  >>> reward = jnp.array([[1.0, 0.2], [0.5, 0.2], [1.0, 1.5]])
  >>> partly_solved(reward).tolist(), informative(reward).tolist()
  ([True, False, False], [True, True, True])
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
