"""Held-out examples: a part of the data by hash, or separate files."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Collection, Sequence

from brorl_jax.data.dataset import Data
from brorl_jax.data.files import DataError, Place
from brorl_jax.verdicts.base import MADE, Example
from brorl_jax.verdicts.domains import DRAW

# A space that separates no words: "81 - 35" is "81-35", but "3 4" is not "34".
_BLANK = re.compile(r"(?<!\w) | (?!\w)")


def sides(
  read: Callable[..., Data],
  files: Sequence[str],
  heldout_files: Sequence[str],
  *,
  one_in: int,
) -> tuple[Data, Data]:
  """Training and held-out data of a config's files.

  Args:
    read: (files, beside=other files) -> their data.
    files: Training files; may be empty if there are held-out files.
    heldout_files: Held-out files; if empty, a part of `files`, see `split`.
    one_in: Share of that part.

  Raises:
    DataError: A file cannot be read, a side is empty, or the sides overlap.
  """
  train = read(files, beside=heldout_files) if files else Data([], [])
  if not heldout_files:
    return split(train, one_in=one_in)
  held = read(heldout_files, beside=files)
  refuse_overlap(train, held)
  return train, held


def split(data: Data, *, one_in: int) -> tuple[Data, Data]:
  """Training and held-out examples.

  A hash of the conversation selects about one prompt in `one_in` as held out.
  It ignores the system message, case, and white space that separates no words.
  So a prompt is always on the same side, whichever file it comes from.

  Args:
    one_in: At least 2.

  Returns:
    Training data and held-out data; skipped records are listed in the first.

  Raises:
    DataError: A side would be empty.
  """
  if one_in < 2:
    raise DataError(f"data.heldout_one_in = {one_in}: use at least 2")
  held = [_is_held(example, one_in) for example in data.examples]
  if all(held) or not any(held):
    what = "left for training" if all(held) else "held out"
    raise DataError(
      f"data.heldout_one_in = {one_in}: none of {len(held)} examples is {what};"
      " use another number, or give data.heldout_files"
    )
  train, heldout = _side(data, held, False), _side(data, held, True)
  return train, dataclasses.replace(heldout, skipped=())


def trained_on(data: Data, *, one_in: int) -> Data:
  """The training side of `split` alone, which may be empty."""
  held = [_is_held(example, one_in) for example in data.examples]
  return _side(data, held, False)


def _is_held(example: Example, one_in: int) -> bool:
  return int.from_bytes(_asked(example), "little") % one_in == 0


def _side(data: Data, held: Sequence[bool], which: bool) -> Data:
  numbers = [i for i, side in enumerate(held) if side == which]
  return dataclasses.replace(
    data,
    examples=[data.examples[i] for i in numbers],
    places=[data.places[i] for i in numbers],
  )


def refuse_overlap(train: Data, heldout: Data) -> None:
  """Refuses held-out examples that are also training examples.

  Raises:
    DataError: An id or a prompt is on both sides; the message has both places.
      Prompts are compared as in `split`. Default ids (file and line) are not
      compared, because files elsewhere may have the same name.
  """
  ids: dict[str, Place | str] = {}
  asked: dict[bytes, Place | str] = {}
  for example, place in zip(train.examples, train.places, strict=True):
    ids.setdefault(example.id, place)
    asked.setdefault(_asked(example), place)
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    if example.id in ids and "/" not in example.id:
      raise DataError(
        f"{place}: held-out id {example.id!r} is also the training example"
        f" {ids[example.id]}; remove one"
      )
    other = asked.get(_asked(example))
    if other is not None:
      raise DataError(
        f"{place}: held-out prompt is also the training prompt {other}; remove"
        " one"
      )


def refuse_drawn(heldout: Data, tasks: Collection[str]) -> None:
  """Refuses held-out puzzles that training may generate.

  A hash of the question decides which split may generate it, whatever the
  settings and the seed (see `gym.puzzle`). Puzzles on the training side are
  refused. Examples of other domains are not checked: the hash cannot tell
  whether a generator could make a text, and nine texts in ten are on that side.

  Args:
    tasks: Tasks that are generated for training.

  Raises:
    DataError: The message has the place of the first such puzzle.
  """
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    if example.domain != MADE:
      continue
    if task := DRAW.may_draw(example, tasks):
      raise DataError(
        f"{place}: training may generate this held-out puzzle of {task}; "
        "remove it from the held-out file"
      )


def _asked(example: Example) -> bytes:
  """The hash of a conversation that `split` uses."""
  text = "\n".join(
    f"{m['role']}: {_BLANK.sub('', ' '.join(m['content'].casefold().split()))}"
    for m in example.messages
    if m["role"] != "system"
  )
  return hashlib.blake2b(text.encode(), digest_size=16).digest()
