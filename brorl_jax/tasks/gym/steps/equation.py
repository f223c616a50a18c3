"""Reads lines such as `84-36*2=12`, and judges them by arithmetic."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

from brorl_jax.tasks.gym.steps import pen

# Of a model's text nothing longer is read, so that the work for a line has a
# bound.
LONGEST_LINE, DIGITS = 200, 12

_NUMBER = rf"-?[0-9]{{1,{DIGITS}}}"
_SIDE = rf"{_NUMBER}(?:[-+*/%]{_NUMBER})*"
_EQUATION = re.compile(rf"{_SIDE}(?:={_SIDE})+")
_TOKENS = re.compile(rf"(^|[-+*/%])({_NUMBER})")

# Factors with the operator before each.
Term = list[tuple[str, int]]
Pair = tuple[int, ...]


def sides(text: str) -> list[list[Term]] | None:
  """The sides of an equation, each a sum of terms; None if it is none."""
  if len(text) > LONGEST_LINE or not _EQUATION.fullmatch(text):
    return None
  return [_terms(side) for side in text.split("=")]


def _terms(side: str) -> list[Term]:
  terms: list[Term] = []
  for operator, number in _TOKENS.findall(side):
    if operator in ("*", "/", "%"):
      terms[-1].append((operator, int(number)))
    else:
      terms.append([(operator, int(number))])
  return terms


def value(terms: list[Term]) -> int | None:
  """What a side comes to; None if a division has a remainder or no result."""
  total = 0
  for (sign, first), *rest in terms:
    product = first
    for operator, number in rest:
      if operator == "*":
        product *= number
      elif number == 0 or (operator == "/" and product % number):
        return None
      else:
        product = product // number if operator == "/" else product % number
    total += -product if sign == "-" else product
  return total


def holds(found: list[list[Term]]) -> bool:
  """Whether all sides are equal."""
  values = {value(side) for side in found}
  return len(values) == 1 and None not in values


def numbers(texts: Iterable[str]) -> set[int]:
  """Every number in some texts, without its sign."""
  pattern = rf"(?<![0-9])[0-9]{{1,{DIGITS}}}(?![0-9])"
  return {int(n) for text in texts for n in re.findall(pattern, text)}


class Equations:
  """Judges equations.

  One is right if its sides are equal and each number of its first side is
  known: it is in the question, in the right solution or in an earlier line, or
  is a digit of such a number, with its zeros. So what is computed from a wrong
  value is right, and steps may be left out.
  """

  def __init__(
    self,
    known: Iterable[int],
    *,
    free: bool = False,
    zeros: int = 0,
    products: Iterable[tuple[int, int]] | None = None,
  ):
    """Starts with what is known before the first line.

    Args:
      known: Numbers.
      free: Whether one known factor is enough in a product, and a known
        dividend in a quotient.
      zeros: How many zeros may be put after a known number.
      products: The only products there may be, each once; None for any.
    """
    self._known: set[int] = set()
    self._free, self._zeros = free, zeros
    self._products: collections.Counter[Pair] | None = None
    if products is not None:
      self._products = collections.Counter(map(_pair, products))
    self._learn(known)

  def read(self, text: str, stands: bool) -> bool | None:
    found = sides(text)
    if found is None:
      return None
    right = holds(found) and self._allowed(found[0])
    if stands and self._products is None:
      self._learn(n for side in found for term in side for _, n in term)
    elif stands:
      used = collections.Counter(_products(found[0]))
      self._products = (self._products or used) - used
      # Of such a product only the result is known.
      self._learn(n for side in found[1:] for term in side for _, n in term)
    return right

  def _allowed(self, side: list[Term]) -> bool:
    terms = side
    if self._products is not None:
      if not collections.Counter(_products(side)) <= self._products:
        return False
      terms = [term for term in side if len(term) == 1]
    return all(map(self._is_known, terms))

  def _is_known(self, term: Term) -> bool:
    known = [abs(number) in self._known for _, number in term]
    if not self._free:
      return all(known)
    divides = any(operator in ("/", "%") for operator, _ in term[1:])
    return known[0] if divides else any(known)

  def _learn(self, found: Iterable[int]) -> None:
    for number in {abs(n) for n in found}:
      self._known.update(pen.parts(number))
      if number < 100:  # a digit may be a carry
        self._known.update(divmod(number, 10))
      self._known |= {number * 10**z for z in range(self._zeros + 1)}


def _pair(factors: Iterable[int]) -> Pair:
  return tuple(sorted(map(abs, factors)))


def _products(side: list[Term]) -> list[Pair]:
  return [_pair(n for _, n in term) for term in side if len(term) > 1]


def merge(first: str, second: str) -> str | None:
  """One equation for two: `4*8=32` and `32-3=29` give `4*8-3=29`.

  Args:
    first: Its result is a number of `second`.
    second: The next line.

  Returns:
    None where that needs brackets, or the result is not used once.
  """
  left, _, result = first.rpartition("=")
  rest, _, last = second.rpartition("=")
  found = list(_TOKENS.finditer(rest))
  places = [i for i, match in enumerate(found) if match[2] == result]
  if not sides(first) or not sides(second) or "=" in left + rest:
    return None
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
