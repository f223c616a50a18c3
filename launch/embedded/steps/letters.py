"""Steps of letter_counting: each word letter by letter, and its count."""

from __future__ import annotations

import re

from launch.embedded.steps.pen import Entry, Pen, Task, near

# Letters with blanks, then the count so far and that of these letters.
_LINE = re.compile(r"([^+=]+) (\d+)\+(\d+)=(\d+)")


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


def _merge(first: str, second: str) -> str | None:
  """`a t 0+1=1` and `b y 1+0=1` give `a t b y 0+1=1`."""
  one, other = _LINE.fullmatch(first), _LINE.fullmatch(second)
  if not one or not other or one[4] != other[2]:
    return None
  here = int(one[3]) + int(other[3])
  return f"{one[1].strip()} {other[1].strip()} {one[2]}+{here}={other[4]}"


TASKS = {"letter_counting": Task(_letter_counting, _merge, drop=False)}
