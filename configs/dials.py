"""Puzzles that the embedded policy `steps` knows; not a run.

Settings of each task: those of a run, and a harder side to look at only.

Careful steps take at most about 120 tokens with the first and about 160 with
the second, a token being a digit, a sign or a word. Every puzzle needs at
least two steps.

The harder side has more steps and larger results, but except in `products` no
longer numbers in the question: the embedded policy drops digits of those. With
them six of ten tasks were at 0 before and after a run, which shows nothing.
"""

from collections.abc import Mapping
from typing import Any

# Weight 0 for "*": it multiplies the variable by 0 in some puzzles.
_SUMS = {"operators_weights": [0.5, 0.5, 0.0]}

DIALS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
  "chain_sum": (
    {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 2},
    {"min_terms": 5, "max_terms": 7, "min_digits": 1, "max_digits": 2},
  ),
  "products": (
    {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3},
  ),
  "gcd": (
    {"min_value": 4, "max_value": 150},
    {"min_value": 150, "max_value": 400},
  ),
  "lcm": (
    {"min_value": 2, "max_value": 30},
    {"min_value": 30, "max_value": 60},
  ),
  "base_conversion": (
    {"min_base": 2, "max_base": 12, "min_value": 12, "max_value": 100},
    {"min_base": 2, "max_base": 16, "min_value": 100, "max_value": 300},
  ),
  "simple_equations": (
    {"min_terms": 2, "max_terms": 3, "max_value": 15, **_SUMS},
    {"min_terms": 3, "max_terms": 4, "max_value": 30, **_SUMS},
  ),
  "letter_counting": (
    {"min_words": 2, "max_words": 6},
    {"min_words": 7, "max_words": 9},
  ),
  "leg_counting": (
    {"min_animals": 2, "max_animals": 5, "max_instances": 6},
    {"min_animals": 6, "max_animals": 8, "max_instances": 6},
  ),
  "count_bits": (
    {"min_n": 8, "max_n": 511},
    {"min_n": 512, "max_n": 999},
  ),
  "prime_factorization": (
    {"min_value": 8, "max_value": 600},
    {"min_value": 601, "max_value": 999},
  ),
  "countdown": (
    {
      "min_numbers": 3,
      "max_numbers": 4,
      "max_value": 15,
      "min_target": 5,
      "max_target": 60,
    },
    {
      "min_numbers": 4,
      "max_numbers": 4,
      "max_value": 25,
      "min_target": 20,
      "max_target": 99,
    },
  ),
  "path_star": (
    {
      "degree": 2,
      "node_range": 100,
      "min_path_length": 2,
      "max_path_length": 5,
    },
    {
      "degree": 3,
      "node_range": 100,
      "min_path_length": 4,
      "max_path_length": 6,
    },
  ),
}
