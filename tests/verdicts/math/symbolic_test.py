from fractions import Fraction

import pytest

from brorl_jax.verdicts.math import symbolic as symbolic_module
from brorl_jax.verdicts.math.expressions import plain, read, tokens
from brorl_jax.verdicts.math.symbolic import Undefined, symbolic


@pytest.mark.parametrize("answer, gold", [
  (r"\frac{x^2-1}{x-1}", "x+1"), (r"e^{i\pi}", "-1"),
  (r"\sin 2x", r"2\sin x\cos x"), ("y=2x+1", "2y-4x=2"),
  (r"\{\sqrt8, 1\}", r"\{1, 2\sqrt2\}"),
  (r"\begin{pmatrix}\sqrt8\end{pmatrix}",
    r"\begin{pmatrix}2\sqrt2\end{pmatrix}"),
  (r"\pi", "3.14159"), (r"\max(a,b)", r"\max(b,a)"),
  (r"\max(a,b)+\min(a,b)", "a+b"), (r"\max(x,-x)", "|x|"),
  (r"\max(\sqrt2,1.4)", r"\sqrt2"),
  (r"2\hat{i}+\hat{j}", r"\hat{j}+2\hat{i}"), (r"\sqrt8=2\sqrt2", r"2\sqrt2"),
  (r"x\neq\sqrt8", r"(-\infty,2\sqrt2)\cup(2\sqrt2,\infty)"),
  ("|x-2|", "|2-x|"),
])  # fmt: skip
def test_equal(answer, gold):
  assert symbolic(answer, gold) is True and symbolic(gold, gold) is True


@pytest.mark.parametrize("answer, gold", [
  ("3.14159265358979", r"\pi"), (r"\pi", "3.14160"), (r"\sqrt{x^2}", "x"),
  ("|x-1000|", "1000-x"),
  # At four points each of these has one order.
  ("|a-q|", "a-q"), ("|c-b|", "c-b"), ("|a-t|=5", "a-t=5"), ("a", r"\max(a,b)"),
  (r"\max(a,i)", r"\max(i,a)"),  # there is no order of complex numbers
  (r"\hat{i}", "i"), (r"\pi=\sqrt2\sqrt5", r"\sqrt{10}"),
  (r"\sqrt2=\sqrt3", r"\sqrt3"), (r"\sqrt{10}=\pi", r"\sqrt{10}"), ("X", "x"),
  ("x'", "x"), (r"\max(2 3)", "5"), (r"\max(a,A)", r"\max(a,a)"),
  ("0=0", "y=x"), ("(y-x)(x-1)=0", "y=x"), ("1/x", r"\infty"),
  (r"\foo", r"\bar"), (r"\text{a}", "a+0"), ("1,,2", "1"), ("(" * 3, "1"),
])  # fmt: skip
def test_not_equal(answer, gold):
  assert symbolic(answer, gold) is False


def test_what_would_take_long_to_work_out_is_not_worked_out():
  gold = r"\max(x,y)(x+y+z+a+b+c)"
  assert not symbolic(gold + "^{40}", gold)
  assert symbolic(r"\max(a,b)(x+1)^2", r"\max(b,a)(x^2+2x+1)")


def tree(text):
  return read(tokens(plain(text)))


def agree(a, b, point=None):
  return symbolic_module.agree(tree(a), tree(b), point or {}, 4 * len(a + b))


@pytest.mark.parametrize("a, b", [
  (r"\sqrt2\sqrt3", r"\sqrt6"), (r"\sqrt2\sqrt3-\sqrt6", "0"),
  (r"e^{i\pi}", "-1"), (r"\cos 60^\circ", r"\sin\frac\pi6"),
  (r"\cosh 1", r"\frac{e+e^{-1}}{2}"), (r"\lfloor\sqrt2\sqrt2\rfloor", "2"),
  (r"10^{2000}+\pi-10^{2000}", r"\pi"), (r"\arcsin 1", r"\frac\pi2"),
  (r"\sec 1\cos 1", "1"),
])  # fmt: skip
def test_equal_constants(a, b):
  assert agree(a, b)


@pytest.mark.parametrize("a, b", [
  (r"\pi+10^{-2000}", r"\pi"), (r"10^{2000}\pi+1", r"10^{2000}\pi"),
  (r"e^{\pi\sqrt{163}}", "262537412640768744"),
  (r"10^{-900}\pi", r"2\cdot10^{-900}\pi"),
  (r"\frac{\pi}{900!}", r"\frac{\pi}{899!}"), (r"\sqrt{10^{80}+1}", "10^{40}"),
])  # fmt: skip
def test_constants_that_differ_far_behind_the_point(a, b):
  assert not agree(a, b)


@pytest.mark.parametrize("text", [
  r"\infty", r"\exp(\exp(\exp(\exp(9))))", r"\sin(\pi\cdot10^{2000})",
  r"\ln(1-1+\pi-\pi)", r"\frac{1}{\sin(0)}", r"(10^9\pi)!",
  r"\binom{10^9\pi}{2}", r"\pi^{10^{2000}}",
])  # fmt: skip
def test_what_has_no_value_that_can_be_computed_soon(text):
  with pytest.raises(Undefined):
    agree(text, "1")


def test_values_at_a_point():
  point = {"x": Fraction(-2)}
  assert agree("x^2", "4", point) and not agree(r"\sqrt{x^2}", "x", point)
  assert agree(r"\sqrt{x}", r"i\sqrt2", point)


@pytest.mark.parametrize("text", [
  r"\sqrt[97]{2499!}\sqrt[89]{2498!}", r"\pi^{2400}e^{2400}\pi^{2400}e^{2400}",
  "(999x)!", r"\binom{x}{999}", r"\sin(\pi^{99})\cos(e^{99})",
])  # fmt: skip
def test_the_most_that_a_text_can_cost_ends(text):
  point = {"x": Fraction(9, 4)}
  try:
    assert agree(text, text, point)
  except Undefined:
    pass
