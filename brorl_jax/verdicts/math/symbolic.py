r"""Equality of expressions that are not fractions; runs in the jail.

Two expressions are equal if they agree at positive and negative points, drawn
from a hash of both, to more digits than their texts could encode. There is no
tolerance, so 15 digits of pi do not equal pi. mpmath computes the values.
Arguments that would take long (the sine of a number with 1,000 digits) are
refused, so that no text costs more than milliseconds.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

from brorl_jax.verdicts.math import compare
from brorl_jax.verdicts.math.nodes import Leaf, Tree, Unreadable
from brorl_jax.verdicts.math.structure import parse

_MAX_BITS = 20_000  # of values and precision; a root of this size takes 0.1 s
_MAX_GAMMA_BITS = 1_000  # with 4,000 its first value takes 3 s
_MAX_SIZE = 40  # bits of an exponent: values up to 2**(2**40)


class Undefined(ValueError):
  """An expression has no finite value at a point."""


class _Values:
  """Evaluates trees with mpmath, and remembers how large values became."""

  def __init__(self, point: dict[str, Fraction]):
    import mpmath

    self.mp = mpmath.mp
    self._point = point
    self.largest = 0  # of |log2| of all values
    self.top = 0  # of log2 of all values
    self.gamma = False  # whether the gamma function was used

  def value(self, tree: Tree) -> Any:
    return self._seen(self._value(tree))

  def _seen(self, value: Any) -> Any:
    mp = self.mp
    if not mp.isfinite(value):
      raise Undefined
    if value:
      size = mp.mag(value)
      self.largest = max(self.largest, abs(int(size)))
      self.top = max(self.top, int(size))
      if self.largest > 2**_MAX_SIZE:
        raise Undefined
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
        raise Undefined
      return +constants[arguments[0]]
    values = [self.value(argument) for argument in arguments]
    try:
      return self._apply(operator, *values)
    except (ZeroDivisionError, ValueError, OverflowError):
      raise Undefined from None

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
        self.gamma = True
        self._bound(a, 12)
        return mp.factorial(a)
      case "binom":
        self.gamma = True
        self._bound(a, 12)
        self._bound(values[1], 12)
        return mp.binomial(a, values[1])
      case "ln":
        return mp.log(a)
      case "max" | "min":
        if any(mp.im(value) for value in values):
          raise Undefined
        return (max if operator == "max" else min)(map(mp.re, values))
    self._bound(a, 256)
    if operator.startswith("arc"):
      return getattr(mp, "a" + operator[3:])(a)
    if operator.endswith("h"):
      self._bound(a, _MAX_SIZE)
    return getattr(mp, operator)(a)

  def _bound(self, value: Any, bits: int) -> None:
    """Refuses arguments for which a function would take long."""
    if value and self.mp.mag(value) > bits:
      raise Undefined

  def _power(self, base: Any, exponent: Any) -> Any:
    if not base:
      if self.mp.re(exponent) <= 0:
        raise Undefined
      return base
    size = max(abs(self.mp.mag(base)), 1)
    if exponent and self.mp.mag(exponent) + size.bit_length() > _MAX_SIZE:
      raise Undefined
    return self.mp.power(base, exponent)

  def _whole(self, operator: str, a: Any) -> Any:
    nearest = self.mp.nint(a)
    if a != nearest and abs(a - nearest) < self.mp.mpf(2) ** -100:
      return nearest  # rounding, not a fraction
    return getattr(self.mp, operator)(a)


def agree(a: Tree, g: Tree, point: dict[str, Fraction], cost: int) -> bool:
  """Whether two trees have the same value at a point.

  A first evaluation finds how large and small the values are; the second has
  twice these bits more than the texts have, so that what is left of a
  difference of equals is far below any difference of unequals.
  """
  gap, rough = difference(a, g, point, 200)
  if abs(gap) > _scale(rough.top - 60):
    return False
  bits = 200 + 2 * rough.largest
  if bits > (_MAX_GAMMA_BITS if rough.gamma else _MAX_BITS):
    raise Undefined
  bits += cost
  if rough.gamma:
    bits = min(bits, _MAX_GAMMA_BITS)
  gap, fine = difference(a, g, point, bits)
  return bool(abs(gap) <= _scale(fine.top + 60 - bits))


def _scale(exponent: int) -> Any:
  import mpmath

  return mpmath.ldexp(1, exponent)


def difference(
  a: Tree, g: Tree, point: dict[str, Fraction], bits: int
) -> tuple[Any, _Values]:
  """The difference of two trees' values, and what was seen on the way."""
  import mpmath

  with mpmath.workprec(bits):
    values = _Values(point)
    gap = values.value(a) - values.value(g)
  return gap, values


_POINTS = 4
# For expressions whose case depends on the order of several names: max(a, b)
# equals a at all of 4 points once in 16 times, at 16 points once in 65,536.
_POINTS_OF_CASES = 16


