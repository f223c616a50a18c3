import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.verdicts.gym.expressions import refuse_integral, terms, value

# Arithmetic.


@pytest.mark.parametrize(
  "text, result",
  [
    ("7", 7), ("1+2*3", 7), ("(1+2)*3", 9), ("8-3-2", 3), ("8/4/2", 1),
    ("8/(4/2)", 4), ("1/3*3", 1), ("8/(3-8/3)", 24), ("2-3*4+1", -9),
    ("-2+5", 3), ("-2*3", -6), ("4*(-2 + 5)", 12), ("-(2-5)", 3),
    ("((((7))))", 7), (" 1 +\t2 ", 3), ("007", 7),
  ],
)  # fmt: skip
def test_values_by_hand(text, result):
  assert value(text) == Fraction(result)


@pytest.mark.parametrize(
  "text",
  [
    "", "+", "-", "()", "1+", "*1", "+1", "1 2", "1(2)", "(1)(2)", "(1)2",
    "1)+(2", "1)(2", "(1", "1)", "--1", "1--1", "1*-1", "1+-1", "2**3", "7//2",
    "7%2", "1/0", "1/(2-2)", "1.5", "1e3", "0x10", "1_0", "1,2", "x", "\u0663",
    "\u00b2", "1;2", "1=1", "9**9**9**9", "__import__('os')",
  ],
)  # fmt: skip
def test_what_is_no_expression_has_no_value(text):
  assert value(text) is None


def written(children):
  return st.one_of(
    st.tuples(children, st.sampled_from("+-*/"), children).map(
      lambda t: f"({t[0]}{t[1]}{t[2]})"
    ),
    st.tuples(children, st.sampled_from("+-*/"), children).map(
      lambda t: f"{t[0]} {t[1]} {t[2]}"
    ),
    children.map(lambda t: f"(-{t})"),
  )


@given(st.recursive(st.integers(0, 30).map(str), written, max_leaves=12))
@settings(deadline=None)
def test_values_are_those_of_exact_arithmetic(text):
  exact = re.sub(r"\d+", r"Fraction(\g<0>)", text)
  try:
    wanted = eval(exact, {"Fraction": Fraction})
  except ZeroDivisionError:
    wanted = None
  assert value(text) == wanted


@given(st.text("0123456789+-*/() .x", max_size=30))
def test_no_text_raises(text):
  value(text)
  terms(text)
  refuse_integral(text, "x")


@pytest.mark.parametrize(
  "text",
  ["(" * 9_999, "1+" * 9_999, "-(" * 9_999 + "1" + ")" * 9_999, "1*" * 4_000],
)
def test_long_texts_take_linear_time(text):
  start = time.perf_counter()
  value(text)
  terms(text)
  refuse_integral(text, "x")
  # Quadratic would be minutes; the limit is no measurement.
  assert time.perf_counter() - start < 5


# Polynomials.


def summed(text):
  return {monomial: c for monomial, c, _ in terms(text)}


@pytest.mark.parametrize(
  "text, wanted",
  [
    ("3", {(): 3}), ("-x", {(("x", 1),): -1}), ("x**0", {(): 1}),
    ("2*x**6/3", {(("x", 6),): Fraction(2, 3)}),
    ("-(11/5)*x**4", {(("x", 4),): Fraction(-11, 5)}),
    ("(-1/2)*x", {(("x", 1),): Fraction(-1, 2)}), ("1/2*x*4", {(("x", 1),): 2}),
    ("2.5*y", {(("y", 1),): Fraction(5, 2)}),
    ("x*y*x", {(("x", 2), ("y", 1)): 1}), ("y*x", {(("x", 1), ("y", 1)): 1}),
    (" x ** 2 - 3 * x\n+ C", {(("x", 2),): 1, (("x", 1),): -3, (("C", 1),): 1}),
  ],
)  # fmt: skip
def test_terms_by_hand(text, wanted):
  assert summed(text) == wanted


@pytest.mark.parametrize(
  "text",
  [
    "", "x**", "x**y", "x**-1", "x**2**3", "x**9999", "x^2", "2x", "x 2", "1 2",
    "x* *2", "x**(2)", "(x+1)", "(x)", "x/y", "x/0", "(1/0)*x", "x/1.5", "x//2",
    "x--1", "x+-1", "++x", "xy", "1e5*x", "sin(x)", "x.real", "\u0663*x",
    "3*\u0445", "x;x", "x=1", "exec('1')",
  ],
)  # fmt: skip
def test_what_is_no_sum_of_terms(text):
  assert terms(text) is None


@pytest.mark.parametrize(
  "text, simple",
  [
    ("3*x*y", True),
    ("x**2", True),
    ("x*x", False),
    ("2*3*x", False),
    ("4*x/2", False),
  ],
)
def test_a_term_knows_whether_it_is_simplified(text, simple):
  assert [t[2] for t in terms(text)] == [simple]


# What sympy may be shown.


@pytest.mark.parametrize(
  "text",
  [
    "-exp(x)*sin(x) + exp(x)*cos(x) + C", "3*x*atan(x) - 3*log(x**2 + 1)/2 + C",
    "-4*(-2*x - 8)**(3/2)/3 + C", "E**(2*x)/2 + C", "x**(-1)", "x**-2", "x**20",
    "(1/2)*sqrt(1 - x**2) + pi", "0.5*x",
  ],
)  # fmt: skip
def test_integrals_are_let_through(text):
  assert refuse_integral(text, "x") == ""


@pytest.mark.parametrize(
  "text, why",
  [
    ("X**2", "the name X"), ("Integral(x, x)", "the name Integral"),
    ("__import__('os').system('true')", "a name next to"),
    ("x.diff()", "a name next to"), ("x.real", "a name next to"),
    ("().x", "a name next to"), ("__class__", "the text _"),
    ("lambda: 1", "the name lambda"), ("E1(x)", "a name next to"),
    ("2x", "a name next to"), ("0x10", "a name next to"),
    ("x 2", "a name next to"), ("'x'", "the text '"), ("x[0]", "the text ["),
    ("x!", "the text !"), ("x,x", "the text ,"), ("x^2", "the text ^"),
    ("9" * 9, "the text 9"), ("9**9**9", "a power"), ("9**(9**9)", "a power"),
    ("x**2**2", "a power"), ("x**21", "a power"), ("x**200", "a power"),
    ("x**(1000)", "a power"), ("x**(x)", "a power"), ("x ** 99", "a power"),
    ("2**x", "a power"), ("x**1.5", "a power"),
    ("(" * 9 + "x" + ")" * 9, "parentheses"), (")x(", "parentheses"),
    ("x" * 301, "at most 300"), ("\u0445", "at most 300"),
  ],
)  # fmt: skip
def test_other_text_is_refused_with_the_reason(text, why):
  assert refuse_integral(text, "x").startswith(why)


@pytest.mark.parametrize(
  "text, why",
  [
    ("((((99)**20)**20)**20)**20", "a power of a bracket"),
    ("(x+C+E)**3*(x+C)**2*(x+1)**2", "more than two powers"),
    ("tan(tan(x))", "functions in functions"),
    ("tan(x)*" * 6 + "tan(x)", "more than 6 functions"),
  ],
)
def test_what_would_take_long_is_refused(text, why):
  """An answer must not be able to make its verifier late."""
  assert refuse_integral(text, "x").startswith(why)
