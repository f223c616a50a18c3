r"""Equality of expressions that are no fractions: the part for the jail.

Two expressions are equal if they agree at points drawn from a hash of both,
positive and negative, to more digits than their texts could encode. Nothing is
rounded to a tolerance, so 15 digits of pi are not pi.

What the reader of `exact` does not know is read by math-verify, with the names
in both texts the same: its grammar drops case, primes and degrees.
"""

from __future__ import annotations

import hashlib
import logging
import re
from fractions import Fraction
from typing import Any

from brorl_jax.tasks.math import compare
from brorl_jax.tasks.math.exact import Tree
from brorl_jax.tasks.math.structure import Leaf, parse
from brorl_jax.tasks.math.tokens import Unreadable

_POINTS = 4
_MAX_BITS = 60_000  # of working precision; sqrt(2) with so many takes 1 ms
_MAX_SIZE = 40  # bits of an exponent: values up to 2**(2**40)


class _Undefined(ValueError):
  """An expression has no finite value at a point."""


def symbolic(answer: str, gold: str) -> bool:
  """Whether an answer says what the gold says.

  Args:
    answer: LaTeX that passed the gate.
    gold: Likewise.
  """
  try:
    return same(answer, gold)
  except (Unreadable, RecursionError):
    return False


def same(answer: str, gold: str) -> bool:
  """As `symbolic`, but raises if a side has no structure."""
  seed = hashlib.sha256(f"{answer}\0{gold}".encode()).digest()
  cost = 4 * (len(answer) + len(gold))

  def rule(a: Leaf, g: Leaf) -> bool:
    if a.tree is None or g.tree is None:
      return _by_math_verify(a, g, seed)
    return _equal(a, g, seed, cost)

  return compare.same(parse(answer), parse(gold), rule) is True


def _equal(a: Leaf, g: Leaf, seed: bytes, cost: int) -> bool:
  names = sorted(_names(a.tree) | _names(g.tree))
  equations = [leaf.tree[0] == "=" for leaf in (a, g) if _is_tuple(leaf)]
  if any(equations):
    return (
      all(equations)
      and len(equations) == 2
      and (_equivalent(a.tree, g.tree, names, seed, cost))
    )
  try:
    if not names and compare.is_rounded(g):
      return _rounds_to(a.tree, g)
    # One point decides between constants.
    return all(
      _agree(a.tree, g.tree, _point(names, seed, i), cost)
      for i in range(_POINTS if names else 1)
    )
  except _Undefined:
    return False


def _is_tuple(leaf: Leaf) -> bool:
  return isinstance(leaf.tree, tuple)


def _names(tree: Tree) -> set[str]:
  if not isinstance(tree, tuple):
    return set()
  if tree[0] == "symbol":
    return {tree[1]}
  if tree[0] == "constant":
    return set()
  return set().union(*map(_names, tree[1:]))


def _point(names: list[str], seed: bytes, i: int) -> dict[str, Fraction]:
  """Where to compare: all positive, all negative, then mixed signs."""
  point = {}
  for name in names:
    digest = hashlib.sha256(seed + f"{i}{name}".encode()).digest()
    # Between 1/4 and 3 1/4, with 60 random bits.
    size = Fraction(int.from_bytes(digest[:8], "big") >> 4, 2**60) * 3
    sign = (1, -1)[i] if i < 2 else 1 - 2 * (digest[8] & 1)
    point[name] = sign * (size + Fraction(1, 4))
  return point


