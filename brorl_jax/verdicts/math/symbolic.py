r"""Equality of expressions that are not fractions; runs in the jail.

Arguments that would take long (the sine of a number with 1,000 digits) are
refused, so that no text costs more than milliseconds.
"""

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import mpmath

from brorl_jax.verdicts.math import compare, expressions
from brorl_jax.verdicts.math.expressions import Tree, Unreadable
from brorl_jax.verdicts.math.structure import Leaf, parse

_MAX_BITS = 20_000  # of values and precision; a root of this size takes 0.1 s
_MAX_GAMMA_BITS = 1_000  # with 4,000 its first value takes 3 s
_MAX_SIZE = 40  # bits of an exponent: values up to 2**(2**40)
_POINTS = 4
# For expressions whose case depends on the order of several names: max(a, b)
# equals a at all of 4 points once in 16 times, at 16 points once in 65,536.
_POINTS_OF_CASES = 16
# Of trees that differ where they are not real, over all further points: 24
# points of most, and 6 of two sums of 24 binomials.
_MOST_PARTS = 1_200
_CASES = ("abs", "floor", "ceil", "root", "max", "min")

mp: Any = mpmath.mp
Point = dict[str, Fraction]  # the value of each variable


def symbolic(answer: str, gold: str) -> bool:
  """Whether an answer equals the reference; both passed the gate.

  Two expressions are equal if they agree at positive and negative points, drawn
  from a hash of both, to more digits than their texts could encode. There is no
  tolerance, so 15 digits of pi do not equal pi. Identities of roots, powers and
  logarithms need to hold where both are real.
  """
  seed = hashlib.sha256(f"{answer}\0{gold}".encode()).digest()
  cost = 4 * (len(answer) + len(gold))

  def rule(a: Leaf, g: Leaf) -> bool:
    if a.tree is None or g.tree is None:
      return False
    try:
      return _equal(a, g, seed, cost)
    except Undefined:
      return False

  try:
    return compare.same(parse(answer), parse(gold), rule) is True
  except (Unreadable, RecursionError):  # a side has no structure
    return False


