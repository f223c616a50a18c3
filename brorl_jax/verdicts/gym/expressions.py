"""Parses arithmetic and polynomials in an answer without executing it.

The library passes such answers to sympy.parse_expr, which evaluates Python.
Here a grammar defines them, values are exact fractions, and the time is linear
in the length of the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_OPERATORS: Mapping[str, tuple[int, Callable[..., Fraction]]] = {
  "+": (1, operator.add),
  "-": (1, operator.sub),
  "*": (2, operator.mul),
  "/": (2, operator.truediv),
}

_NUMBER = r"\d{1,20}(?:\.\d{1,10})?"
_FACTOR = (
  rf"(?:{_NUMBER}|\([+-]?\d{{1,20}}/\d{{1,20}}\)|[A-Za-z](?:\*\*\d{{1,3}})?)"
)
_TERM = rf"{_FACTOR}(?:\*{_FACTOR}|/\d{{1,20}})*"
_SUM = re.compile(rf"[+-]?{_TERM}(?:[+-]{_TERM})*")
_SIGNED = re.compile(rf"([+-]?)({_TERM})")
_FACTORS = re.compile(rf"([*/]?)({_FACTOR})")

# What the puzzles' own answers hold, and what else a table of integrals does.
_NAMES = frozenset(
  "C E pi exp log sqrt sin cos tan asin acos atan sinh cosh tanh".split()
)

_BEFORE_A_VALUE = frozenset({"", "(", *_OPERATORS})

# A power of each variable.
Monomial = tuple[tuple[str, int], ...]


def value(text: str) -> Fraction | None:
  """What an expression of whole numbers, + - * / and ( ) comes to.

  A minus may stand at the start and after a "(", as in -(2 - 5), nowhere else
  in front of a number. Division is exact. Numbers may have any size, so bound
  them before.

  Returns:
    None if it is no such expression, or divides by zero.
  """
  tokens = re.findall(r"\d+|\S", text)
  values: list[Fraction] = []
  pending: list[str] = []
  previous = ""
  for token in ["(", *tokens, ")"]:
    if previous in _BEFORE_A_VALUE:
      if token == "-" and previous == "(":
        values.append(Fraction(0))
        pending.append(token)
      elif token == "(":
        pending.append(token)
      elif token.isascii() and token.isdigit():
        values.append(Fraction(token))
      else:
        return None
    elif token == ")" or token in _OPERATORS:
      strength = _OPERATORS[token][0] if token in _OPERATORS else 0
      if not _apply(values, pending, strength):
        return None
      if token != ")":
        pending.append(token)
      elif pending:
        pending.pop()
      else:
        return None
    else:
      return None
    previous = token
  return None if pending else values[0]


def _apply(values: list[Fraction], pending: list[str], strength: int) -> bool:
  """Applies pending operators that bind as strongly, up to the last "("."""
  while pending and pending[-1] != "(":
    binds, function = _OPERATORS[pending[-1]]
    if binds < strength:
      break
    pending.pop()
    right, left = values.pop(), values.pop()
    if function is operator.truediv and not right:
      return False
    values.append(function(left, right))
  return True


def terms(text: str) -> list[tuple[Monomial, Fraction, bool]] | None:
  """Parses a polynomial that is written as a sum: -2*x**6/3 + 4*x*y + C.

    sum    = [sign] term {sign term}
    term   = factor {"*" factor | "/" integer}
    factor = number | "(" [sign] integer "/" integer ")" | letter ["**" integer]

  Returns:
    For each term the powers of its letters, its coefficient, and whether it is
    simplified (at most one number, no letter twice). None if the text is not
    such a sum.
  """
  if re.search(r"[\w.]\s+[\w.]|\*\s+\*", text):
    return None  # "1 2" is not 12
  dense = "".join(text.split())
  # fullmatch first, so that the second pass finds only terms.
  if not dense.isascii() or not _SUM.fullmatch(dense):
    return None
  try:
    return [_term(sign, product) for sign, product in _SIGNED.findall(dense)]
  except ZeroDivisionError:
    return None


def _term(sign: str, product: str) -> tuple[Monomial, Fraction, bool]:
  coefficient = Fraction(-1 if sign == "-" else 1)
  powers: dict[str, int] = {}
  factors = _FACTORS.findall(product)
  for before, factor in factors:
    if factor[0].isalpha():
      power = int(factor[3:] or 1)
      powers[factor[0]] = powers.get(factor[0], 0) + power
    elif before == "/":
      coefficient /= int(factor)
    else:
      coefficient *= Fraction(factor.strip("()"))
  letters = [f[0] for _, f in factors if f[0].isalpha()]
  simplified = (
    len(letters) == len(set(letters)) and len(factors) - len(letters) <= 1
  )
  monomial = tuple(sorted((v, p) for v, p in powers.items() if p))
  return monomial, coefficient, simplified


def refuse_integral(text: str, variable: str) -> str:
  """Why sympy must not parse a text as an antiderivative; "" if it may.

  Allowed are numbers, a few functions, + - * / ** ( ), the variable and C. None
  of these can execute anything, and powers are small enough to expand.
  """
  if len(text) > 300 or not text.isascii():
    return "at most 300 characters, all ASCII"
  if re.search(r"[A-Za-z]\s*[\d.]|[\d.]\s*[A-Za-z]", text):
    return "a name next to a digit or point"  # 0x10, 1j, and sympy's E1(x)
  depth = 0
  for token in re.findall(r"\d+(?:\.\d+)?|[A-Za-z]+|\*\*|\S", text):
    depth += (token == "(") - (token == ")")
    if not 0 <= depth <= 8:
      return "parentheses unbalanced or deeper than 8"
    if token[0].isalpha():
      if token not in _NAMES and token != variable:
        return f"the name {token[:20]}"
    elif len(token) > 8 or not re.fullmatch(r"[\d.]+|\*\*|[-+*/()]", token):
      return f"the text {token[:20]}"
  # E may have any power: sympy does not expand it.
  small = r"(?:-?(?:1?\d|20)(?![\d.])|\(-?\d\d?(?:/\d\d?)?\))(?!\*\*)"
  packed = "".join(text.split())
  if re.search(rf"(?<!E)\*\*(?!{small})", packed):
    return "a power that is not a number up to 20"
  # sympy expands powers of sums. It does not expand nested functions, but their
  # derivatives have one factor per level.
  if re.search(r"\)\*\*(?!\(|[23](?!\d))", packed):
    return "a power of a bracket above 3"
  if packed.count(")**") > 2:
    return "more than two powers of brackets"
  if len(re.findall(r"[a-z]{2,}\(", packed)) > 6:
    return "more than 6 functions"
  if _nesting(packed) > 1:
    return "functions in functions"
  return ""


def _nesting(text: str) -> int:
  """Greatest nesting depth of functions."""
  stack, deepest = [], 0
  for match in re.finditer(r"([A-Za-z]{2,})?\(|\)", text):
    if match[0] == ")":
      stack = stack[:-1]
    else:
      stack.append(match[1] is not None)
      deepest = max(deepest, sum(stack))
  return deepest
