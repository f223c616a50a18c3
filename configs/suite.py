r"""Published evaluation sets by name, sampled as the paper does.

  brorl --mode=evaluate --config=suite:all --config.policy.checkpoint=DIR \
      --workdir=runs/all

  math          aime24 aime25 amc math500 minerva olympiadbench
  code          humanevalplus livecodebench prime
  stem          gpqa_diamond
  instructions  ifeval
  gym           puzzles, 100 of each task; of string_splitting and _synthesis
                19 and 20, of jugs 76, of tower_of_hanoi 3: there are no more

`prime` is what ProRL's tables call APPS, CodeContests, Codeforces and TACO: the
validation set of PRIME. The published test sets are `apps`, `codecontests`,
`codeforces` and `taco`. `suite:math+code` joins several; `suite:math,DIR` reads
DIR/NAME, a folder that `hf download ... --local-dir DIR/NAME` makes, or
DIR/NAME.jsonl, .json or .parquet, and no hub.

Each record has the name of its set as `source`. Rows that no verifier of this
project can judge are left out and counted by reason, as evaluations print.

16 samples, temperature .6, top-p .95 (stated by the paper) and responses of at
most 32,768 tokens (the authors' script for ProRL v2).
"""

import pathlib
from typing import Any

import ml_collections

from brorl_jax.configs import base, suite_rows
from brorl_jax.verdicts.base import MADE

ROWS = "brorl_jax.configs.suite_rows"
SCRIPT = "brorl_jax.configs.suite_puzzles"
SUITES = {
  "math": ("aime24", "aime25", "amc", "math500", "minerva", "olympiadbench"),
  "code": ("humanevalplus", "livecodebench", "prime"),
  "stem": ("gpqa_diamond",),
  "instructions": ("ifeval",),
  MADE: (MADE,),
}
ALONE = suite_rows.PRIME  # the test sets of which `prime` has a part
SETS = (*suite_rows.HUB, MADE)
# Tokens of the longest prompt; a longer one is left out and counted.
_PROMPT = {"code": 4096, MADE: 8192}
_USUAL_PROMPT = 2048

# The 96 tasks that the authors' evaluation script names (`palindrome` is what
# reasoning-gym calls palindrome_generation now), in four groups.
# 1. Generated when they are needed.
GENERATED = tuple(
  """
  ab aiw arc_1d base_conversion basic_arithmetic binary_alternation
  binary_matrix bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum
  circuit_logic color_cube_rotation complex_arithmetic count_bits count_primes
  countdown course_schedule cryptarithm decimal_chain_sum dice emoji_mystery
  family_relationships figlet_font fraction_simplification game_of_life gcd
  graph_color group_anagrams jugs knights_knaves largest_island lcm leg_counting
  letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze
  mini_sudoku n_queens needle_haystack number_filtering number_format
  number_sequence number_sorting palindrome_generation palindrome_partitioning
  prime_factorization products propositional_logic rectangle_count rotate_matrix
  rotten_oranges self_reference sentence_reordering shortest_path
  simple_equations simple_geometry simple_integration spell_backward
  spiral_matrix string_insertion string_splitting string_synthesis syllogism
  tower_of_hanoi tsumego word_sequence_reversal word_sorting
  """.split()
)
# 2. Read from DIR/gym.jsonl, which `suite_puzzles` writes once: slow, or other
# puzzles in every process. `rearc` has prompts of 8,600 characters.
FROM_FILE = tuple(
  """
  arc_agi bf futoshiki gsm_symbolic intermediate_integration isomorphic_strings
  list_functions polynomial_multiplication pool_matrix quantum_lock ransom_note
  rearc rubiks_cube sokoban string_manipulation sudoku zebra_puzzles
  """.split()
)
# 3. Left out, for the reasons in brorl_jax/verdicts/gym/tables.py.
LEFT_OUT = tuple(
  """
  advanced_geometry codeio decimal_arithmetic knight_swap polynomial_equations
  power_function rush_hour time_intervals word_ladder
  """.split()
)
# With the default, 3, two puzzles of 2,000 took over 10 s.
SETTINGS = {"number_sequence": {"max_complexity": 2}}


