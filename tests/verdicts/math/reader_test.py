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
    ("1+2*3", 7),
    ("2-3-4", -5),
    ("-2^2", -4),
    ("(-2)^2", 4),
    ("--2", 2),
    ("2^-1", Fraction(1, 2)),
    ("2^10", 1024),
    ("2**3", 8),
    ("8/4/2", 1),
    ("2(3)(4)", 24),
    (r"\frac12", Fraction(1, 2)),
    (r"\frac{1}{2}+\frac 3 4", Fraction(5, 4)),
    (r"3\frac12", Fraction(7, 2)),
    (r"-3\frac{1}{2}", Fraction(-7, 2)),
    (r"3\frac{5}{2}", Fraction(15, 2)),  # no mixed number: a product
    (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
    (r"\sqrt[3]{27}", 3),
    (r"\sqrt9", 3),
    (r"|2-5|", 3),
    (r"||2|-|5||", 3),
    (r"\lfloor -2.5 \rfloor", -3),
    (r"\lceil 2.1 \rceil", 3),
    ("3!", 6),
    ("50%", Fraction(1, 2)),
    (r"\binom{4}{2}", 6),
    (r"0.\overline{3}", Fraction(1, 3)),
    (r"1.2\overline{34}", Fraction(1222, 990)),
    (r"0.\dot3", Fraction(1, 3)),
    ("1.5e3", 1500),
    (r"\max(1, 5/2, 2)", Fraction(5, 2)),
    (r"2\min\{3, 2\}+1", 5),
    (r"\gcd(12, 18, -9)", 3),
    (r"|\max(2|3|, 2|4|)|", 8),
  ],
)
def test_rational_expressions_by_hand(text, value):
  assert read(text) == value


@pytest.mark.parametrize(
  "text, tree",
  [
    (r"2\pi", ("*", Fraction(2), ("constant", "pi"))),
    (
      r"\sin 2x \cos x",
      (
        "*",
        ("sin", ("*", Fraction(2), ("symbol", "x"))),
        ("cos", ("symbol", "x")),
      ),
    ),
    (r"\sin^2 x", ("^", ("sin", ("symbol", "x")), Fraction(2))),
    (r"\tan^{-1} x", ("arctan", ("symbol", "x"))),
    (r"\log_2 x", ("log", ("symbol", "x"), Fraction(2))),
    (r"\log x", ("log", ("symbol", "x"), Fraction(10))),
    (r"\ln(x)y", ("*", ("ln", ("symbol", "x")), ("symbol", "y"))),
    ("e^x", ("^", ("constant", "e"), ("symbol", "x"))),
    (r"\max(x, 1)", ("max", ("symbol", "x"), Fraction(1))),
    (
      r"3\hat{i}\vec v",
      ("*", ("*", Fraction(3), ("symbol", r"\hati")), ("symbol", r"\vecv")),
    ),
    (r"\overline{PQ}", ("symbol", r"\overlineP Q")),
    (r"\hat xy", ("*", ("symbol", r"\hatx"), ("symbol", "y"))),
    (r"\exp(x)", ("^", ("constant", "e"), ("symbol", "x"))),
    (
      r"\cos 60^\circ",
      ("cos", ("*", Fraction(60), ("/", ("constant", "pi"), Fraction(180)))),
    ),
  ],
)
def test_trees_by_hand(text, tree):
  assert read(text) == tree


@pytest.mark.parametrize(
  "text, why",
  [
    ("", "ends too early"),
    ("1+", "ends too early"),
    (r"\frac123", "two numbers side by side"),
    ("1 2", "two numbers side by side"),
    ("1/0", "division by zero"),
    (r"\frac{1}{0}", "division by zero"),
    ("0^0", "zero to a power"),
    ("2*", "ends too early"),
    ("*2", "stray \\*"),
    ("$2", "stray \\$"),
    (r"\nonsense", r"unknown \\nonsense"),
    (r"\text{two}", "word two"),
    ("|1", "\\| is missing"),
    (r"\overline{3}", "unknown"),
    (r"\overline{x+1}", "unknown"),
    (r"\hat", "unknown"),
    (r"\hat{}", "unknown"),
    (r"\max 3", "is missing"),
    (r"\max(1, 2\}", "is missing"),
    (r"\max()", "stray"),
    (r"\gcd(x, 2)", "common divisor of something other than integers"),
    (r"\gcd(1/2, 2)", "common divisor of something other than integers"),
    (r"0.\overline{x}", "a bar over what are no digits"),
  ],
)
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
