"""Steps of sums and products: chain_sum, products, leg_counting."""

from __future__ import annotations

import re

from brorl_jax.tasks.gym.steps import equation
from brorl_jax.tasks.gym.steps.pen import Pen, near, parts
from brorl_jax.tasks.gym.steps.task import Entry, Task

_ANIMALS = {
  0: "snake, sea slug, jellyfish, flatworm, leech",
  2: "chicken, bird, human, duck",
  4: "dog, cat, cow, horse, lion, elephant, giraffe, tiger, deer, sheep",
  5: "starfish",
  6: (
    "insect, ant, butterfly, beetle, bee, wasp, grasshopper, cricket,"
    " cockroach, praying mantis, firefly"
  ),
  8: "spider, scorpion",
  10: "crab, lobster, shrimp",
  14: "woodlouse",
}
LEGS = {
  name: legs for legs, names in _ANIMALS.items() for name in names.split(", ")
}


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
  total = None
  for animal, count in entry["metadata"]["animals"].items():
    legs = LEGS[animal]
    more = _legs(count, legs, pen)
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


def _judge_sum(entry: Entry, lines: list[str]) -> equation.Equations:
  known = equation.numbers([_expression(entry), *lines])
  return equation.Equations(known)


def _judge_product(entry: Entry, lines: list[str]) -> equation.Equations:
  known = equation.numbers([_expression(entry), *lines])
  longest = max(len(str(abs(n))) for n in _written(entry))
  return equation.Equations(known, zeros=longest - 1)


def _judge_legs(entry: Entry, lines: list[str]) -> equation.Equations:
  animals = entry["metadata"]["animals"].items()
  results = equation.numbers(line.rpartition("=")[2] for line in lines)
  return equation.Equations(
    results, products=[(n, LEGS[animal]) for animal, n in animals]
  )


def _merge_legs(first: str, second: str) -> str | None:
  """Only into the sum: a factor that is equal to a result is none."""
  return None if "*" in second else equation.merge(first, second)


TASKS = {
  "chain_sum": Task(_chain_sum, _judge_sum, equation.merge),
  "products": Task(_products, _judge_product),
  "leg_counting": Task(_leg_counting, _judge_legs, _merge_legs),
}