def _equal(a: Leaf, g: Leaf, seed: bytes, cost: int) -> bool:
  equations = [isinstance(x, tuple) and x[0] == "=" for x in (a.tree, g.tree)]
  if any(equations):
    return all(equations) and _equivalent(a.tree, g.tree, seed, cost)
  names = sorted(expressions.variables(a.tree) | expressions.variables(g.tree))
  if not names:
    if compare.is_rounded(g) and g.step:
      gap, _ = difference(a.tree, g.tree, {}, 400)
      return bool(2 * abs(gap) * g.step.denominator <= g.step.numerator)
    return agree(a.tree, g.tree, {}, cost)
  points = _points(a.tree, g.tree, names, seed)
  if _has_cases(a.tree) or _has_cases(g.tree):
    far = 4 * _product(a.tree) * _product(g.tree)
    points += [{n: far * x for n, x in p.items()} for p in points[:_POINTS]]
  size = sum(1 for tree in (a.tree, g.tree) for _ in expressions.subtrees(tree))
  count = min(24, _MOST_PARTS // size)
  late = range(_POINTS_OF_CASES, _POINTS_OF_CASES + count)
  more = (_point(names, seed, i, scale=1 + i % 2 * 3) for i in late)
  return _equal_where_real(a.tree, g.tree, points, more, cost)


def _equal_where_real(
  a: Tree, g: Tree, points: list[Point], more: Iterable[Point], cost: int
) -> bool:
  r"""Whether two trees agree at points, except where they need not.

  The roots of xy and of x and y multiplied differ in sign at negative points,
  where the latter are not real; so they may, if they agree at more points.
  Where all variables are positive only the reference may be not real:
  (\sqrt{x-1})^2 is not |x-1|.
  """
  differs, shown = False, 0
  for i, point in enumerate(itertools.chain(points, more)):
    if i == len(points) and not differs:
      return True
    try:
      equal = agree(a, g, point, cost)
    except Undefined:
      equal = False
    differs = differs or not equal
    sides = (g,) if min(point.values()) > 0 else (g, a)
    if differs and all(_is_real(side, point) for side in sides):
      if not equal:
        return False
      shown += 1
  return not differs or shown >= _POINTS


def _is_real(tree: Tree, point: Point) -> bool:
  """Whether a tree and all of its parts have real values at a point."""
  values = _Values(point)
  try:
    with mpmath.workprec(100):
      values.value(tree)
  except Undefined:
    return False
  return values.real


def _points(
  a: Tree, g: Tree, names: list[str], seed: bytes, start: int = 0
) -> list[Point]:
  cases = len(names) > 1 and (_has_cases(a) or _has_cases(g))
  count = _POINTS_OF_CASES if cases else _POINTS
  return [_point(names, seed, i) for i in range(start, start + count)]


def _point(names: list[str], seed: bytes, i: int, scale: int = 1) -> Point:
  """The i-th point: all positive, all negative, then mixed signs."""
  point = {}
  for name in names:
    digest = hashlib.sha256(seed + f"{i}{name}".encode()).digest()
    # Between 1/4 and 3 1/4, divided by the scale, with 60 random bits.
    size = Fraction(int.from_bytes(digest[:8], "big") >> 4, 2**60) * 3
    sign = (1, -1)[i] if i < 2 else 1 - 2 * (digest[8] & 1)
    point[name] = sign * (size + Fraction(1, 4)) / scale
  return point


def _equivalent(a: Tree, g: Tree, seed: bytes, cost: int) -> bool:
  """Whether one equation is a numeric multiple of the other."""
  names = sorted(expressions.variables(a))
  if set(names) != expressions.variables(g):
    return False
  left, right = (("+", tree[1], ("-", tree[2])) for tree in (a, g))
  # left(p) right(q) = left(q) right(p) at all points q, and neither is zero.
  first = _point(names, seed, 0)
  for point in _points(a, g, names, seed, start=1):
    given = ("*", _at(left, point), _at(right, first))
    wanted = ("*", _at(right, point), _at(left, first))
    if not agree(given, wanted, {}, cost):
      return False
    if any(agree(value, Fraction(0), {}, cost) for value in (given, wanted)):
      return False
  return True


def _has_cases(tree: Tree) -> bool:
  """Whether a tree may be a different function in different regions."""
  parts = [x for x in expressions.subtrees(tree) if isinstance(x, tuple)]
  powers = [x[2] for x in parts if x[0] == "^"]
  whole = all(getattr(x, "denominator", 0) == 1 for x in powers)
  return not whole or any(x[0] in _CASES for x in parts)


def _product(tree: Tree) -> int:
  """A bound on where the numbers of a tree can put a change of case."""
  numbers = [x for x in expressions.subtrees(tree) if isinstance(x, Fraction)]
  return math.prod(max(abs(n.numerator), 1) * n.denominator for n in numbers)


def _at(tree: Tree, point: Point) -> Tree:
  if not isinstance(tree, tuple) or tree[0] == "constant":
    return tree
  if tree[0] == "symbol":
    return point[tree[1]]
  return (tree[0], *(_at(argument, point) for argument in tree[1:]))


class Undefined(ValueError):
  """An expression has no finite value at a point."""


def agree(a: Tree, g: Tree, point: Point, cost: int) -> bool:
  """Whether two trees have the same value at a point.

  A first evaluation finds how large and small the values are; the second has
  twice these bits more than the texts have, so that what is left of a
  difference of equals is far below any difference of unequals.
  """
  gap, rough = difference(a, g, point, 200)
  if abs(gap) > mp.ldexp(1, rough.top - 60):
    return False
  bits = 200 + 2 * rough.largest
  if bits > (_MAX_GAMMA_BITS if rough.gamma else _MAX_BITS):
    raise Undefined
  bits += cost
  if rough.gamma:
    bits = min(bits, _MAX_GAMMA_BITS)
  gap, fine = difference(a, g, point, bits)
  return bool(abs(gap) <= mp.ldexp(1, fine.top + 60 - bits))


def difference(
  a: Tree, g: Tree, point: Point, bits: int
) -> tuple[Any, "_Values"]:
  """The difference of two trees' values, and what was seen on the way."""
  with mpmath.workprec(bits):
    values = _Values(point)
    gap = values.value(a) - values.value(g)
  return gap, values


class _Values:
  """Evaluates trees at a point, and remembers how large values became."""

  def __init__(self, point: Point):
    self._point = point
    self.largest = 0  # of |log2| of all values
    self.top = 0  # of log2 of all values
    self.gamma = False  # whether the gamma function was used
    self.real = True  # whether all values were real numbers

  def value(self, tree: Tree) -> Any:
    try:
      value = self._value(tree)
    except (ZeroDivisionError, ValueError, OverflowError):
      raise Undefined from None
    if not mp.isfinite(value):
      raise Undefined
    self.real = self.real and not isinstance(value, mp.mpc)
    if value:
      size = int(mp.mag(value))
      self.largest = max(self.largest, abs(size))
      self.top = max(self.top, size)
      if self.largest > 2**_MAX_SIZE:
        raise Undefined
    return value

  def _value(self, tree: Tree) -> Any:
    if isinstance(tree, Fraction):
      return mp.mpf(tree.numerator) / tree.denominator
    name, *arguments = tree
    if name == "symbol":
      return self._value(self._point[arguments[0]])
    if name == "constant":
      constants = {"pi": mp.pi, "e": mp.e, "i": mp.mpc(0, 1)}
      if arguments[0] not in constants:
        raise Undefined
      return +constants[arguments[0]]
    values = [self.value(argument) for argument in arguments]
    if name in ("root", "^") and isinstance(arguments[1], Fraction):
      power = arguments[1] if name == "^" else 1 / arguments[1]
      if power.denominator % 2 and not isinstance(values[0], mp.mpc):
        sign = -1 if values[0] < 0 and power.numerator % 2 else 1
        values[0] = abs(values[0])
        return sign * _OPERATIONS[name](*values)
    if name in ("!", "binom"):
      self.gamma = True
      _bound(12, *values)
    if name in _OPERATIONS:
      return _OPERATIONS[name](*values)
    _bound(_MAX_SIZE if name.endswith("h") else 256, *values)
    return getattr(mp, name.replace("arc", "a"))(*values)


def _bound(bits: int, *values: Any) -> None:
  """Refuses arguments for which a function would take long."""
  if any(value and mp.mag(value) > bits for value in values):
    raise Undefined


def _power(base: Any, exponent: Any) -> Any:
  if not base:
    if mp.re(exponent) <= 0:
      raise Undefined
    return base
  size = max(abs(mp.mag(base)), 1)
  if exponent and mp.mag(exponent) + size.bit_length() > _MAX_SIZE:
    raise Undefined
  return mp.power(base, exponent)


def _whole(rounded: Callable[[Any], Any], a: Any) -> Any:
  nearest = mp.nint(a)
  if a != nearest and abs(a - nearest) < mp.mpf(2) ** -100:
    return nearest  # rounding, not a fraction
  return rounded(a)


def _extreme(choose: Callable[..., Any], *values: Any) -> Any:
  if any(mp.im(value) for value in values):
    raise Undefined
  return choose(map(mp.re, values))


# All others are functions of mpmath.
_OPERATIONS: dict[str, Callable[..., Any]] = {
  **{"+": operator.add, "*": operator.mul, "/": operator.truediv},
  **{"-": operator.neg, "abs": abs, "ln": mp.log, "^": _power},
  "root": lambda a, degree: _power(a, 1 / degree),
  "log": lambda a, base: mp.log(a) / mp.log(base),
  "floor": functools.partial(_whole, mp.floor),
  "ceil": functools.partial(_whole, mp.ceil),
  "max": functools.partial(_extreme, max),
  "min": functools.partial(_extreme, min),
  **{"!": mp.factorial, "binom": mp.binomial},
}
