from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.verdicts.math import reader
from brorl_jax.verdicts.math.nodes import Unreadable
from brorl_jax.verdicts.math.tokens import plain, tokens


def read(text):
  return reader.read(tokens(plain(text)))


@pytest.mark.parametrize(
  "text, value",
  [
    ("1+2*3", 7), ("2-3-4", -5), ("-2^2", -4), ("(-2)^2", 4), ("--2", 2),
    ("2^-1", Fraction(1, 2)), ("2^10", 1024), ("2**3", 8), ("8/4/2", 1),
    ("2(3)(4)", 24), (r"\frac12", Fraction(1, 2)),
    (r"\frac{1}{2}+\frac 3 4", Fraction(5, 4)), (r"3\frac12", Fraction(7, 2)),
    (r"-3\frac{1}{2}", Fraction(-7, 2)),
    (r"3\frac{5}{2}", Fraction(15, 2)),  # no mixed number: a product
    (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)), (r"\sqrt[3]{27}", 3),
    (r"\sqrt9", 3), (r"|2-5|", 3), (r"||2|-|5||", 3),
    (r"\lfloor -2.5 \rfloor", -3), (r"\lceil 2.1 \rceil", 3), ("3!", 6),
    ("50%", Fraction(1, 2)), (r"\binom{4}{2}", 6),
    (r"0.\overline{3}", Fraction(1, 3)),
    (r"1.2\overline{34}", Fraction(1222, 990)), (r"0.\dot3", Fraction(1, 3)),
    ("1.5e3", 1500), (r"\max(1, 5/2, 2)", Fraction(5, 2)),
    (r"2\min\{3, 2\}+1", 5), (r"\gcd(12, 18, -9)", 3),
    (r"|\max(2|3|, 2|4|)|", 8),
  ],
)  # fmt: skip
def test_rational_expressions_by_hand(text, value):
  assert read(text) == value


@pytest.mark.parametrize(
  "text, tree",
  [
    (r"2\pi", ("*", Fraction(2), ("constant", "pi"))),
    (r"\sin 2x \cos x", ("*", ("sin", ("*", Fraction(2), ("symbol", "x"))),
      ("cos", ("symbol", "x")))),
    (r"\sin^2 x", ("^", ("sin", ("symbol", "x")), Fraction(2))),
    (r"\tan^{-1} x", ("arctan", ("symbol", "x"))),
    (r"\log_2 x", ("log", ("symbol", "x"), Fraction(2))),
    (r"\log x", ("log", ("symbol", "x"), Fraction(10))),
    (r"\ln(x)y", ("*", ("ln", ("symbol", "x")), ("symbol", "y"))),
    ("e^x", ("^", ("constant", "e"), ("symbol", "x"))),
    (r"\max(x, 1)", ("max", ("symbol", "x"), Fraction(1))),
    (r"3\hat{i}\vec v", ("*", ("*", Fraction(3), ("symbol", r"\hati")),
      ("symbol", r"\vecv"))),
    (r"\overline{PQ}", ("symbol", r"\overlineP Q")),
    (r"\hat xy", ("*", ("symbol", r"\hatx"), ("symbol", "y"))),
    (r"\exp(x)", ("^", ("constant", "e"), ("symbol", "x"))),
    (r"\cos 60^\circ", ("cos", ("*", Fraction(60), ("/", ("constant", "pi"),
      Fraction(180))))),
  ],
)  # fmt: skip
def test_trees_by_hand(text, tree):
  assert read(text) == tree


@pytest.mark.parametrize(
  "text, why",
  [
    ("", "ends too early"), ("1+", "ends too early"),
    (r"\frac123", "two numbers side by side"),
    ("1 2", "two numbers side by side"), ("1/0", "division by zero"),
    (r"\frac{1}{0}", "division by zero"), ("0^0", "zero to a power"),
    ("2*", "ends too early"), ("*2", "stray \\*"), ("$2", "stray \\$"),
    (r"\nonsense", r"unknown \\nonsense"), (r"\text{two}", "word two"),
    ("|1", "\\| is missing"), (r"\overline{3}", "unknown"),
    (r"\overline{x+1}", "unknown"), (r"\hat", "unknown"),
    (r"\hat{}", "unknown"), (r"\max 3", "is missing"),
    (r"\max(1, 2\}", "is missing"), (r"\max()", "stray"),
    (r"\gcd(x, 2)", "common divisor of something other than integers"),
    (r"\gcd(1/2, 2)", "common divisor of something other than integers"),
    (r"0.\overline{x}", "a bar over what are no digits"),
  ],
)  # fmt: skip
def test_what_is_no_expression(text, why):
  with pytest.raises(Unreadable, match=why):
    read(text)


