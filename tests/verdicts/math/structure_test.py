from fractions import Fraction

import pytest

from brorl_jax.verdicts.math import structure
from brorl_jax.verdicts.math.expressions import Unreadable
from brorl_jax.verdicts.math.structure import Assign, Items, Leaf, Row, parse

ONE = Leaf("1", Fraction(1))
TWO = Leaf("2", Fraction(2))
INFINITY = Leaf(r"\infty", ("constant", "infinity"))
MINUS_INFINITY = Leaf(r"-\infty", ("-", ("constant", "infinity")))


@pytest.mark.parametrize("text, node", [
  ("1", ONE), ("(1)", ONE), ("{1}", ONE),
  ("1.0", Leaf("1.0", Fraction(1), "", Fraction(1, 10))),
  (r"1\text{ cm}", Leaf("1", Fraction(1), "cm")),
  (r"\$1", Leaf("1", Fraction(1), "dollar")),
  ("1_2", Leaf("1", Fraction(1), "(base 2)")),
  ("1.0_2", Leaf("1.0", Fraction(1), "(base 2)")),  # no rounded decimal
  (r"1\pmod 2", Leaf("1", Fraction(1), "(mod 2)")),
  (r"x\equiv 1\pmod 2", Assign("x", Leaf("1", Fraction(1), "(mod 2)"))),
  (r"x\equiv 1", Assign("x", ONE)),
  (r"1\equiv 2", structure.Relation((r"\equiv",), (ONE, TWO))),
  ("x=1=2", Assign("x", structure.Relation(("=",), (ONE, TWO)))),
  (r"x\neq 1", Assign("x", Items("except", (ONE,)))),
  (r"x\neq 1, x\neq 2", Assign("x", Items("except", (ONE, TWO)))),
  (r"\mathbb{R}\setminus\{1,2\}", Items("except", (ONE, TWO))),
  (r"\mathbb{R}-\{1\}", Items("except", (ONE,))),
  (r"x<1\text{ or }x>1", Assign("x", Items("except", (ONE,)))),
  (r"(2,\infty)\cup(-\infty,1)\cup(1,2)", Items("except", (ONE, TWO))),
  (r"1^\circ", Leaf("1", Fraction(1), "degree")),
  ("1, 2", Items("list", (ONE, TWO))), ("1,", ONE),
  ("1, and 2", Items("list", (ONE, TWO))),
  ("1 or 2", Items("list", (ONE, TWO), choice=True)),
  (r"\{1, 2\}", Items("set", (ONE, TWO))), (r"\{\}", Items("set", ())),
  (r"\{1\}\cup\{2\}", Items("set", (ONE, TWO))),
  ("(1, 2)", Row("(", (ONE, TWO), ")")),
  ("[1, 2)", Row("[", (ONE, TWO), ")")), ("1:2", Row(":", (ONE, TWO), ":")),
  ("x=1", Assign("x", ONE)), ("1=x", Assign("x", ONE)),
  ("f(x)=1", Assign("f(x)", ONE)),
  ("1<x<2", Assign("x", Row("(", (ONE, TWO), ")"))),
  (r"2\ge x>1", Assign("x", Row("(", (ONE, TWO), "]"))),
  (r"x\ge 1", Assign("x", Row("[", (ONE, INFINITY), ")"))),
  ("1<x", Assign("x", Row("(", (ONE, INFINITY), ")"))),
  (r"x\in[1,2]", Assign("x", Row("[", (ONE, TWO), "]"))),
  (r"\{x : 1<x<2\}", Assign("x", Row("(", (ONE, TWO), ")"))),
  ("x<1 or y<2", Items("list", (Assign("x", Row("(", (MINUS_INFINITY, ONE),
    ")")), Assign("y", Row("(", (MINUS_INFINITY, TWO), ")"))), choice=True)),
  ("1=2", structure.Relation(("=",), (ONE, TWO))),
  ("Friday", structure.Words("friday")), (r"\text{(B)}", structure.Words("B")),
  (r"\text{no more}", structure.Words("no more")),
  (r"\begin{pmatrix}1&2\\2&1\\\end{pmatrix}", Row("matrix", (Row("&", (ONE,
    TWO), "&"), Row("&", (TWO, ONE), "&")), "matrix")),
])  # fmt: skip
def test_structures_by_hand(text, node):
  assert parse(text) == node


@pytest.mark.parametrize("text", [
  r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(1,2)", r"(1,2)\cup(2,\infty)",
  r"(-\infty,1]\cup(1,\infty)",
  r"(-\infty,2)\cup(2,1)\cup(1,\infty)",  # 2 to 1 is none
  r"(-\infty,1)\cup(1,\infty)\cup(5,6)", r"(\mathbb{R}\setminus\{1\})\cup(1,2)",
  # No order is known of what is not rational.
  r"(-\infty,\sqrt3)\cup(\sqrt3,\sqrt2)\cup(\sqrt2,\infty)",
  r"(-\infty,2)\cup(2,\sqrt2)\cup(\sqrt2,\infty)",
  r"(-\infty,\infty)\cup(\infty,\infty)",
])  # fmt: skip
def test_unions_that_are_not_all_numbers_but_some(text):
  node = parse(text)
  assert isinstance(node, Items) and node.kind == "union"


def test_plus_minus_is_a_list_of_two():
  node = parse(r"2 \pm 1")
  assert isinstance(node, Items)
  assert [leaf.tree for leaf in node.items if isinstance(leaf, Leaf)] == [3, 1]


@pytest.mark.parametrize(
  "text", ["1,,2", "or 1", "1 or", "x=", r"1\neq", "(,)", "(1)(", r"1\cup"]
)
def test_an_empty_part_is_unreadable(text):
  with pytest.raises(Unreadable):
    parse(text)


def test_a_leaf_that_cannot_be_read_says_why():
  leaf = parse(r"\foo{x}")
  assert isinstance(leaf, Leaf)
  assert (leaf.tree, leaf.fault) == (None, r"unknown \foo")
