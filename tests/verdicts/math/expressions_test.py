from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.verdicts.math import expressions
from brorl_jax.verdicts.math.expressions import Unreadable, combined, plain
from brorl_jax.verdicts.math.structure import parse

few = hypothesis.settings(max_examples=30)


def texts(text):
  return [token.text for token in expressions.tokens(plain(text))]


@pytest.mark.parametrize("text, expected", [
  (r"\left( 1,\,\tfrac12 \right)", ["(", "1", ",", r"\frac", "12", ")"]),
  (r"$x_{12} + y_1'$", ["x_12", "+", "y_1'"]),
  ("½ ÷ π", [r"\frac", "{", "1", "}", "{", "2", "}", "/", r"\pi"]),
  ("1,234", ["1", ",", "234"]), (r"1{,}234", ["1234"]),
  (r"1\,234\,567", ["1234567"]), ("12 34", ["12", "34"]),
  ("2.5e-3", ["2.5e-3"]), ("2ex", ["2", "e", "x"]), ("5 cm", ["5", "cm"]),
  ("5xy", ["5", "x", "y"]), ("sqrt(2)", [r"\sqrt", "(", "2", ")"]),
  (r"\log_2 8", [r"\log", "_", "2", "8"]), (r"\displaystyle.5", [".5"]),
  (r"1 \\ 2", ["1", r"\\", "2"]), (r"\le\leq\leqslant≤", [r"\leq"] * 4),
  (r"\begin{pmatrix}1\end{pmatrix}", [r"\beginpmatrix", "1", r"\endpmatrix"]),
])  # fmt: skip
def test_one_spelling(text, expected):
  assert texts(text) == expected


def test_words_are_told_from_letters():
  text = r"\text{m} m \mathrm{e} \mathrm{cm} or"
  kinds = [t.kind for t in expressions.tokens(text)]
  assert kinds == ["word", "symbol", "symbol", "word", "word"]


@pytest.mark.parametrize(
  "text", ["_1", "x_", "x_{}", "'", "_{2}1", "x_{1", r"\sin_2 x"]
)
def test_a_mark_without_its_letter_is_unreadable(text):
  with pytest.raises(Unreadable):
    expressions.tokens(text)


@pytest.mark.parametrize("text, expected", [
  ("2516_8", ["2516", "(base 8)"]), ("(1011)_{2}", ["1011", "(base 2)"]),
  (r"0.12_{\text{three}}", ["0.12", "(base 3)"]),
  ("012_{sixteen}", ["012", "(base 16)"]), ("0A3_{16}", ["A3", "(base 16)"]),
  ("12_{10}", ["12", "(base 10)"]),
  ("2A_1", ["2", "A_1"]),  # a product
  ("x_12", ["x_12"]), ("3 \\pmod 7", ["3", "(mod 7)"]),
  ("3 \\pmod{ 12 }", ["3", "(mod 12)"]), (r"3 (\bmod 7)", ["3", "(mod 7)"]),
  (r"3 (\text{mod }7)", ["3", "(mod 7)"]), ("3 (mod 7)", ["3", "(mod 7)"]),
])  # fmt: skip
def test_bases_and_moduli_are_words_of_their_own(text, expected):
  assert texts(text) == expected


@pytest.mark.parametrize("text", [
  "1_1", "0_1", "8_8", "12_{37}", "5_{many}", "1.3_3", "1D_{13}", "1_0"
])  # fmt: skip
def test_digits_that_the_base_does_not_have(text):
  with pytest.raises(Unreadable, match="base"):
    expressions.tokens(text)


def test_the_marks_of_a_formula_and_full_stops_are_taken_off():
  assert plain(r"\( 4. \)") == plain("$4$.") == "4"
  assert plain("$4$ and $5$") == "$4$ and $5$"


@pytest.mark.parametrize("words, canon", [
  ("cm", "cm"), ("centimeters", "cm"), ("Meters", "m"),
  ("square feet", "ft^2"), ("sq ft", "ft^2"), ("ft ^ { 2 }", "ft^2"),
  ("cubic inches", "in^3"), ("m / s ^ 2", "m/s^2"),
  ("meters per second", "m/s"), ("p . m .", "p.m."), ("PM", "p.m."),
  ("apples", "apple"), ("million", "?million"), ("not sure", "?not sure"),
  ("sq . ft .", "ft^2"), ("hundred dollars", "?hundred dollar"), ("M", "?m"),
  ("Cm", "?cm"), ("people", "person"), ("", None), ("( cm )", None),
  ("a very long phrase of many words", None),
])  # fmt: skip
def test_units_by_hand(words, canon):
  assert expressions.canonical_unit(words) == canon


def test_known_units_and_products_of_letters():
  assert expressions.known_unit("cm") and expressions.known_unit("MPH")
  assert not expressions.known_unit("xy")


def tree_of(text):
  return expressions.read(expressions.tokens(plain(text)))


@pytest.mark.parametrize("text, value", [
  ("1+2*3", 7), ("2-3-4", -5), ("-2^2", -4), ("(-2)^2", 4), ("--2", 2),
  ("2^-1", Fraction(1, 2)), ("2^10", 1024), ("2**3", 8), ("8/4/2", 1),
  ("2(3)(4)", 24), (r"\frac12", Fraction(1, 2)),
  (r"\frac{1}{2}+\frac 3 4", Fraction(5, 4)), (r"3\frac12", Fraction(7, 2)),
  (r"-3\frac{1}{2}", Fraction(-7, 2)),
  (r"3\frac{5}{2}", Fraction(15, 2)),  # no mixed number: a product
  (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)), (r"\sqrt[3]{27}", 3), (r"\sqrt9", 3),
  (r"|2-5|", 3), (r"||2|-|5||", 3), (r"\lfloor -2.5 \rfloor", -3),
  (r"\lceil 2.1 \rceil", 3), ("3!", 6), ("50%", Fraction(1, 2)),
  (r"\binom{4}{2}", 6), (r"0.\overline{3}", Fraction(1, 3)),
  (r"1.2\overline{34}", Fraction(1222, 990)), (r"0.\dot3", Fraction(1, 3)),
  ("1.5e3", 1500), (r"\max(1, 5/2, 2)", Fraction(5, 2)),
  (r"2\min\{3, 2\}+1", 5), (r"\gcd(12, 18, -9)", 3), (r"|\max(2|3|, 2|4|)|", 8),
])  # fmt: skip
def test_rational_expressions_by_hand(text, value):
  assert tree_of(text) == value


