from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.verdicts.math import exact
from brorl_jax.verdicts.math.nodes import Unreadable

rationals = strategies.fractions(max_denominator=1000)


@hypothesis.given(rationals, rationals)
def test_rational_operations_are_those_of_fractions(a, b):
  assert exact.add(a, b) == a + b
  assert exact.multiply(a, b) == a * b
  assert exact.negative(a) == -a
  assert exact.absolute(a) == abs(a)
  if b:
    assert exact.divide(a, b) == a / b


@hypothesis.given(
  strategies.fractions(min_value=0, max_denominator=50),
  strategies.integers(2, 9),
)
def test_roots_undo_powers(a, n):
  power = exact.raise_to(a, Fraction(n)) if a else Fraction(0)
  assert exact.root(power, Fraction(n)) == a
  # Next to a power there is none.
  whole = Fraction(10**18) ** n + 1
  assert exact.root(whole, Fraction(n)) == ("root", whole, Fraction(n))


@pytest.mark.parametrize(
  "call, value",
  [
    (lambda: exact.raise_to(Fraction(4), Fraction(-3, 2)), Fraction(1, 8)),
    (lambda: exact.raise_to(Fraction(1, 4), Fraction(1, 2)), Fraction(1, 2)),
    (lambda: exact.raise_to(Fraction(-1), Fraction(10**30)), 1),
    (lambda: exact.raise_to(Fraction(-1), Fraction(10**30 + 1)), -1),
    (
      lambda: exact.raise_to(Fraction(-8), Fraction(1, 3)),
      ("^", Fraction(-8), Fraction(1, 3)),
    ),
    (lambda: exact.factorial(Fraction(5)), 120),
    (lambda: exact.binomial(Fraction(5), Fraction(2)), 10),
    (lambda: exact.rounded(r"\lfloor", Fraction(-1, 2)), -1),
    (lambda: exact.rounded(r"\lceil", Fraction(-1, 2)), 0),
    (lambda: exact.number("1.5e-3"), Fraction(3, 2000)),
    (lambda: exact.decimal_step("1.50"), Fraction(1, 100)),
    (lambda: exact.decimal_step("1.5e3"), 100),
    (lambda: exact.decimal_step("15"), None),
  ],
)
def test_values_by_hand(call, value):
  assert call() == value


@pytest.mark.parametrize(
  "call, why",
  [
    (lambda: exact.divide(("symbol", "x"), Fraction(0)), "division by zero"),
    (lambda: exact.raise_to(Fraction(0), Fraction(0)), "zero to a power"),
    (lambda: exact.raise_to(Fraction(0), Fraction(-1)), "zero to a power"),
    (lambda: exact.raise_to(Fraction(3), Fraction(10**9)), "too large"),
    (lambda: exact.raise_to(Fraction(1, 3), Fraction(-(10**9))), "too large"),
    (lambda: exact.factorial(Fraction(2501)), "factorial"),
    (lambda: exact.factorial(Fraction(1, 2)), "factorial"),
    (lambda: exact.binomial(Fraction(9999), Fraction(2)), "binomial"),
    (lambda: exact.binomial(Fraction(5), Fraction(1, 2)), "binomial"),
    (lambda: exact.root(Fraction(5), Fraction(0)), "root of degree zero"),
  ],
)
def test_what_has_no_value_or_too_large_a_one(call, why):
  with pytest.raises(Unreadable, match=why):
    call()


def test_products_of_large_numbers_end():
  large = exact.factorial(Fraction(2400))
  with pytest.raises(Unreadable, match="too large"):
    exact.multiply(large, large)
