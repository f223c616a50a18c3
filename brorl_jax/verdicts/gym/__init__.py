"""Procedural puzzles and their verifiers, from reasoning-gym.

Only audited tasks can be used, because many scorers of the library execute
model text or reward garbage. `ALLOWED` lists the tasks that can be generated
and scored. `STORED` lists those that are only scored, from data files, with the
reason. `REFUSED` lists the others with the reason.

    families = [Family("gcd", {"max_value": 40}), Family("leg_counting")]
    check(families)
    p = puzzle(families[0], "train", 123, seed=0)
    verify("<answer>4</answer>", p.entry).reward

  tables.py       which tasks can be used, and why not
  families.py     generates puzzles: settings, splits, held-out puzzles
  verifier.py     scores a response in one of three ways
  checks.py       our own checks of answers, by task
  solutions.py    checks of puzzles with many right answers
  expressions.py  parses arithmetic and polynomials without executing them
"""

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.domain import Family
from brorl_jax.verdicts.gym.domain import DOMAIN, check
from brorl_jax.verdicts.gym.families import SPLITS, heldout, is_heldout, puzzle
from brorl_jax.verdicts.gym.tables import ALLOWED, MAX_ANSWER, REFUSED, STORED
from brorl_jax.verdicts.gym.verifier import JAILED, verify

__all__ = [
  "ALLOWED",
  "DOMAIN",
  "JAILED",
  "MAX_ANSWER",
  "REFUSED",
  "SPLITS",
  "STORED",
  "Family",
  "Verdict",
  "check",
  "heldout",
  "is_heldout",
  "puzzle",
  "verify",
]
