"""Generates puzzles from families.

Two rules keep held-out puzzles out of training. Splits use disjoint ranges of
generator seeds. And because a small family repeats its questions under
different seeds, a hash of the question assigns one in ten to the held-out side.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import reprlib
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from brorl_jax.verdicts import mixture
from brorl_jax.verdicts.base import Example, Family
from brorl_jax.verdicts.gym.tables import LARGEST, library, refuse

SPLITS = ("train", "heldout", "warmup")

# Bits of a generator seed, from the low end. 2**44 indexes are 16 million steps
# of mixture.index. The stride is the number of seeds that an index may try
# until a question is on its side of the split.
_STRIDE_BITS, _INDEX_BITS, _SPLIT_BITS = 10, 44, 2
_HELDOUT_ONE_IN = 10


def check(families: Sequence[Family]) -> None:
  """Refuses families that would fail later in a run.

  Raises:
    ValueError: A task is not allowed; a setting is unknown, of the wrong type
      or out of range; a family is listed twice; or the weights are not valid.
      The message is one line with family, setting, value and remedy.
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


def puzzle(family: Family, split: str, index: int, *, seed: int) -> Example:
  """Generates one puzzle, a pure function of the arguments.

  Index i of a split has the 1,024 generator seeds

    g = seed * 2**56 + split * 2**54 + i * 2**10 + [0, 2**10)

  with split 0, 1, 2 for train, heldout, warmup. It takes the first seed whose
  question is on its side: held-out if a hash of task name and question is
  0 mod 10, else train and warmup. So the other splits never generate a held-out
  question, under any seed and settings. Two indexes may give the same question.

  Raises:
    ValueError: An argument is wrong, or the settings allow too few questions
      to find one on the side of the split.
  """
  if split not in SPLITS:
    raise ValueError(f"split = {split!r}; use one of {', '.join(SPLITS)}")
  if not 0 <= index < 2**_INDEX_BITS:
    raise ValueError(f"index = {index}; use 0 to 2**{_INDEX_BITS} - 1")
  if seed < 0:
    # The generators ignore a seed's sign.
    raise ValueError(f"seed = {seed}; use a number >= 0")
  dataset = _dataset(family)
  start = (seed << _SPLIT_BITS) + SPLITS.index(split)
  start = ((start << _INDEX_BITS) + index) << _STRIDE_BITS
  for generator_seed in range(start, start + 2**_STRIDE_BITS):
    try:
      # Item i of a dataset depends on seed + i alone, and this one's seed is 0.
      entry = dataset[generator_seed]
    except Exception as error:
      raise ValueError(
        f"{describe(family)} cannot generate a puzzle:"
        f" {_one_line(error)}; change its settings"
      ) from error
    if is_heldout(family.name, entry["question"]) == (split == "heldout"):
      name = f"{family.name}/{split}/{index}"
      asked = ({"role": "user", "content": entry["question"]},)
      return Example(name, "gym", family.name, asked, entry)
  raise ValueError(
    f"{describe(family)} has no {split} question in {2**_STRIDE_BITS} tries;"
    " widen its settings"
  )


def is_heldout(task: str, question: str) -> bool:
  """Whether a question is on the held-out side of its task."""
  digest = hashlib.blake2b(
    f"{task}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8
  ).digest()
  return int.from_bytes(digest, "little") % _HELDOUT_ONE_IN == 0


def heldout(
  families: Iterable[Family], *, per_family: int, seed: int
) -> list[Example]:
  """Held-out puzzles with distinct questions, ordered by family.

  Raises:
    ValueError: A family has too few questions. It is called too small when one
      more question would have appeared with probability 1 - exp(-10).
  """
  if per_family < 1:
    raise ValueError(f"per_family = {per_family}; use a number >= 1")
  puzzles = []
  for family in families:
    distinct: dict[str, Example] = {}
    index = repeats = 0
    while len(distinct) < per_family:
      candidate = puzzle(family, "heldout", index, seed=seed)
      index += 1
      if candidate.question not in distinct:
        distinct[candidate.question] = candidate
        repeats = 0
        continue
      repeats += 1
      # With one of len + 1 questions missing, a draw misses it with
      # probability len / (len + 1); 10 (len + 1) in a row with exp(-10).
      if repeats >= 10 * (len(distinct) + 1):
        raise ValueError(
          f"{describe(family)} has only {len(distinct)} distinct held-out"
          f" questions, not {per_family}; widen its settings or ask for fewer"
        )
    puzzles.extend(distinct.values())
  return puzzles


@functools.lru_cache(maxsize=256)
def _dataset(family: Family) -> Any:
  refuse(family.name, drawn=True)
  _, config_class = library().factory.DATASETS[family.name]
  defaults = {
    field.name: _default(field)
    for field in dataclasses.fields(config_class)
    if field.name not in ("seed", "size")
  }
  for key, value in family.settings.items():
    where = f"family {family.name!r}: setting {key} = {reprlib.repr(value)}"
    if key not in defaults:
      close = difflib.get_close_matches(str(key), list(defaults), n=1)
      remedy = (
        f"did you mean {close[0]}?" if close else (f"use {', '.join(defaults)}")
      )
      raise ValueError(f"{where} is unknown; {remedy}")
    wanted = _wanted_type(defaults[key], value)
    if wanted:
      raise ValueError(
        f"{where} is a {type(value).__name__}; use {wanted}, such as"
        f" {defaults[key]!r}"
      )
  try:
    dataset = library().create_dataset(
      family.name, **family.settings, seed=0, size=1
    )
  except Exception as error:
    raise ValueError(
      f"{describe(family)} is not valid: {_one_line(error)}"
    ) from error
  for (name, key), (largest, why) in LARGEST.items():
    if name == family.name and getattr(dataset.config, key) > largest:
      raise ValueError(
        f"family {name!r}: setting {key} = {getattr(dataset.config, key)} is"
        f" too large ({why}); set it to at most {largest}"
      )
  return dataset


def _default(field: dataclasses.Field[Any]) -> Any:
  if field.default is not dataclasses.MISSING:
    return field.default
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return None


def _wanted_type(default: Any, value: Any) -> str | None:
  """The required type, or None if `value` fits the default's type."""
  is_bool = isinstance(value, bool)
  match default:
    case bool():
      return None if is_bool else "true or false"
    case int():
      fits = isinstance(value, int) and not is_bool
      return None if fits else "a whole number"
    case float():
      fits = isinstance(value, int | float) and not is_bool
      return None if fits and math.isfinite(value) else "a finite number"
    case str():
      return None if isinstance(value, str) else "a text"
    case tuple() | list():
      return None if isinstance(value, tuple | list) else "a list"
  return None


def describe(family: Family) -> str:
  """A family with its settings, for errors."""
  settings = ", ".join(f"{k}={v!r}" for k, v in family.settings.items())
  return f"family {family.name!r} with {settings or 'default settings'}"


def _one_line(error: Exception) -> str:
  """The message of an error; for a bare assert, the failed condition."""
  text = " ".join(str(error).split())
  if text or error.__traceback__ is None:
    return text or type(error).__name__
  line = traceback.extract_tb(error.__traceback__)[-1].line or ""
  return line.removeprefix("assert ").replace("self.", "") + " is required"
