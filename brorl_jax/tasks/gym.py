"""Procedural puzzles and their verifiers, from reasoning-gym.

Only tasks that were audited (reasoning-gym 0.1.25) can be used: many scorers
of the library execute the model's text or pay for garbage. `ALLOWED` names the
tasks, `REFUSED` what is wrong with the others.

    families = [Family("gcd", {"max_value": 40}), Family("leg_counting")]
    check(families)
    p = puzzle(families[0], "train", 123, seed=0)
    verify("<answer>4</answer>", p.entry).reward

Two walls keep held-out puzzles out of training. Splits draw from disjoint
ranges of generator seeds, and, because a small family repeats its questions
under different seeds, a hash of the question puts one text in ten on the
held-out side for good.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.tasks import mixture
from brorl_jax.tasks.base import Example, Verdict

MAX_ANSWER = 1_000  # characters; the longest right answer measured has 419
SPLITS = ("train", "heldout", "warmup")

# Bits of a generator seed, from the low end. 2**44 indexes are 16 million
# steps of mixture.index; the stride is how far an index may walk to find a
# question on its side of the split.
_STRIDE_BITS, _INDEX_BITS, _SPLIT_BITS = 10, 44, 2
_HELDOUT_ONE_IN = 10

ALLOWED = frozenset(
  """
  ab aiw arc_1d base_conversion basic_arithmetic binary_alternation
  caesar_cipher chain_sum circuit_logic color_cube_rotation count_bits
  count_primes course_schedule cryptarithm decimal_chain_sum dice
  emoji_mystery family_relationships fraction_simplification gcd
  group_anagrams knights_knaves largest_island lcm leg_counting
  letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze
  mini_sudoku modulo_grid needle_haystack number_filtering number_sequence
  palindrome_generation path_star products rectangle_count rotate_matrix
  rotten_oranges self_reference sentence_reordering shortest_path
  simple_equations simple_geometry spell_backward string_splitting
  string_synthesis syllogism tsumego word_sequence_reversal word_sorting
  """.split()
)

_EVAL = "its scorer executes the answer with eval"
_SYMPY = "its scorer executes the answer with sympy.parse_expr"
_JUNK = "its scorer pays in full for text added to the right answer"
_NONE = "its puzzles come without an answer"
_HASH = "its puzzles change with PYTHONHASHSEED"
_ORDER = "its puzzles depend on more than seed + index"
_TUPLES = "its scorer refuses the right answer of an entry stored as JSON"

REFUSED: Mapping[str, str] = {
  "acre": _ORDER,
  "advanced_geometry": _JUNK,
  "arc_agi": _TUPLES,
  "bf": "it prints to stdout for every puzzle",
  "binary_matrix": _EVAL,
  "bitwise_arithmetic": "its scorer executes the stored problem with eval",
  "boxnet": _NONE,
  "calendar_arithmetic": "its scorer raises on large numbers",
  "codeio": _HASH,
  "coin_flip": "its scorer pays in full for the first digit",
  "complex_arithmetic": "its scorer pays in full for nan",
  "composite": "it is a mixture; list its tasks as families",
  "countdown": _SYMPY,
  "decimal_arithmetic": "its scorer's tolerance depends on the settings",
  "figlet_font": "its scorer pays by the letter and for what follows",
  "futoshiki": "one puzzle takes 60 to 260 ms",
  "game_of_life": "its scorer raises on {}",
  "game_of_life_halting": "its scorer pays in full for any text",
  "graph_color": _NONE,
  "gsm_symbolic": "its scorer reads the first number and drops its sign",
  "intermediate_integration": _SYMPY,
  "isomorphic_strings": _HASH,
  "jugs": "its scorer pays in full for words added to the moves",
  "kakurasu": _JUNK,
  "knight_swap": _HASH,
  "list_functions": _ORDER,
  "n_queens": _EVAL,
  "number_format": "its scorer pays in full for a number within 0.01",
  "number_sorting": "its scorer pays in full for numbers off by up to 1",
  "palindrome_partitioning": "its scorer takes a string for a list of pieces",
  "polynomial_equations": "its scorer pays for garbage if there is no root",
  "polynomial_multiplication": _SYMPY,
  "pool_matrix": "its scorer pays in full for numbers off by 1 %",
  "power_function": "its scorer pays in full for three right digits",
  "prime_factorization": "its scorer raises on text",
  "propositional_logic": _NONE,
  "puzzle24": _SYMPY,
  "quantum_lock": _JUNK,
  "ransom_note": _HASH,
  "rearc": _TUPLES,
  "rubiks_cube": _NONE,
  "rush_hour": _NONE,
  "simple_integration": _SYMPY,
  "sokoban": _JUNK,
  "spiral_matrix": _EVAL,
  "string_insertion": _EVAL,
  "string_manipulation": "its right answer may be empty",
  "sudoku": "one puzzle takes 22 ms",
  "survo": _JUNK,
  "time_intervals": _JUNK,
  "tower_of_hanoi": "its scorer prints, and reads moves inside other text",
  "word_ladder": _HASH,
  "zebra_puzzles": "one puzzle takes 60 to 160 ms",
}

# (task, setting) -> largest value, and why. Of 2,000 number sequences of
# complexity 3, the library's default, two took over 10 s; of complexity 2 the
# slowest took 50 ms.
_LARGEST: Mapping[tuple[str, str], tuple[int, str]] = {
  ("number_sequence", "max_complexity"): (
    2,
    "one puzzle may then take over 10 s",
  ),
}


@dataclasses.dataclass(frozen=True)
class Family:
  """A task with the settings that make it easy or hard.

  Attributes:
    name: One of `ALLOWED`.
    settings: Fields of the task's reasoning-gym configuration; what is left
      out keeps the library's default.
    weight: Relative share of the training prompts.
  """

  name: str
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  weight: float = 1.0

  def __hash__(self) -> int:
    # repr because settings hold lists and dicts; equality stays field by field.
    return hash((self.name, repr(sorted(self.settings.items()))))


def verify(response: str, entry: Mapping[str, Any]) -> Verdict:
  """Judges a response by the scorer of the task that made the puzzle.

  The answer is the last complete `<answer>...</answer>`, or the whole response
  where there is none, stripped. It passes if the task's scorer gives it 1.0
  (and, for the tasks whose scorer overlooks text beside the right answer, if
  there is no such text).

  Args:
    response: What the policy wrote. Never executed.
    entry: A reasoning-gym item: question, answer, metadata. It may have been
      stored as JSON.

  Returns:
    A pass or a fail. Invalid only if the scorer raises on the entry's own
    answer too: then the entry is damaged.

  Raises:
    ValueError: If the entry names no task, or one that is not allowed.
  """
  if not isinstance(response, str):
    raise ValueError(
      f"response is a {type(response).__name__}; it must be text"
    )
  name, oracle = _task_and_oracle(entry)
  answer = _extract(response)
  if not answer:
    return Verdict("fail", 0.0, "empty answer", answer)
  if len(answer) > MAX_ANSWER:
    reason = f"too long: {len(answer)} characters, at most {MAX_ANSWER}"
    return Verdict("fail", 0.0, reason, answer[:MAX_ANSWER])
  score_answer = _scorer(name)
  try:
    score = float(score_answer(answer, entry))
  except Exception as error:
    reason = f"scorer raised {type(error).__name__}"
    try:
      score_answer(oracle, entry)
    except Exception:
      return Verdict("invalid", 0.0, f"{reason} on its own answer", answer)
    return Verdict("fail", 0.0, reason, answer)
  if not math.isfinite(score):
    return Verdict("fail", 0.0, f"scorer gave {score}", answer)
  if score < 1.0:
    return Verdict("fail", score, "wrong answer", answer)
  if name in _NOTHING_ELSE and not _NOTHING_ELSE[name](answer, oracle):
    return Verdict("fail", 0.0, "text beside the answer", answer)
  return Verdict("pass", score, "", answer)


def check(families: Sequence[Family]) -> None:
  """Refuses families that would fail later, before anything else runs.

  Args:
    families: What the run draws its puzzles from.

  Raises:
    ValueError: One line naming the family, the setting, its value and the
      remedy, if a task is not allowed, a setting is unknown, of the wrong type
      or out of range, a family is listed twice or makes no puzzles, or the
      weights define no distribution.
  """
  if not families:
    raise ValueError("families is empty; list at least one")
  names = [family.name for family in families]
  for family in families:
    if names.count(family.name) > 1:
      raise ValueError(
        f"family {family.name!r} is listed {names.count(family.name)} times;"
        " list it once, with one weight and one range of settings"
      )
    _dataset(family)
  mixture.check([family.weight for family in families])
  for family in families:
    for split in SPLITS:
      entry = puzzle(family, split, 0, seed=0).entry
      verdict = verify(entry["answer"], entry)
      if verdict.status != "pass":
        raise ValueError(
          f"{_describe(family)} makes puzzles whose own answer does not pass:"
          f" {verdict.reason}; change its settings"
        )


def puzzle(family: Family, split: str, index: int, *, seed: int) -> Example:
  """One puzzle, a pure function of its arguments.

  Index i of a split owns the 1,024 generator seeds

    g = seed * 2**56 + split * 2**54 + i * 2**10 + [0, 2**10)

  with split 0, 1, 2 for train, heldout, warmup, and takes the first whose
  question is on its side: held-out if a hash of task name and question is
  0 mod 10, else train and warmup. So no question of the held-out side is ever
  drawn by the others, under any seed and any settings. Two indexes may meet
  the same question.

  Args:
    family: Task and settings.
    split: "train", "heldout" or "warmup".
    index: Which puzzle, in [0, 2**44).
    seed: The run's data seed, >= 0.

  Raises:
    ValueError: If an argument is wrong, or none of the index's questions is on
      the split's side: the settings allow too few questions.
  """
  if split not in SPLITS:
    raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS)}")
  if not 0 <= index < 2**_INDEX_BITS:
    raise ValueError(f"index is {index}; use 0 to 2**{_INDEX_BITS} - 1")
  if seed < 0:
    # The generators ignore a seed's sign.
    raise ValueError(f"seed is {seed}; use a number >= 0")
  dataset = _dataset(family)
  start = (seed << _SPLIT_BITS) + SPLITS.index(split)
  start = ((start << _INDEX_BITS) + index) << _STRIDE_BITS
  for generator_seed in range(start, start + 2**_STRIDE_BITS):
    try:
      # Item i of a dataset depends on seed + i alone, and this one's seed is 0.
      entry = dataset[generator_seed]
    except Exception as error:
      raise ValueError(
        f"{_describe(family)} cannot make a puzzle:"
        f" {_one_line(error)}; change its settings"
      ) from error
    if _is_heldout(family.name, entry["question"]) == (split == "heldout"):
      name = f"{family.name}/{split}/{index}"
      asked = ({"role": "user", "content": entry["question"]},)
      return Example(name, "gym", family.name, asked, entry)
  raise ValueError(
    f"{_describe(family)} has no question for {split} among"
    f" {2**_STRIDE_BITS} drawn; widen its settings"
  )


def heldout(
  families: Iterable[Family], *, per_family: int, seed: int
) -> list[Example]:
  """Held-out puzzles with distinct questions, ordered by family.

  Args:
    families: Tasks and settings.
    per_family: Distinct questions wanted of each family, >= 1.
    seed: The run's data seed, >= 0.

  Raises:
    ValueError: If a family is too small to give that many. It is called too
      small when one more question would have shown up with probability
      1 - exp(-10).
  """
  if per_family < 1:
    raise ValueError(f"per_family is {per_family}; use a number >= 1")
  puzzles = []
  for family in families:
    found: dict[str, Example] = {}
    index = repeats = 0
    while len(found) < per_family:
      candidate = puzzle(family, "heldout", index, seed=seed)
      index += 1
      if candidate.question not in found:
        found[candidate.question] = candidate
        repeats = 0
        continue
      repeats += 1
      # With one of len + 1 questions missing, a draw misses it with
      # probability len / (len + 1); 10 (len + 1) in a row with exp(-10).
      if repeats >= 10 * (len(found) + 1):
        raise ValueError(
          f"{_describe(family)} has only {len(found)} distinct held-out"
          f" questions, {per_family} are wanted; widen its settings or lower"
          " per_family"
        )
    puzzles.extend(found.values())
  return puzzles


def _task_and_oracle(entry: Mapping[str, Any]) -> tuple[str, str]:
  metadata = entry.get("metadata")
  name = (
    metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
  )
  if not isinstance(name, str):
    raise ValueError(
      "entry has no metadata.source_dataset; it must name the task"
    )
  _refuse(name)
  oracle = entry.get("answer")
  if not isinstance(oracle, str):
    raise ValueError(
      f"entry of task {name!r} has answer {oracle!r}, not a text"
    )
  return name, oracle


def _extract(response: str) -> str:
  # Not a regular expression: a response of unclosed tags takes it quadratic
  # time.
  close = response.rfind("</answer>")
  start = response.rfind("<answer>", 0, max(close, 0))
  if start < 0:
    return response.strip()
  start += len("<answer>")
  return response[start : response.find("</answer>", start)].strip()


def _refuse(name: str) -> None:
  if name in ALLOWED:
    return
  if name in REFUSED:
    raise ValueError(
      f"task {name!r} is refused: {REFUSED[name]}; use one of gym.ALLOWED"
    )
  close = difflib.get_close_matches(str(name), sorted(ALLOWED), n=1)
  remedy = f"did you mean {close[0]!r}?" if close else "use one of gym.ALLOWED"
  raise ValueError(f"task {name!r} is unknown; {remedy}")


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Once per task: some datasets read a book when they are built.
  return _library().get_score_answer_fn(name)


@functools.cache
def _library() -> Any:
  # Here because the import takes 2 s and the package is optional.
  try:
    import reasoning_gym
  except ImportError as error:
    raise ImportError(
      f"procedural puzzles need reasoning-gym ({error}); pip install"
      " reasoning-gym"
    ) from error
  return reasoning_gym


@functools.lru_cache(maxsize=256)
def _dataset(family: Family) -> Any:
  _refuse(family.name)
  _, config_class = _library().factory.DATASETS[family.name]
  defaults = {
    field.name: _default(field)
    for field in dataclasses.fields(config_class)
    if field.name not in ("seed", "size")
  }
  for key, value in family.settings.items():
    where = f"family {family.name!r}: setting {key} = {value!r}"
    if key not in defaults:
      close = difflib.get_close_matches(str(key), list(defaults), n=1)
      remedy = (
        f"did you mean {close[0]}?" if close else (f"use {', '.join(defaults)}")
      )
      raise ValueError(f"{where} is unknown; {remedy}")
    wanted = _wanted_type(defaults[key], value)
    if wanted:
      raise ValueError(
        f"{where} is a {type(value).__name__}; it must be {wanted},"
        f" such as {defaults[key]!r}"
      )
  try:
    dataset = _library().create_dataset(
      family.name, **family.settings, seed=0, size=1
    )
  except Exception as error:
    raise ValueError(
      f"{_describe(family)} is refused: {_one_line(error)}"
    ) from error
  for (name, key), (largest, why) in _LARGEST.items():
    if name == family.name and getattr(dataset.config, key) > largest:
      raise ValueError(
        f"family {name!r}: setting {key} = {getattr(dataset.config, key)} is"
        f" too large, {why}; set it to at most {largest}"
      )
  return dataset


def _default(field: dataclasses.Field[Any]) -> Any:
  if field.default is not dataclasses.MISSING:
    return field.default
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return None


def _wanted_type(default: Any, value: Any) -> str | None:
  """What `value` should have been, or None if it fits the default's type."""
  if isinstance(default, bool):
    return None if isinstance(value, bool) else "true or false"
  if isinstance(default, int):
    fits = isinstance(value, int) and not isinstance(value, bool)
    return None if fits else "a whole number"
  if isinstance(default, float):
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return None if fits and math.isfinite(value) else "a finite number"
  if isinstance(default, str):
    return None if isinstance(value, str) else "a text"
  if isinstance(default, tuple | list):
    return None if isinstance(value, tuple | list) else "a list"
  return None


