"""The category of each reasoning-gym task: the columns of Table 5.

These are the folders of the library, version 0.1.25. They are listed here
because importing the library takes seconds.
"""

from collections.abc import Mapping

_TASKS: Mapping[str, str] = {
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
  task: category for category, tasks in _TASKS.items() for task in tasks.split()
}
