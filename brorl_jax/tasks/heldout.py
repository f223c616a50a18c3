"""Held-out examples: a part of the data by hash, or files of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Sequence

from brorl_jax.tasks import gym
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.dataset import Data
from brorl_jax.tasks.records import DataError, Place

# A blank that tells nothing apart: "81 - 35" is "81-35", "3 4" is not "34".
_BLANK = re.compile(r"(?<!\w) | (?!\w)")


def split(data: Data, *, one_in: int) -> tuple[Data, Data]:
  """Training and held-out examples.

  A hash of the conversation, without its system message, with case evened out
  and white space only where it parts two words, puts about one prompt in
  `one_in` on the held-out side: always the same ones, whichever files they come
  in, and repeats of a prompt on the same side.

  Args:
    data: What was read.
    one_in: At least 2.

  Returns:
    Training data, then held-out data; what was skipped goes with the first.

  Raises:
    DataError: If a side would be empty.
  """
  if one_in < 2:
    raise DataError(f"heldout one in {one_in}: use at least 2")
  held = [_is_held(example, one_in) for example in data.examples]
  if all(held) or not any(held):
    side = "training" if all(held) else "held-out"
    raise DataError(
      f"{len(held)} examples, one in {one_in} held out: no {side} example is"
      " left; change one_in, or give held-out files of their own"
    )
  train, heldout = _side(data, held, False), _side(data, held, True)
  return train, dataclasses.replace(heldout, skipped=())


def trained_on(data: Data, *, one_in: int) -> Data:
  """The training side alone, which may be empty: see `split`."""
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
  """Refuses held-out examples that are in training too.

  Args:
    train: What is trained on.
    heldout: What is held out from it.

  Raises:
    DataError: Naming both places, if an id or a prompt is on both sides;
      prompts are compared as `split` compares them.
  """
  ids: dict[str, Place | str] = {}
  asked: dict[bytes, Place | str] = {}
  for example, place in zip(train.examples, train.places, strict=True):
    ids.setdefault(example.id, place)
    asked.setdefault(_asked(example), place)
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    if example.id in ids:
      raise DataError(
        f"{place}, held out: id {example.id!r} is also in {ids[example.id]},"
        " trained on; remove it from one"
      )
    other = asked.get(_asked(example))
    if other is not None:
      raise DataError(
        f"{place}, held out: asks the same as {other}, trained on; remove it"
        " from one"
      )


def refuse_drawn(heldout: Data, tasks: Collection[str]) -> None:
  """Refuses held-out puzzles which training may draw from a generator.

  Generators draw questions of one side of a split by hash, whatever their
  settings and seed (see `gym.puzzle`): a puzzle of that side cannot be ruled
  out. The question of its entry counts, and what is shown, unless that is the
  same question with more around it. Examples of other domains are not looked
  at: a hash does not say whether a generator can make their text, and of any
  text nine in ten are on that side.

  Args:
    heldout: What is held out.
    tasks: Those that are generated for training.

  Raises:
    DataError: Naming the place of the first such puzzle.
  """
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    if example.domain != "gym":
      continue
    # What it is counted under may have another name.
    task = example.entry["metadata"]["source_dataset"]
    shown = example.question
    question = str(example.entry.get("question") or shown)
    same = _words(question) in _words(shown)
    asked = (question,) if same else (question, shown)
    if task in tasks and not all(gym.is_heldout(task, q) for q in asked):
      raise DataError(
        f"{place}, held out: asks what {task}, which is generated for "
        "training, may draw; remove it from the held-out file"
      )


def _words(text: str) -> str:
  """With one blank around each; case counts, as it does to generators."""
  return f" {' '.join(text.split())} "


def _asked(example: Example) -> bytes:
  """A hash of the conversation, as the split sees it."""
  text = "\n".join(
    f"{m['role']}: {_BLANK.sub('', ' '.join(m['content'].casefold().split()))}"
    for m in example.messages
    if m["role"] != "system"
  )
  return hashlib.blake2b(text.encode(), digest_size=16).digest()