def _describe(family: Family) -> str:
  settings = ", ".join(f"{k}={v!r}" for k, v in family.settings.items())
  return f"family {family.name!r} with {settings or 'default settings'}"


def _one_line(error: Exception) -> str:
  """The message of `error`; of a bare assert, the condition that failed."""
  text = " ".join(str(error).split())
  if text or error.__traceback__ is None:
    return text or type(error).__name__
  line = traceback.extract_tb(error.__traceback__)[-1].line or ""
  return line.removeprefix("assert ").replace("self.", "") + " is required"


def _is_heldout(name: str, question: str) -> bool:
  digest = hashlib.blake2b(
    f"{name}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8
  ).digest()
  return int.from_bytes(digest, "little") % _HELDOUT_ONE_IN == 0


def _same_text(answer: str, oracle: str) -> bool:
  return "".join(answer.lower().split()) == "".join(oracle.lower().split())


def _same_words(answer: str, oracle: str) -> bool:
  def words(text: str) -> list[str]:
    parts = re.sub("[.,()]", " ", text.lower()).split()
    return sorted(w for w in parts if w not in ("is", "a", "an", "and"))

  return words(answer) == words(oracle)


def _one_fraction(answer: str, oracle: str) -> bool:
  number = r"\s*[0-9]+\s*"
  plain = rf"{number}/{number}"
  latex = rf"\s*\\d?frac\s*{{{number}}}\s*{{{number}}}\s*"
  return re.fullmatch(rf"\$?({plain}|{latex})\$?", answer) is not None


# Tasks whose scorer gives 1.0 to the right answer with other text beside it,
# and the test that there is none. spell_backward adds 1/n for each of n right
# letters and meant to stop short of 1.0, but compares a rounded sum with it.
_NOTHING_ELSE: Mapping[str, Callable[[str, str], bool]] = {
  "fraction_simplification": _one_fraction,
  "knights_knaves": _same_words,
  "letter_jumble": _same_text,
  "spell_backward": _same_text,
  "word_sorting": _same_text,
}
