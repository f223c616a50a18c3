"""Steps of sums and products: chain_sum, products, leg_counting."""

from __future__ import annotations

import re

from brorl_jax.verdicts.gym import library
from launch.embedded.steps.merging import merge
from launch.embedded.steps.pen import Entry, Pen, Task, near, parts


def _written(entry: Entry) -> list[int]:
  """The numbers of an expression such as `20 - -3 + 5`, by their places."""
  return [int(n) for n in re.findall(r"(?:^|(?<= ))-?\d+", _expression(entry))]


def _expression(entry: Entry) -> str:
  return entry["metadata"]["expression"]


def _chain_sum(entry: Entry, pen: Pen) -> str:
  """Adds a term digit by digit, the highest first."""
  signs = re.findall(r" ([-+]) ", _expression(entry))
  total, *terms = _written(entry)
  for sign, term in zip(signs, terms, strict=True):
    sign = sign if term >= 0 else {"+": "-", "-": "+"}[sign]
    for part in parts(term):
      change = part if sign == "+" else -part
      total = pen.equals(f"{total}{sign}{part}", total + change, total - change)
  return str(total)


def _products(entry: Entry, pen: Pen) -> str:
  factors = _written(entry)
  product, negative = abs(factors[0]), factors[0] < 0
  for factor in factors[1:]:
    product = times(product, abs(factor), pen)
    negative ^= factor < 0
  return str(-product if negative else product)


def times(a: int, b: int, pen: Pen) -> int:
  """Multiplies by hand: a row for each digit of b, then the sum of the rows."""
  total = 0
  for place, digit in enumerate(map(int, reversed(str(b)))):
    row = _row(a, digit, pen) * 10**place
    total = pen.equals(f"{total}+{row}", total + row) if place else row
  return total


def _row(a: int, digit: int, pen: Pen) -> int:
  """One digit times another plus the carry, then the row from its digits."""
  row = carry = 0
  for place, other in enumerate(map(int, reversed(str(a)))):
    left = f"{other}*{digit}" + (f"+{carry}" if place else "")
    column = pen.equals(left, other * digit + carry)
    carry = column // 10
    row += (column if place + 1 == len(str(a)) else column % 10) * 10**place
  return pen.equals(f"{a}*{digit}", row) if a > 9 else row


def _leg_counting(entry: Entry, pen: Pen) -> str:
  of_one = library().arithmetic.leg_counting.ANIMALS
  total = None
  for animal, count in entry["metadata"]["animals"].items():
    more = _legs(count, of_one[animal], pen)
    if total is None:
      total = more
    else:
      total = pen.equals(f"{total}+{more}", total + more)
  return str(total)


def _legs(count: int, legs: int, pen: Pen) -> int:
  slips = [(legs, n) for n in near(count * legs)]
  # The legs of another animal.
  slips += [(n, count * n) for n in (legs - 2, legs + 2) if n >= 0]
  right = (legs, count * legs)
  return pen.step(right, lambda v: f"{count}*{v[0]}={v[1]}", slips)[1]


def _merge_legs(first: str, second: str) -> str | None:
  """Only into the sum: a factor that is equal to a result is none."""
  return None if "*" in second else merge(first, second)


TASKS = {
  "chain_sum": Task(_chain_sum, merge),
  "products": Task(_products),
  "leg_counting": Task(_leg_counting, _merge_legs),
}
