"""Procedural puzzles and their verifiers, from reasoning-gym.

Only audited tasks can be used, because many scorers of the library execute
model text or reward garbage. `ALLOWED` lists the tasks that can be generated
and scored. `STORED` lists those that are only scored, from data files, with the
reason. `REFUSED` lists the others with the reason.

    families = [Family("gcd", {"max_value": 40}), Family("leg_counting")]
    check(families)
    p = puzzle(families[0], "train", 123, seed=0)
    verify("<answer>4</answer>", p.entry).reward
"""

from brorl_jax.verdicts.base import Family
from brorl_jax.verdicts.gym.puzzles import (
  DOMAIN,
  JAILED,
  SPLITS,
  check,
  heldout,
  puzzle,
  verify,
)
from brorl_jax.verdicts.gym.tables import ALLOWED, MAX_ANSWER, REFUSED, STORED

__all__ = [
  "ALLOWED",
  "DOMAIN",
  "JAILED",
  "MAX_ANSWER",
  "REFUSED",
  "SPLITS",
  "STORED",
  "Family",
  "check",
  "heldout",
  "puzzle",
  "verify",
]
