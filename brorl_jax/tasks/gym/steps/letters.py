"""Steps of letter_counting: each word letter by letter, and its count."""

from __future__ import annotations

import itertools
import re

from brorl_jax.tasks.gym.steps.equation import LONGEST_LINE
from brorl_jax.tasks.gym.steps.pen import Pen, near
from brorl_jax.tasks.gym.steps.task import Entry, Task

# Letters with blanks, then the count so far and that of these letters.
_LINE = re.compile(r"([^+=]+) ([0-9]{1,4})\+([0-9]{1,4})=([0-9]{1,5})")


def _letter_counting(entry: Entry, pen: Pen) -> str:
  metadata = entry["metadata"]
  letter, total = metadata["target_letter"], 0
  for word in map(str.lower, metadata["span"]):
    right = word.count(letter)
    slips = [(n, total + n) for n in near(right)]
    slips += [(right, n) for n in near(total + right)]
    spelt = " ".join(word)
    line = lambda v, t=total, s=spelt: f"{s} {t}+{v[0]}={v[1]}"
    _, total = pen.step((right, total + right), line, slips)
  return str(total)


class _Letters:
  """Judges lines of `_letter_counting`: the words, the count and the sum.

  A line may have several words that stand together in the text.
  """

  def __init__(self, entry: Entry, lines: list[str]):
    metadata = entry["metadata"]
    words = [word.lower() for word in metadata["span"]]
    self._letter, self._text = metadata["target_letter"], "".join(words)
    self._ends = [0, *itertools.accumulate(map(len, words))]
    self._totals = {line.rpartition("=")[2] for line in lines}
    self._total = "0"

  def read(self, text: str, stands: bool) -> bool | None:
    match = None if len(text) > LONGEST_LINE else _LINE.fullmatch(text)
    letters = match and "".join(match[1].split()).lower()
    if not match or not letters:
      return None
    _, before, here, total = match.groups()
    right = (
      self._are_words(letters)
      and letters.count(self._letter) == int(here)
      and int(before) + int(here) == int(total)
      and (before == self._total or before in self._totals)
    )
    if stands:
      self._total = total
    return right

  def _are_words(self, letters: str) -> bool:
    ends = {*self._ends}
    return any(
      start + len(letters) in ends and self._text.startswith(letters, start)
      for start in self._ends
    )


def _merge(first: str, second: str) -> str | None:
  """`a t 0+1=1` and `b y 1+0=1` give `a t b y 0+1=1`."""
  one, other = _LINE.fullmatch(first), _LINE.fullmatch(second)
  if not one or not other or one[4] != other[2]:
    return None
  here = int(one[3]) + int(other[3])
  return f"{one[1].strip()} {other[1].strip()} {one[2]}+{here}={other[4]}"


TASKS = {
  "letter_counting": Task(_letter_counting, _Letters, _merge, drop=False)
}
