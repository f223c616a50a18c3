"""Which reasoning-gym tasks can be used, and why others cannot.

All tasks of reasoning-gym 0.1.25 were audited. A task of another version that
is in none of the tables was not audited and is refused as unknown.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

MAX_ANSWER = 1_000  # characters, for tasks that are not in LONGEST
# The longest right answers of 2,000 puzzles each had 1,799, 11,400, 511 and
# 4,063 characters. Their checks take linear time.
LONGEST: Mapping[str, int] = {
  "arc_agi": 2_000,
  "palindrome_partitioning": 20_000,
  "propositional_logic": 200,  # parsed in quadratic time
  "rearc": 2_000,
  "tower_of_hanoi": 8_000,
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
  "rubiks_cube": "one puzzle takes 18 ms",
  "sokoban": "one puzzle takes 9 to 90 ms",
  "string_manipulation": "one right answer in 2,000 is empty",
  "sudoku": "one puzzle takes 22 ms",
  "zebra_puzzles": "one puzzle takes 60 to 160 ms",
}

# Tasks that can be generated and scored.
ALLOWED = frozenset(
  """
  ab aiw arc_1d base_conversion basic_arithmetic binary_alternation
  binary_matrix bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum
  circuit_logic color_cube_rotation complex_arithmetic count_bits count_primes
  countdown course_schedule cryptarithm decimal_chain_sum dice emoji_mystery
  family_relationships figlet_font fraction_simplification game_of_life
  game_of_life_halting gcd graph_color group_anagrams jugs kakurasu
  knights_knaves largest_island lcm leg_counting letter_counting letter_jumble
  mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid n_queens
  needle_haystack number_filtering number_format number_sequence
  number_sorting palindrome_generation palindrome_partitioning path_star
  prime_factorization products propositional_logic puzzle24 rearc
  rectangle_count rotate_matrix rotten_oranges self_reference
  sentence_reordering shortest_path simple_equations simple_geometry
  simple_integration spell_backward spiral_matrix string_insertion
  string_splitting string_synthesis survo syllogism tower_of_hanoi tsumego
  word_sequence_reversal word_sorting
  """.split()
)

_NONE = "its puzzles have no stored answer"

REFUSED: Mapping[str, str] = {
  "advanced_geometry": "its answers have fewer decimals than it asks for",
  "boxnet": _NONE,
  "codeio": f"{_HASH}, and many have several right answers",
  "coin_flip": "its questions do not state the number of digits",
  "composite": "it is a mixture; list its tasks as families",
  "decimal_arithmetic": "its answers are rounded after every operation",
  "knight_swap": f"{_HASH}, and one takes 300 to 600 ms",
  "polynomial_equations": "its scorer accepts garbage if there is no root",
  "power_function": "it writes the square of -2 as -2^2",
  "rush_hour": _NONE,
  "time_intervals": "some answers are a millisecond too short",
  "word_ladder": f"{_HASH}, and its scorer knows words of four letters only",
}

# Of 2,000 number sequences with complexity 3, the library's default, two took
# over 10 s. With complexity 2 the slowest took 50 ms.
MAX_COMPLEXITY = {"number_sequence": 2, "propositional_logic": 3}


@functools.cache
def library() -> Any:
  # Imported here: it takes 2 s, and the package is optional.
  try:
    import reasoning_gym
  except ImportError as error:
    raise ImportError(
      f"procedural puzzles need reasoning-gym ({error}); pip install"
      " 'brorl_jax[gym]'"
    ) from error
  return reasoning_gym


@functools.cache
def scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  """The library's scorer of a task."""
  # Cached by task: some data sets read a book when they are built.
  return library().get_score_answer_fn(name)
