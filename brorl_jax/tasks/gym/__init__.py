"""Procedural puzzles and their verifiers, from reasoning-gym.

Only tasks that were audited can be used: many scorers of the library execute
the model's text or pay for garbage. `ALLOWED` names the tasks that can be drawn
and judged, `STORED` those that are judged where they come from a data file and
why they are not drawn, `REFUSED` what is wrong with the others.

    families = [Family("gcd", {"max_value": 40}), Family("leg_counting")]
    check(families)
    p = puzzle(families[0], "train", 123, seed=0)
    verify("<answer>4</answer>", p.entry).reward

  tables.py       which task can be used, how far, and why not
  families.py     what a run draws from: settings, splits, held-out puzzles
  judge.py        a response and an entry to a verdict, by one of three ways
  checks.py       our own checks of an answer, task by task
  expressions.py  arithmetic and polynomials, read without executing them
"""

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.gym.families import (
  SPLITS,
  Family,
  check,
  heldout,
  is_heldout,
  puzzle,
)
from brorl_jax.tasks.gym.judge import JAILED, verify
from brorl_jax.tasks.gym.tables import ALLOWED, MAX_ANSWER, REFUSED, STORED

__all__ = [
  "ALLOWED",
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
