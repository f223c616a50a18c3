"""Two equations in one, as of someone who leaves out a step."""

from __future__ import annotations

import re

_TERMS = re.compile(r"(^|[-+*/%])(-?[0-9]+)")


def merge(first: str, second: str) -> str | None:
  """One equation for two: `4*8=32` and `32-3=29` give `4*8-3=29`.

  Args:
    first: Its result is a number of `second`.
    second: The next line.

  Returns:
    None where that needs brackets, or the result is not used once.
  """
  left, _, result = first.partition("=")
  rest, _, last = second.partition("=")
  found = list(_TERMS.finditer(rest))
  places = [i for i, match in enumerate(found) if match[2] == result]
  if len(places) != 1 or left[0] == "-":
    return None
  (place,) = places
  before = found[place][1]
  after = found[place + 1][1] if place + 1 < len(found) else ""
  is_sum = "+" in left or "-" in left
  if is_sum and (place or after not in ("", "+", "-")):
    return None
  if not is_sum and before in ("*", "/", "%"):
    return None
  start, end = found[place].span(2)
  return f"{rest[:start]}{left}{rest[end:]}={last}"