@pytest.mark.parametrize("text, tree", [
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
])  # fmt: skip
def test_trees_by_hand(text, tree):
  assert tree_of(text) == tree


@pytest.mark.parametrize("text, why", [
  ("", "ends too early"), ("1+", "ends too early"),
  (r"\frac123", "two numbers side by side"),
  ("1 2", "two numbers side by side"), ("1/0", "division by zero"),
  (r"\frac{1}{0}", "division by zero"), ("0^0", "zero to a power"),
  ("2*", "ends too early"), ("*2", "stray \\*"), ("$2", "stray \\$"),
  ("2!**3**4", "stray"), (r"\nonsense", r"unknown \\nonsense"),
  (r"\text{two}", "word two"), ("|1", "\\| is missing"),
  (r"\overline{3}", "unknown"), (r"\overline{x+1}", "unknown"),
  (r"\hat", "unknown"), (r"\hat{}", "unknown"), (r"\max 3", "is missing"),
  (r"\max(1, 2\}", "is missing"), (r"\max()", "stray"),
  (r"\gcd(x, 2)", "common divisor of something other than"),
  (r"\gcd(1/2, 2)", "common divisor of something other than"),
  (r"0.\overline{x}", "a bar over what are no digits"),
])  # fmt: skip
def test_what_is_no_expression(text, why):
  with pytest.raises(Unreadable, match=why):
    tree_of(text)


@few
@hypothesis.given(strategies.fractions(), strategies.integers(1, 10**6))
def test_a_fraction_can_be_multiplied_through(q, k):
  assert tree_of(rf"\frac{{{q.numerator * k}}}{{{q.denominator * k}}}") == q


@few
@hypothesis.given(strategies.decimals(-(10**9), 10**9, places=6))
def test_a_decimal_is_what_it_says(number):
  assert tree_of(f"{number:f}") == Fraction(number)


@pytest.mark.parametrize("text", [r"\sqrt" * 90 + "2", "|" * 399, "-" * 398])
def test_deep_text_ends(text):
  with pytest.raises(Unreadable):
    parse(text + "x(")


rationals = strategies.fractions(max_denominator=1000)


@few
@hypothesis.given(rationals, rationals)
def test_rational_operations_are_those_of_fractions(a, b):
  assert (combined("+", a, b), combined("*", a, b)) == (a + b, a * b)
  assert combined("-", a) == -a
  if b:
    assert combined("/", a, b) == a / b


@few
@hypothesis.given(strategies.fractions(min_value=0, max_denominator=50),
  strategies.integers(2, 9))  # fmt: skip
def test_roots_undo_powers(a, n):
  power = combined("^", a, Fraction(n)) if a else Fraction(0)
  assert combined("root", power, Fraction(n)) == a
  # Next to a power there is none.
  whole = Fraction(10**18) ** n + 1
  assert combined("root", whole, Fraction(n)) == ("root", whole, Fraction(n))


@pytest.mark.parametrize("name, values, value", [
  ("^", ["4", "-3/2"], Fraction(1, 8)), ("^", ["1/4", "1/2"], Fraction(1, 2)),
  ("^", ["-1", "1" + "0" * 30], 1), ("^", ["-1", "1" + "0" * 29 + "1"], -1),
  ("^", ["-8", "1/3"], ("^", Fraction(-8), Fraction(1, 3))),
  ("!", ["5"], 120), ("binom", ["5", "2"], 10), ("floor", ["-1/2"], -1),
  ("ceil", ["-1/2"], 0), ("max", ["1"], 1), ("abs", ["-1/2"], Fraction(1, 2)),
])  # fmt: skip
def test_values_by_hand(name, values, value):
  assert combined(name, *map(Fraction, values)) == value


def test_one_unit_of_the_last_digit():
  assert expressions.decimal_step("1.50") == Fraction(1, 100)
  assert expressions.decimal_step("1.5e3") == 100
  assert expressions.decimal_step("15") is None


@pytest.mark.parametrize("name, values, why", [
  ("^", ["0", "0"], "zero to a power"), ("^", ["0", "-1"], "zero to a power"),
  ("^", ["3", "1" + "0" * 9], "too large"),
  ("^", ["1/3", "-1" + "0" * 9], "too large"),
  ("!", ["2501"], "factorial"), ("!", ["1/2"], "factorial"),
  ("binom", ["9999", "2"], "binomial"), ("binom", ["5", "1/2"], "binomial"),
  ("root", ["5", "0"], "root of degree zero"),
])  # fmt: skip
def test_what_has_no_value_or_too_large_a_one(name, values, why):
  with pytest.raises(Unreadable, match=why):
    combined(name, *map(Fraction, values))


def test_what_is_no_number_is_not_divided_by_zero_either():
  with pytest.raises(Unreadable, match="division by zero"):
    combined("/", ("symbol", "x"), Fraction(0))


def test_products_of_large_numbers_end():
  large = combined("!", Fraction(2400))
  with pytest.raises(Unreadable, match="too large"):
    combined("*", large, large)