def symbolic(answer: str, gold: str) -> bool:
  """Whether an answer equals the reference; both passed the gate."""
  seed = hashlib.sha256(f"{answer}\0{gold}".encode()).digest()
  cost = 4 * (len(answer) + len(gold))

  def rule(a: Leaf, g: Leaf) -> bool:
    readable = a.tree is not None and g.tree is not None
    return readable and _equal(a, g, seed, cost)

  try:
    return compare.same(parse(answer), parse(gold), rule) is True
  except (Unreadable, RecursionError):  # a side has no structure
    return False


def _equal(a: Leaf, g: Leaf, seed: bytes, cost: int) -> bool:
  names = sorted(_names(a.tree) | _names(g.tree))
  equations = [isinstance(x, tuple) and x[0] == "=" for x in (a.tree, g.tree)]
  if any(equations):
    return all(equations) and _equivalent(a.tree, g.tree, names, seed, cost)
  try:
    if not names and compare.is_rounded(g):
      return _rounds_to(a.tree, g)
    # One point decides between constants.
    count = _count(a.tree, g.tree, names) if names else 1
    points = [_point(names, seed, i) for i in range(count)]
    if names and (_has_cases(a.tree) or _has_cases(g.tree)):
      far = 4 * _product(a.tree) * _product(g.tree)
      points += [{n: far * x for n, x in p.items()} for p in points[:_POINTS]]
    return all(agree(a.tree, g.tree, point, cost) for point in points)
  except Undefined:
    return False


def _count(a: Tree, g: Tree, names: list[str]) -> int:
  """The number of points at which two expressions are compared."""
  cases = _has_cases(a) or _has_cases(g)
  return _POINTS_OF_CASES if cases and len(names) > 1 else _POINTS


def _names(tree: Tree) -> set[str]:
  if not isinstance(tree, tuple):
    return set()
  if tree[0] == "symbol":
    return {tree[1]}
  if tree[0] == "constant":
    return set()
  return set().union(*map(_names, tree[1:]))


def _has_cases(tree: Tree) -> bool:
  """Whether a tree may be a different function in different regions."""
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return False
  cases = tree[0] in ("abs", "floor", "ceil", "root", "max", "min")
  if tree[0] == "^":
    cases = not isinstance(tree[2], Fraction) or tree[2].denominator > 1
  return cases or any(map(_has_cases, tree[1:]))


def _product(tree: Tree) -> int:
  """A bound on where the numbers of a tree can put a change of case."""
  if isinstance(tree, Fraction):
    return max(abs(tree.numerator), 1) * tree.denominator
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return 1
  return math.prod(map(_product, tree[1:]))


def _point(names: list[str], seed: bytes, i: int) -> dict[str, Fraction]:
  """The i-th point: all positive, all negative, then mixed signs."""
  point = {}
  for name in names:
    digest = hashlib.sha256(seed + f"{i}{name}".encode()).digest()
    # Between 1/4 and 3 1/4, with 60 random bits.
    size = Fraction(int.from_bytes(digest[:8], "big") >> 4, 2**60) * 3
    sign = (1, -1)[i] if i < 2 else 1 - 2 * (digest[8] & 1)
    point[name] = sign * (size + Fraction(1, 4))
  return point


def _rounds_to(tree: Tree, gold: Leaf) -> bool:
  """Whether a constant rounds to the reference."""
  assert gold.step is not None
  gap, _ = difference(tree, gold.tree, {}, 400)
  half = gold.step / 2
  return bool(abs(gap) * half.denominator <= half.numerator)


def _equivalent(
  a: Tree, g: Tree, names: list[str], seed: bytes, cost: int
) -> bool:
  """Whether one equation is a numeric multiple of the other."""
  if _names(a) != _names(g):
    return False
  left, right = (("+", tree[1], ("-", tree[2])) for tree in (a, g))
  try:
    first = _point(names, seed, 0)
    origin = [_at(tree, first) for tree in (left, right)]
    # left(p) right(q) = left(q) right(p) at all points q, and neither is zero.
    for i in range(1, _count(a, g, names) + 1):
      point = _point(names, seed, i)
      given = ("*", _at(left, point), origin[1])
      wanted = ("*", _at(right, point), origin[0])
      if not agree(given, wanted, {}, cost):
        return False
      for value in (given, wanted):
        if agree(value, Fraction(0), {}, cost):
          return False
    return True
  except Undefined:
    return False


def _at(tree: Tree, point: dict[str, Fraction]) -> Tree:
  """The tree with numbers for its symbols."""
  if not isinstance(tree, tuple) or tree[0] == "constant":
    return tree
  if tree[0] == "symbol":
    return point[tree[1]]
  return (tree[0], *(_at(argument, point) for argument in tree[1:]))
