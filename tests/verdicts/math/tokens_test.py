import pytest

from brorl_jax.verdicts.math.nodes import Unreadable
from brorl_jax.verdicts.math.tokens import (
  canonical_unit,
  is_unit,
  plain,
  tokens,
)


def texts(text):
  return [token.text for token in tokens(plain(text))]


@pytest.mark.parametrize(
  "text, expected",
  [
    (r"\left( 1,\,\tfrac12 \right)", ["(", "1", ",", r"\frac", "12", ")"]),
    (r"$x_{12} + y_1'$", ["x_12", "+", "y_1'"]),
    ("½ ÷ π", [r"\frac", "{", "1", "}", "{", "2", "}", "/", r"\pi"]),
    ("1,234", ["1", ",", "234"]), (r"1{,}234", ["1234"]),
    (r"1\,234\,567", ["1234567"]), ("12 34", ["12", "34"]),
    ("2.5e-3", ["2.5e-3"]), ("2ex", ["2", "e", "x"]), ("5 cm", ["5", "cm"]),
    ("5xy", ["5", "x", "y"]), ("sqrt(2)", [r"\sqrt", "(", "2", ")"]),
    (r"\log_2 8", [r"\log", "_", "2", "8"]), (r"\displaystyle.5", [".5"]),
    (r"1 \\ 2", ["1", r"\\", "2"]),
    (r"\le\leq\leqslant≤", [r"\leq"] * 4),
    (r"\begin{pmatrix}1\end{pmatrix}", [r"\beginpmatrix", "1", r"\endpmatrix"]),
  ],
)  # fmt: skip
def test_one_spelling(text, expected):
  assert texts(text) == expected


def test_words_are_told_from_letters():
  kinds = [t.kind for t in tokens(r"\text{m} m \mathrm{e} \mathrm{cm} or")]
  assert kinds == ["word", "symbol", "symbol", "word", "word"]


@pytest.mark.parametrize(
  "text", ["_1", "x_", "x_{}", "'", "_{2}1", "x_{1", r"\sin_2 x"]
)
def test_a_mark_without_its_letter_is_unreadable(text):
  with pytest.raises(Unreadable):
    tokens(text)


@pytest.mark.parametrize(
  "text, expected",
  [
    ("2516_8", ["2516", "(base 8)"]), ("(1011)_{2}", ["1011", "(base 2)"]),
    (r"0.12_{\text{three}}", ["0.12", "(base 3)"]),
    ("012_{sixteen}", ["012", "(base 16)"]), ("0A3_{16}", ["A3", "(base 16)"]),
    ("12_{10}", ["12", "(base 10)"]),
    ("2A_1", ["2", "A_1"]),  # a product
    ("x_12", ["x_12"]), ("3 \\pmod 7", ["3", "(mod 7)"]),
    ("3 \\pmod{ 12 }", ["3", "(mod 12)"]), (r"3 (\bmod 7)", ["3", "(mod 7)"]),
    (r"3 (\text{mod }7)", ["3", "(mod 7)"]), ("3 (mod 7)", ["3", "(mod 7)"]),
  ],
)  # fmt: skip
def test_bases_and_moduli_are_words_of_their_own(text, expected):
  assert texts(text) == expected


@pytest.mark.parametrize(
  "text",
  ["1_1", "0_1", "8_8", "12_{37}", "5_{many}", "1.3_3", "1D_{13}", "1_0"],
)
def test_digits_that_the_base_does_not_have(text):
  with pytest.raises(Unreadable, match="is no number of base"):
    tokens(text)


def test_the_marks_of_a_formula_and_full_stops_are_taken_off():
  assert plain(r"\( 4. \)") == "4"
  assert plain("$4$.") == "4"
  assert plain("$4$ and $5$") == "$4$ and $5$"


@pytest.mark.parametrize(
  "words, canon",
  [
    ("cm", "cm"), ("centimeters", "cm"), ("Meters", "m"),
    ("square feet", "ft^2"), ("sq ft", "ft^2"), ("ft ^ { 2 }", "ft^2"),
    ("cubic inches", "in^3"), ("m / s ^ 2", "m/s^2"),
    ("meters per second", "m/s"), ("p . m .", "p.m."), ("PM", "p.m."),
    ("apples", "apple"), ("or", None), ("million", None), ("not sure", None),
    ("five", None), ("is wrong", None), ("", None), ("( cm )", None),
    ("a very long phrase of many words", None),
  ],
)  # fmt: skip
def test_units_by_hand(words, canon):
  assert canonical_unit(words) == canon


def test_known_units_and_products_of_letters():
  assert is_unit("cm") and is_unit("MPH")
  assert not is_unit("xy")