class _Values:
  """Evaluates trees with mpmath, and remembers how large values became."""

  def __init__(self, point: dict[str, Fraction]):
    import mpmath

    self.mp = mpmath.mp
    self._point = point
    self.largest = 0  # of |log2| of all values
    self.top = 0  # of log2 of all values

  def value(self, tree: Tree) -> Any:
    return self._seen(self._value(tree))

  def _seen(self, value: Any) -> Any:
    mp = self.mp
    if not mp.isfinite(value):
      raise _Undefined
    if value:
      size = mp.mag(value)
      self.largest = max(self.largest, abs(int(size)))
      self.top = max(self.top, int(size))
      if self.largest > 2**_MAX_SIZE:
        raise _Undefined
    return value

  def _value(self, tree: Tree) -> Any:
    mp = self.mp
    if isinstance(tree, Fraction):
      return mp.mpf(tree.numerator) / tree.denominator
    operator, *arguments = tree
    if operator == "symbol":
      return self._value(self._point[arguments[0]])
    if operator == "constant":
      constants = {"pi": mp.pi, "e": mp.e, "i": mp.mpc(0, 1)}
      if arguments[0] not in constants:
        raise _Undefined
      return +constants[arguments[0]]
    values = [self.value(argument) for argument in arguments]
    try:
      return self._apply(operator, *values)
    except (ZeroDivisionError, ValueError, OverflowError):
      raise _Undefined from None

  def _apply(self, operator: str, *values: Any) -> Any:
    mp = self.mp
    a = values[0]
    match operator:
      case "+":
        return a + values[1]
      case "-":
        return -a
      case "*":
        return a * values[1]
      case "/":
        return a / values[1]
      case "^":
        return self._power(a, values[1])
      case "root":
        return self._power(a, 1 / values[1])
      case "log":
        return mp.log(a) / mp.log(values[1])
      case "abs":
        return abs(a)
      case "floor" | "ceil":
        return self._whole(operator, a)
      case "!":
        self._bound(a, 12)
        return mp.factorial(a)
      case "binom":
        self._bound(a, 12)
        self._bound(values[1], 12)
        return mp.binomial(a, values[1])
      case "ln":
        return mp.log(a)
    self._bound(a, 256)
    if operator.startswith("arc"):
      return getattr(mp, "a" + operator[3:])(a)
    if operator.endswith("h"):
      self._bound(a, _MAX_SIZE)
    return getattr(mp, operator)(a)

  def _bound(self, value: Any, bits: int) -> None:
    """Refuses arguments whose function would take long."""
    if value and self.mp.mag(value) > bits:
      raise _Undefined

  def _power(self, base: Any, exponent: Any) -> Any:
    if not base:
      if self.mp.re(exponent) <= 0:
        raise _Undefined
      return base
    size = max(abs(self.mp.mag(base)), 1)
    if exponent and self.mp.mag(exponent) + size.bit_length() > _MAX_SIZE:
      raise _Undefined
    return self.mp.power(base, exponent)

  def _whole(self, operator: str, a: Any) -> Any:
    nearest = self.mp.nint(a)
    if a != nearest and abs(a - nearest) < self.mp.mpf(2) ** -100:
      return nearest  # rounding, not a fraction
    return getattr(self.mp, operator)(a)


def _agree(a: Tree, g: Tree, point: dict[str, Fraction], cost: int) -> bool:
  """Whether two trees have one value at a point.

  A first evaluation finds how large and small the values are; the second has
  twice these bits more than the texts have, so that what is left of a
  difference of equals is far below any difference of unequals.
  """
  difference, bits, top = _difference(a, g, point, 200)
  if abs(difference) > _scale(top - 60):
    return False
  bits = 200 + 2 * bits + cost
  if bits > _MAX_BITS:
    raise _Undefined
  difference, _, top = _difference(a, g, point, bits)
  return bool(abs(difference) <= _scale(top + 60 - bits))


def _scale(exponent: int) -> Any:
  import mpmath

  return mpmath.ldexp(1, exponent)


def _difference(
  a: Tree, g: Tree, point: dict[str, Fraction], bits: int
) -> tuple[Any, int, int]:
  import mpmath

  with mpmath.workprec(bits):
    values = _Values(point)
    difference = values.value(a) - values.value(g)
  return difference, values.largest, values.top