@hypothesis.given(strategies.fractions(), strategies.integers(1, 10**6))
def test_a_fraction_can_be_multiplied_through(q, k):
  written = rf"\frac{{{q.numerator * k}}}{{{q.denominator * k}}}"
  assert read(written) == q


@hypothesis.given(strategies.decimals(-(10**9), 10**9, places=6))
def test_a_decimal_is_what_it_says(number):
  assert read(f"{number:f}") == Fraction(number)


@pytest.mark.parametrize("text", [r"\sqrt" * 90 + "2", "|" * 399, "-" * 398])
def test_deep_text_ends(text):
  with pytest.raises(Unreadable):
    read(text + "x(")


rationals = strategies.fractions(max_denominator=1000)


@hypothesis.given(rationals, rationals)
def test_rational_operations_are_those_of_fractions(a, b):
  assert reader.add(a, b) == a + b
  assert reader.multiply(a, b) == a * b
  assert reader.negative(a) == -a
  if b:
    assert reader.divide(a, b) == a / b


@hypothesis.given(
  strategies.fractions(min_value=0, max_denominator=50),
  strategies.integers(2, 9),
)
def test_roots_undo_powers(a, n):
  power = reader.raise_to(a, Fraction(n)) if a else Fraction(0)
  assert reader.root(power, Fraction(n)) == a
  # Next to a power there is none.
  whole = Fraction(10**18) ** n + 1
  assert reader.root(whole, Fraction(n)) == ("root", whole, Fraction(n))


@pytest.mark.parametrize(
  "call, value",
  [
    (lambda: reader.raise_to(Fraction(4), Fraction(-3, 2)), Fraction(1, 8)),
    (lambda: reader.raise_to(Fraction(1, 4), Fraction(1, 2)), Fraction(1, 2)),
    (lambda: reader.raise_to(Fraction(-1), Fraction(10**30)), 1),
    (lambda: reader.raise_to(Fraction(-1), Fraction(10**30 + 1)), -1),
    (
      lambda: reader.raise_to(Fraction(-8), Fraction(1, 3)),
      ("^", Fraction(-8), Fraction(1, 3)),
    ),
    (lambda: reader.factorial(Fraction(5)), 120),
    (lambda: reader.binomial(Fraction(5), Fraction(2)), 10),
    (lambda: reader.rounded(r"\lfloor", Fraction(-1, 2)), -1),
    (lambda: reader.rounded(r"\lceil", Fraction(-1, 2)), 0),
    (lambda: Fraction("1.5e-3"), Fraction(3, 2000)),
    (lambda: reader.decimal_step("1.50"), Fraction(1, 100)),
    (lambda: reader.decimal_step("1.5e3"), 100),
    (lambda: reader.decimal_step("15"), None),
  ],
)
def test_values_by_hand(call, value):
  assert call() == value


@pytest.mark.parametrize(
  "call, why",
  [
    (lambda: reader.divide(("symbol", "x"), Fraction(0)), "division by zero"),
    (lambda: reader.raise_to(Fraction(0), Fraction(0)), "zero to a power"),
    (lambda: reader.raise_to(Fraction(0), Fraction(-1)), "zero to a power"),
    (lambda: reader.raise_to(Fraction(3), Fraction(10**9)), "too large"),
    (lambda: reader.raise_to(Fraction(1, 3), Fraction(-(10**9))), "too large"),
    (lambda: reader.factorial(Fraction(2501)), "factorial"),
    (lambda: reader.factorial(Fraction(1, 2)), "factorial"),
    (lambda: reader.binomial(Fraction(9999), Fraction(2)), "binomial"),
    (lambda: reader.binomial(Fraction(5), Fraction(1, 2)), "binomial"),
    (lambda: reader.root(Fraction(5), Fraction(0)), "root of degree zero"),
  ],
)
def test_what_has_no_value_or_too_large_a_one(call, why):
  with pytest.raises(Unreadable, match=why):
    call()


def test_products_of_large_numbers_end():
  large = reader.factorial(Fraction(2400))
  with pytest.raises(Unreadable, match="too large"):
    reader.multiply(large, large)