def chosen(names: str) -> list[str]:
  """The sets of "math+aime24", each once; raises ValueError for another."""
  out: dict[str, None] = {}
  for name in names.split("+"):
    if name == "all":
      out |= dict.fromkeys(one for some in SUITES.values() for one in some)
    elif name in SUITES:
      out |= dict.fromkeys(SUITES[name])
    elif name in SETS:
      out[name] = None
    else:
      every = ", ".join((*SUITES, "all", *SETS))
      raise ValueError(f"suite {name!r} does not exist; choose {every}")
  both = [name for name in ALONE if name in out]
  if both and "prime" in out:
    raise ValueError(
      f"suite {names!r}: prime has problems of {', '.join(both)}; name one"
    )
  return list(out)


def download(name: str, to: pathlib.Path) -> str:
  """The command that makes the folder of a set."""
  where, _, revision = suite_rows.HUB[name].partition("@")
  repository, _, split = where.partition(":")
  at = f" --revision {revision}" if revision else ""
  return (
    f'hf download {repository} --repo-type dataset{at} --include "*{split}*" '
    f"--local-dir {to}"
  )


def local(name: str, folder: pathlib.Path) -> str:
  """The entry of data.heldout_files for a set of a folder."""
  for ending in (".jsonl", ".json", ".parquet"):
    if (file := folder / f"{name}{ending}").is_file():
      return str(file)
  path = folder / name
  if not path.is_dir():
    if name == MADE:
      remedy = f"python -m {SCRIPT} {path}.jsonl"
    else:
      remedy = download(name, path)
    raise ValueError(
      f"set {name!r} is not in {folder} (folder, .jsonl, .json or .parquet); "
      f"run '{remedy}'"
    )
  if name == MADE:
    return str(path)
  split = suite_rows.HUB[name].partition(":")[2].partition("@")[0]
  # Whoever copied only the right files into the folder needs no split.
  inside = (p.relative_to(path).as_posix() for p in path.rglob("*"))
  named = any(f"/{p}".find(f"/{split}") >= 0 for p in inside)
  return f"{path}:{split}" if named else str(path)


def coverage(folder: str) -> str:
  """How many of the 96 tasks a suite has, and which it lacks."""
  out = ", ".join(LEFT_OUT)
  why = (
    f"{len(LEFT_OUT)} are left out (brorl_jax/verdicts/gym/tables.py): {out}"
  )
  if folder:
    most = len(GENERATED) + len(FROM_FILE)
    return f"gym: at most {most} of 96 tasks, those of the file; {why}"
  more = ", ".join(FROM_FILE)
  return (
    f"gym: {len(GENERATED)} of 96 tasks; {len(FROM_FILE)} need a file "
    f"(python -m {SCRIPT} DIR/gym.jsonl): {more}; {why}"
  )


def get_config(names: str = "all"):
  names, _, folder = names.partition(",")
  sets = chosen(names)
  c: Any = base.get_config()
  files: dict[str, str] = {}
  generated = MADE in sets and not folder
  for name in sets:
    if folder:
      files[name] = local(name, pathlib.Path(folder))
    elif name != MADE:
      files[name] = f"hub:{suite_rows.HUB[name]}"
  if MADE in sets:
    suite_rows.tell(coverage(folder))
  c.data.heldout_files = tuple(files.values())
  c.data.fields = ";".join(
    f"{file}={ROWS}:{name}" for name, file in files.items()
  )
  c.data.skip_bad = True
  c.data.puzzles = generated
  c.data.families = _families()
  c.data.domains[MADE].instruction = (
    "Think step by step, then write the final answer alone between <answer> "
    "and </answer>."
  )
  programs = {"humanevalplus", "livecodebench", "prime", *ALONE} & {*sets}
  c.data.prompt_tokens = max(
    _PROMPT[MADE] if MADE in sets else 0,
    _PROMPT["code"] if programs else 0,
    _USUAL_PROMPT,
  )
  c.eval.prompts = 0  # whole sets, and 100 puzzles of each task
  c.eval.n = 16
  c.eval.temperature, c.eval.top_p = 0.6, 0.95
  c.eval.max_new_tokens = 32_768
  c.policy.dtype = "auto"
  # As many as fit.
  c.sampling.in_flight = c.sampling.slots = c.sampling.lanes = 0
  return c


def _families() -> Any:
  c = ml_collections.ConfigDict()
  for name in GENERATED:
    c[name] = {"weight": 1.0, "settings": SETTINGS.get(name, {})}
  return c