def _rounds_to(tree: Tree, gold: Leaf) -> bool:
  """Whether a constant is the gold to the digits that the gold shows."""
  assert gold.step is not None
  difference, *_ = _difference(tree, gold.tree, {}, 400)
  half = gold.step / 2
  return bool(abs(difference) * half.denominator <= half.numerator)


def _equivalent(
  a: Tree, g: Tree, names: list[str], seed: bytes, cost: int
) -> bool:
  """Whether an equation is a multiple of the other, by a number."""
  if _names(a) != _names(g):
    return False
  left, right = (("+", tree[1], ("-", tree[2])) for tree in (a, g))
  try:
    first = _point(names, seed, 0)
    origin = [_at(tree, first) for tree in (left, right)]
    # left(p) right(q) = left(q) right(p) at all points q, and neither is zero.
    for i in range(1, _POINTS + 1):
      here = _point(names, seed, i)
      one = ("*", _at(left, here), origin[1])
      other = ("*", _at(right, here), origin[0])
      if not _agree(one, other, {}, cost):
        return False
      for value in (one, other):
        if _agree(value, Fraction(0), {}, cost):
          return False
    return True
  except _Undefined:
    return False


def _at(tree: Tree, point: dict[str, Fraction]) -> Tree:
  """The tree with numbers for its symbols."""
  if not isinstance(tree, tuple) or tree[0] == "constant":
    return tree
  if tree[0] == "symbol":
    return point[tree[1]]
  return (tree[0], *(_at(argument, point) for argument in tree[1:]))


_SIGNS = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|'|°")
# What its grammar drops, or reads in a way of its own: 5 6 as 11.
_LEFT_OUT = re.compile(r"\\(?:text|circ|begin|end|quad)|[;:?%]|\d \d|[^ -~]")


def _by_math_verify(a: Leaf, g: Leaf, seed: bytes) -> bool:
  """Equality of what math-verify reads, by sympy's numbers."""
  for leaf in (a, g):
    if leaf.tree is None and not leaf.why.startswith("unknown"):
      return False
  if a.unit != g.unit or _LEFT_OUT.search(a.text + g.text):
    return False
  if set(_SIGNS.findall(a.text)) != set(_SIGNS.findall(g.text)):
    return False
  left, right = _parsed(a.text), _parsed(g.text)
  if left is None or right is None:
    return False
  if left == right:
    return True
  symbols = sorted(left.free_symbols | right.free_symbols, key=str)
  for i in range(_POINTS):
    point = _point([str(symbol) for symbol in symbols], seed, i)
    values = [_number(side, symbols, point) for side in (left, right)]
    if values[0] is None or values[1] is None:
      return False
    scale = max(abs(value) for value in values)
    if abs(values[0] - values[1]) > scale * Fraction(1, 10**60):
      return False
  return True


def _parsed(text: str) -> Any:
  import math_verify
  import sympy
  from latex2sympy2_extended.math_normalization import NormalizationConfig

  # It warns of every reading without its own clock, which jails replace.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  config = math_verify.LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
      basic_latex=True,
      units=False,
      malformed_operators=False,
      nits=False,
      boxed="none",
      equations=False,
    ),
  )
  found = math_verify.parse(
    rf"\boxed{{{text}}}",
    extraction_config=[config],
    fallback_mode="no_fallback",
    parsing_timeout=None,  # pyright: ignore[reportArgumentType]
  )
  if len(found) != 1 or not isinstance(found[0], sympy.Expr):
    return None
  return found[0]


def _number(tree: Any, symbols: list, point: dict[str, Fraction]) -> Any:
  import sympy

  values = {
    symbol: sympy.Rational(
      point[str(symbol)].numerator, point[str(symbol)].denominator
    )
    for symbol in symbols
  }
  try:
    value = sympy.N(tree.subs(values), 80, maxn=400)
  except Exception:
    return None
  return value if value.is_number and value.is_finite else None
