import time

import pytest

from brorl_jax.tasks.math.symbolic import symbolic


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


def test_what_would_take_long_to_work_out_is_compared_as_it_stands():
  gold = r"\max(x,y)(x+y+z+a+b+c)"
  start = time.monotonic()
  assert not symbolic(gold + "^{40}", gold)
  assert time.monotonic() - start < 2.5
  assert symbolic(gold + "^{40}", gold + "^{40}")
  assert symbolic(r"\max(a,b)(x+1)^2", r"\max(b,a)(x^2+2x+1)")
