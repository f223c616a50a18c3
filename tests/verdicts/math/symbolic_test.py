import pytest

from brorl_jax.verdicts.math.symbolic import symbolic


@pytest.mark.parametrize(
  "answer, gold",
  [
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"e^{i\pi}", "-1"),
    (r"\sin 2x", r"2\sin x\cos x"),
    ("y=2x+1", "2y-4x=2"),
    (r"\{\sqrt8, 1\}", r"\{1, 2\sqrt2\}"),
    (
      r"\begin{pmatrix}\sqrt8\end{pmatrix}",
      r"\begin{pmatrix}2\sqrt2\end{pmatrix}",
    ),
    (r"\pi", "3.14159"),
    (r"\max(a,b)", r"\max(b,a)"),
    (r"\max(a,b)+\min(a,b)", "a+b"),
    (r"\max(x,-x)", "|x|"),
    (r"\max(\sqrt2,1.4)", r"\sqrt2"),
    (r"2\hat{i}+\hat{j}", r"\hat{j}+2\hat{i}"),
    (r"\sqrt8=2\sqrt2", r"2\sqrt2"),
    (r"x\neq\sqrt8", r"(-\infty,2\sqrt2)\cup(2\sqrt2,\infty)"),
    ("|x-2|", "|2-x|"),
  ],
)  # fmt: skip
def test_equal(answer, gold):
  assert symbolic(answer, gold) is True
  assert symbolic(gold, gold) is True


@pytest.mark.parametrize(
  "answer, gold",
  [
    ("3.14159265358979", r"\pi"),
    (r"\pi", "3.14160"),
    (r"\sqrt{x^2}", "x"),
    ("|x-1000|", "1000-x"),
    # At four points each of these has one order.
    ("|a-q|", "a-q"),
    ("|c-b|", "c-b"),
    ("|a-t|=5", "a-t=5"),
    ("a", r"\max(a,b)"),
    (r"\max(a,i)", r"\max(i,a)"),  # there is no order of complex numbers
    (r"\hat{i}", "i"),
    (r"\pi=\sqrt2\sqrt5", r"\sqrt{10}"),
    (r"\sqrt2=\sqrt3", r"\sqrt3"),
    (r"\sqrt{10}=\pi", r"\sqrt{10}"),
    ("X", "x"),
    ("x'", "x"),
    (r"\max(2 3)", "5"),
    (r"\max(a,A)", r"\max(a,a)"),
    ("0=0", "y=x"),
    ("(y-x)(x-1)=0", "y=x"),
    ("1/x", r"\infty"),
    (r"\foo", r"\bar"),
    (r"\text{a}", "a+0"),
    ("1,,2", "1"),
    ("(" * 3, "1"),
  ],
)
def test_not_equal(answer, gold):
  assert symbolic(answer, gold) is False


def test_what_would_take_long_to_work_out_is_not_worked_out():
  gold = r"\max(x,y)(x+y+z+a+b+c)"
  assert not symbolic(gold + "^{40}", gold)
  assert symbolic(gold + "^{40}", gold + "^{40}")
  assert symbolic(r"\max(a,b)(x+1)^2", r"\max(b,a)(x^2+2x+1)")
