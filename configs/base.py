"""Every hyperparameter with its default, from brorl_jax/config/.

README.md in this folder lists them. This config is not an experiment: run
`n512.py` or `n16.py`. `launch/switches.py` changes one field at a time.
"""

from typing import Any

import ml_collections

from brorl_jax import config
from brorl_jax.verdicts.base import DEFAULTS

# Prompts have at most 40 tokens and answers at most 5: a policy of half a
# million parameters learns these puzzles in minutes.
FAMILIES: dict[str, dict[str, Any]] = {
  "letter_counting": dict(min_words=2, max_words=3),
  "count_primes": dict(min_n=1, max_n=50),
  "leg_counting": dict(
    min_animals=1, max_animals=2, min_instances=1, max_instances=3
  ),
  "gcd": dict(min_value=1, max_value=40),
  "basic_arithmetic": dict(
    min_terms=2,
    max_terms=3,
    min_digits=1,
    max_digits=1,
    operators=["+", "-", "*"],
    allow_parentheses=False,
    allow_negation=False,
  ),
  "number_sequence": dict(
    min_terms=4, max_terms=5, min_value=-10, max_value=10, max_complexity=1
  ),
  "spell_backward": dict(min_word_len=3, max_word_len=4),
  "simple_equations": dict(
    min_terms=2,
    max_terms=2,
    min_value=1,
    max_value=10,
    operators=["+", "-"],
    operators_weights=[0.5, 0.5],
  ),
}


def get_config() -> Any:
  values = config.as_dict(config.Config())
  values["data"]["domains"] = {
    name: default._asdict() for name, default in DEFAULTS.items()
  }
  values["data"]["families"] = {
    name: {"weight": 1.0, "settings": settings}
    for name, settings in FAMILIES.items()
  }
  c = ml_collections.ConfigDict(values)
  return c.lock()  # a misspelt field in a config is an error
