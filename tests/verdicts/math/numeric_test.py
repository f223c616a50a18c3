from fractions import Fraction

import pytest

from brorl_jax.verdicts.math import numeric, reader
from brorl_jax.verdicts.math.tokens import plain, tokens


def tree(text):
  return reader.read(tokens(plain(text)))


def agree(a, b, point=None):
  return numeric.agree(tree(a), tree(b), point or {}, 4 * len(a + b))


@pytest.mark.parametrize(
  "a, b",
  [
    (r"\sqrt2\sqrt3", r"\sqrt6"),
    (r"\sqrt2\sqrt3-\sqrt6", "0"),
    (r"e^{i\pi}", "-1"),
    (r"\cos 60^\circ", r"\sin\frac\pi6"),
    (r"\cosh 1", r"\frac{e+e^{-1}}{2}"),
    (r"\lfloor\sqrt2\sqrt2\rfloor", "2"),
    (r"10^{2000}+\pi-10^{2000}", r"\pi"),
    (r"\arcsin 1", r"\frac\pi2"),
    (r"\sec 1\cos 1", "1"),
  ],
)
def test_equal_constants(a, b):
  assert agree(a, b)


@pytest.mark.parametrize(
  "a, b",
  [
    (r"\pi+10^{-2000}", r"\pi"),
    (r"10^{2000}\pi+1", r"10^{2000}\pi"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"10^{-900}\pi", r"2\cdot10^{-900}\pi"),
    (r"\frac{\pi}{900!}", r"\frac{\pi}{899!}"),
    (r"\sqrt{10^{80}+1}", "10^{40}"),
  ],
)
def test_constants_that_differ_far_behind_the_point(a, b):
  assert not agree(a, b)


@pytest.mark.parametrize(
  "text",
  [
    r"\infty", r"\exp(\exp(\exp(\exp(9))))", r"\sin(\pi\cdot10^{2000})",
    r"\ln(1-1+\pi-\pi)", r"\frac{1}{\sin(0)}", r"(10^9\pi)!",
    r"\binom{10^9\pi}{2}", r"\pi^{10^{2000}}",
  ],
)  # fmt: skip
def test_what_has_no_value_that_can_be_computed_soon(text):
  with pytest.raises(numeric.Undefined):
    agree(text, "1")


def test_values_at_a_point():
  point = {"x": Fraction(-2)}
  assert agree("x^2", "4", point)
  assert not agree(r"\sqrt{x^2}", "x", point)
  assert agree(r"\sqrt{x}", r"i\sqrt2", point)


@pytest.mark.parametrize(
  "text",
  [
    r"\sqrt[97]{2499!}\sqrt[89]{2498!}",
    r"\pi^{2400}e^{2400}\pi^{2400}e^{2400}",
    "(999x)!",
    r"\binom{x}{999}",
    r"\sin(\pi^{99})\cos(e^{99})",
  ],
)
def test_the_most_that_a_text_can_cost_ends(text):
  point = {"x": Fraction(9, 4)}
  try:
    assert agree(text, text, point)
  except numeric.Undefined:
    pass
