"""Evaluates expressions at a point, to as many digits as needed.

mpmath computes them, in the jail. Arguments that would take long (the sine of a
number with 1,000 digits) are refused, so that no text costs more than
milliseconds.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from brorl_jax.verdicts.math.nodes import Tree

_MAX_BITS = 20_000  # of values and precision; a root with so many takes 0.1 s
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
