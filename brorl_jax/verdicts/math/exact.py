r"""Trees of expressions in which every rational part is one Fraction.

  multiply(Fraction(2), root(Fraction(3), Fraction(2)))
  # ("*", Fraction(2), ("root", Fraction(3), Fraction(2)))

Nothing here is rounded. Numbers stay below 2**30,000, and an operation costs
at most milliseconds, whatever the text. What has no value raises Unreadable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from brorl_jax.verdicts.math.nodes import Tree, Unreadable

_MAX_BITS = 30_000
_MAX_FACTORIAL = 2_500


def number(text: str) -> Fraction:
  """The value of a decimal number."""
  return Fraction(text)


def decimal_step(text: str) -> Fraction | None:
  """One unit of a decimal's last digit; None without a decimal point."""
  digits, _, exponent = text.casefold().partition("e")
  if "." not in digits:
    return None
  return Fraction(10) ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _small(value: Fraction) -> Fraction:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > (
    _MAX_BITS
  ):
    raise Unreadable("too large")
  return value


def add(a: Tree, b: Tree) -> Tree:
  """a + b."""
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _small(a + b)
  return ("+", a, b)


def negative(a: Tree) -> Tree:
  """-a."""
  return -a if isinstance(a, Fraction) else ("-", a)


def multiply(a: Tree, b: Tree) -> Tree:
  """a b."""
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _small(a * b)
  return ("*", a, b)


def divide(a: Tree, b: Tree) -> Tree:
  """a / b."""
  if b == 0:
    raise Unreadable("division by zero")
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _small(a / b)
  return ("/", a, b)


def raise_to(a: Tree, b: Tree) -> Tree:
  """a to the power b; exact for a whole b."""
  if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
    return ("^", a, b)
  if a == 0 and b <= 0:
    raise Unreadable("zero to a power that is not positive")
  if b.denominator > 1:
    if a < 0:  # the principal value is complex
      return ("^", a, b)
    return root(raise_to(a, Fraction(b.numerator)), Fraction(b.denominator))
  bits = max(a.numerator.bit_length(), a.denominator.bit_length())
  if abs(a) != 1 and bits * abs(b.numerator) > _MAX_BITS:
    raise Unreadable("too large")
  if abs(a) == 1:
    return a if b.numerator % 2 else Fraction(1)
  return a**b.numerator


def root(a: Tree, degree: Tree) -> Tree:
  """The principal root, exact where it is rational and not negative."""
  if degree == 0:
    raise Unreadable("root of degree zero")
  if degree == 1:
    return a
  if isinstance(a, Fraction) and isinstance(degree, Fraction) and a >= 0:
    if degree.denominator == 1 and 2 <= degree <= 100:
      above = _whole_root(a.numerator, int(degree))
      below = _whole_root(a.denominator, int(degree))
      if above is not None and below is not None:
        return Fraction(above, below)
  return ("root", a, degree)


def _whole_root(n: int, degree: int) -> int | None:
  if degree == 2:
    root = math.isqrt(n)
    return root if root**2 == n else None
  low, high = 0, 1 << (n.bit_length() // degree + 1)
  while low < high:
    middle = (low + high) // 2
    if middle**degree < n:
      low = middle + 1
    else:
      high = middle
  return low if low**degree == n else None


def absolute(a: Tree) -> Tree:
  """|a|."""
  return abs(a) if isinstance(a, Fraction) else ("abs", a)


def rounded(name: str, a: Tree) -> Tree:
  """The floor or the ceiling of a."""
  kind = "floor" if name == r"\lfloor" else "ceil"
  if isinstance(a, Fraction):
    return Fraction(math.floor(a) if kind == "floor" else math.ceil(a))
  return (kind, a)


def factorial(a: Tree) -> Tree:
  """a!."""
  if not isinstance(a, Fraction):
    return ("!", a)
  if a.denominator > 1 or not 0 <= a <= _MAX_FACTORIAL:
    raise Unreadable("factorial of something other than a small integer")
  return _small(Fraction(math.factorial(a.numerator)))


def binomial(n: Tree, k: Tree) -> Tree:
  """n over k."""
  if not (isinstance(n, Fraction) and isinstance(k, Fraction)):
    return ("binom", n, k)
  whole = n.denominator == 1 == k.denominator
  if not whole or min(n, k) < 0 or max(n, k) > _MAX_FACTORIAL:
    raise Unreadable("binomial of something other than small integers")
  return _small(Fraction(math.comb(n.numerator, k.numerator)))


def of_several(name: str, values: Sequence[Tree]) -> Tree:
  """The maximum, the minimum or, of whole numbers, the common divisor."""
  numbers = [value for value in values if isinstance(value, Fraction)]
  if name == "gcd":
    if len(numbers) < len(values) or any(n.denominator > 1 for n in numbers):
      raise Unreadable("common divisor of something other than integers")
    return Fraction(math.gcd(*(n.numerator for n in numbers)))
  if len(numbers) == len(values):
    return max(numbers) if name == "max" else min(numbers)
  return (name, *values)
