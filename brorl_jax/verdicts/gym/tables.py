"""Which reasoning-gym tasks can be used, why others cannot, and categories.

All tasks of reasoning-gym 0.1.25 were audited. A task of another version that
is in none of the tables was not audited and is refused as unknown.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

MAX_ANSWER = 1_000  # characters, for tasks that are not in LONGEST
# The longest right answers of 2,000 puzzles each had 1,799, 11,400, 511 and
# 4,063 characters. Their checks take linear time.
LONGEST: Mapping[str, int] = {
  "arc_agi": 2_000,
  "palindrome_partitioning": 20_000,
  "rearc": 2_000,
  "tower_of_hanoi": 8_000,
}

# The category of each task that can be scored, as the columns of Table 5 have
# it: its folder in the library. Importing the library takes seconds.
_CATEGORIES: Mapping[str, str] = {
  "algebra": """
    complex_arithmetic intermediate_integration polynomial_multiplication
    simple_equations simple_integration
  """,
  "algorithmic": """
    ab base_conversion binary_alternation binary_matrix caesar_cipher
    count_primes cryptarithm game_of_life game_of_life_halting group_anagrams
    isomorphic_strings jugs letter_counting letter_jumble manipulate_matrix
    number_filtering number_sorting palindrome_generation
    palindrome_partitioning pool_matrix ransom_note rotate_matrix
    rotten_oranges sentence_reordering spell_backward spiral_matrix
    string_insertion string_manipulation string_splitting string_synthesis
    word_sequence_reversal word_sorting
  """,
  "arc": "arc_1d arc_agi rearc",
  "arithmetic": """
    basic_arithmetic bitwise_arithmetic calendar_arithmetic chain_sum
    count_bits decimal_chain_sum dice fraction_simplification gcd gsm_symbolic
    lcm leg_counting number_format prime_factorization products
  """,
  "code": "bf",
  "cognition": """
    color_cube_rotation figlet_font modulo_grid needle_haystack
    number_sequence rectangle_count
  """,
  "games": """
    countdown emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku
    n_queens puzzle24 sokoban sudoku survo tower_of_hanoi tsumego
  """,
  "geometry": "simple_geometry",
  "graphs": """
    course_schedule family_relationships largest_island path_star quantum_lock
    shortest_path
  """,
  "induction": "acre list_functions",
  "logic": """
    aiw circuit_logic knights_knaves self_reference syllogism zebra_puzzles
  """,
}

# By task.
CATEGORIES: Mapping[str, str] = {
  task: category
  for category, tasks in _CATEGORIES.items()
  for task in tasks.split()
}

_HASH = "its puzzles change with PYTHONHASHSEED"
_ORDER = "its puzzles depend on more than seed + index"

# Tasks that are scored but not generated, with the reason.
STORED: Mapping[str, str] = {
  "acre": _ORDER,
  "arc_agi": "both sides of the split have the same puzzle in other colours",
  "bf": "it prints to stdout for every puzzle",
  "futoshiki": "one puzzle takes 60 to 260 ms",
  "gsm_symbolic": _ORDER,
  "intermediate_integration": "one puzzle takes 30 to 130 ms",
  "isomorphic_strings": _HASH,
  "list_functions": _ORDER,
  "polynomial_multiplication": _HASH,
  "pool_matrix": "its generator accepts no seed above 2**32",
  "quantum_lock": "one puzzle takes 24 to 42 ms",
  "ransom_note": _HASH,
  "sokoban": "one puzzle takes 9 to 90 ms",
  "string_manipulation": "one right answer in 2,000 is empty",
  "sudoku": "one puzzle takes 22 ms",
  "zebra_puzzles": "one puzzle takes 60 to 160 ms",
}

# Tasks that can be generated and scored.
ALLOWED = frozenset(CATEGORIES.keys() - STORED.keys())

_NONE = "its puzzles have no stored answer"

REFUSED: Mapping[str, str] = {
  "advanced_geometry": "its answers have fewer decimals than it asks for",
  "boxnet": _NONE,
  "codeio": f"{_HASH}, and many have several right answers",
  "coin_flip": "its questions do not state the number of digits",
  "composite": "it is a mixture; list its tasks as families",
  "decimal_arithmetic": "its answers are rounded after every operation",
  "graph_color": _NONE,
  "knight_swap": f"{_HASH}, and one takes 300 to 600 ms",
  "polynomial_equations": "its scorer accepts garbage if there is no root",
  "power_function": "it writes the square of -2 as -2^2",
  "propositional_logic": _NONE,
  "rubiks_cube": _NONE,
  "rush_hour": _NONE,
  "time_intervals": "some answers are a millisecond too short",
  "word_ladder": f"{_HASH}, and its scorer knows words of four letters only",
}

# Of 2,000 number sequences with complexity 3, the library's default, two took
# over 10 s. With complexity 2 the slowest took 50 ms.
MAX_COMPLEXITY = 2


def refuse(name: str, *, drawn: bool) -> None:
  """Refuses a task that cannot be used.

  Args:
    drawn: Whether its puzzles are generated here, not only scored.
  """
  if name in ALLOWED or (name in STORED and not drawn):
    return
  remedy = "use one of gym.ALLOWED"
  if name in STORED:
    remedy = f"read its puzzles from a data file or {remedy}"
  if name in STORED or name in REFUSED:
    why = {**STORED, **REFUSED}[name]
    raise ValueError(f"task {name!r} is refused: {why}; {remedy}")
  if close := difflib.get_close_matches(str(name), sorted(ALLOWED), n=1):
    remedy = f"did you mean {close[0]!r}?"
  raise ValueError(f"task {name!r} is unknown; {remedy}")


@functools.cache
def library() -> Any:
  """The module reasoning_gym."""
  # Imported here: it takes 2 s, and the package is optional.
  try:
    import reasoning_gym
  except ImportError as error:
    raise ImportError(
      f"procedural puzzles need reasoning-gym ({error}); pip install"
      " 'brorl_jax[gym]'"
    ) from error
  return reasoning_gym
