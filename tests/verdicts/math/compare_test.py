import itertools

import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.verdicts.math import compare
from brorl_jax.verdicts.math.structure import parse

few = hypothesis.settings(max_examples=30)


def same(answer, gold, rule=lambda a, g: None):
  return compare.same(parse(answer), parse(gold), rule)


@pytest.mark.parametrize(
  "answer, gold, expected",
  [
    ("0.5", r"\frac12", True), ("0.5", "0.51", False),
    (r"\sqrt2", r"\sqrt2", True), (r"\sqrt2", "2", None),
    (r"\{\sqrt2, 1\}", r"\{1, 2\}", None),
    (r"\{\sqrt2, 1\}", r"\{1\}", None),  # the root might be 1
    ("1, x", "1, 2, 3", False), ("1, x, y", "1, 2, 3", None),
    ("(1, x)", "(2, x)", False), ("(1, x)", "(1, y)", None),
    ("x=1", "y=1", None), ("x=1, y=2", "1, 2", True),
    ("y=2, x=1", "1, 2", True), ("x=2, y=1", "1, 2", False),
    (r"\{1, 2\}", "x=1, y=2", False), ("1, 1, 2", "1, 2, 2", False),
    (r"\{1, 1, 2\}", r"\{1, 2\}", True), (r"1:00\text{ p.m.}", "1:00", True),
    ("6/2=3", "3", True), ("3", "6/2=3", True), ("x=6/2=3", "3", True),
    ("1+1=3-1=2", "2", True), ("1+1=3-1=3", "3", False),
    ("x=6/2=3", "y=3", False), ("3=4", "4", False), ("4=3", "4", False),
    ("3=3", "3", False),  # no calculation
    (r"3\leq 3.0", "3", False), ("y=3", "3", True), ("3=6/2=y+0", "3", None),
    (r"3=\sqrt9+x", "3", None), (r"3=\sqrt9+x", "(3,4)", False),
    (r"0.3333=0.33331", "0.3333", False),  # parts are equal exactly
    (r"1/3=2/6", "0.3333", True),
    (r"6/2\text{ m}=3\text{ cm}", r"3\text{ cm}", False),
    ("11=11_2", "11_2", False), ("0.333324=0.33332", "0.3333", False),
    (r"5\text{ cm}=10/2=5.0\text{ m}", "5", False),
    (r"6/2=3\text{ cm}", r"3\text{ m}", False), (r"5=5\text{ cm}", "5", False),
    (r"5\text{ cm}=5", "5", False), (r"x=5=5\text{ cm}", r"5\text{ cm}", False),
    (r"5", r"5=5\text{ cm}", False), (r"5.0=5\text{ cm}", "5", False),
    (r"\sqrt2=\sqrt2\text{ cm}", r"\sqrt2", False),
    (r"5\text{ cm}=10/2", "5", False),
    (r"10/2=5\text{ cm}", r"5\text{ cm}", True),
    (r"10/2\text{ cm}=5\text{ cm}", "5", True),
    (r"\{x=1, y=2\}", "(1, 2)", False), ("f(x)=1, y=2", "(1, 2)", False),
    (r"x\neq 1, x\neq 1", r"x\neq 1", True),
    (r"x\neq 1\text{ or }x\neq 2", r"\mathbb{R}\setminus\{1,2\}", False),
    (r"\mathbb{R}\setminus\{1\}\cup\{2\}", r"x\neq 1, x\neq 2", False),
    ("1=2", "1=2=3", False), ("x=1, y=2", "(1, 2)", True),
    ("(1, 2)", "x=1, y=2", True), ("A=1, B=2", "(1, 2)", True),
    ("x=2, y=1", "(1, 2)", False), ("y=2, x=1", "(1, 2)", False),
    ("y=1, x=2", "(1, 2)", False), ("x=1, x=2", "(1, 2)", False),
    ("x=1, 2", "(1, 2)", False), ("A=1, b=2", "(1, 2)", False),
    (r"\theta=1, x=2", "(1, 2)", False), ("x_2=1, x_3=2", "(1, 2)", False),
    (r"x=1\text{ or }y=2", "(1, 2)", False), ("x=1, y=2", "[1, 2)", False),
    ("(y, x)=(2, 1)", "x=1, y=2", True), ("x=1, y=2", "(y, x)=(2, 1)", True),
    ("x=2, y=1", "(y, x)=(2, 1)", None),  # as equations, y = 2 is not x = 2
    ("1, 2", "(x, y)=(1, 2)", False),
    (r"x\neq 2, x\neq 1", r"\mathbb{R}\setminus\{1, 2\}", True),
    (r"x\neq 1", r"\{1\}", False), (r"x\neq 1", "1", False),
    (r"x\neq 1", r"(-\infty,1)\cup(2,\infty)", False),
    (r"x\neq 1", r"x\neq\sqrt2", None), ("11_2", "11_2", True),
    ("011_2", "11_2", True), ("11", "11_2", True), ("11_2", "11", False),
    ("11_2", "11_3", False), ("3", "11_2", False), ("11_{10}", "11_2", False),
    ("11_{10}", "11", True), ("11", "11_{10}", True),
    ("10_{16}", "0A_{16}", None), ("3", r"x\equiv 3\pmod 7", True),
    (r"x\equiv 3\pmod 7", "3", True),
    (r"x\equiv 3\pmod 8", r"x\equiv 3\pmod 7", False),
    (r"1:00\text{ p.m.}", r"1:00\text{ a.m.}", False),
    # A modulus at the end is that of the whole list.
    (r"3\pmod 5, 4\pmod 7", r"3,4\pmod 7", False),
    (r"3\pmod 7, 4", r"3,4\pmod 7", False),
    (r"3,4\pmod 7", r"3\pmod 7, 4", False), (r"3\pmod 7, 4", "3,4", False),
    ("3,4", r"3\pmod 5, 4\pmod 7", False),
    (r"\{3\pmod 5, 4\pmod 7\}", r"\{3,4\pmod 7\}", False),
    (r"(3\pmod 5, 4\pmod 7)", r"(3,4\pmod 7)", False),
    (r"x\equiv 3\pmod 5, x\equiv 4\pmod 7", r"x\equiv 3, 4\pmod 7", False),
    (r"x\equiv 3\pmod 5, y\equiv 4\pmod 7", r"3,4\pmod 7", False),
    (r"4\pmod 7, 3\pmod 5", r"3\pmod 5, 4\pmod 7", False),
    (r"3\pmod 5, 4\pmod 7", r"3\pmod 5, 4\pmod 7", True),
    (r"4,3\pmod 7", r"3,4\pmod 7", True),
    (r"3\pmod 7, 4\pmod 7", r"3,4\pmod 7", True),
    (r"3,4\pmod 8", r"3,4\pmod 7", False), ("3,4", r"3,4\pmod 7", True),
  ],
)  # fmt: skip
def test_three_answers_by_hand(answer, gold, expected):
  assert same(answer, gold) is expected


@pytest.mark.parametrize(
  "gold, right, wrong",
  [
    ("3.142", ["3.1415", "3.1425", "3.14159"], ["3.1414", "3.1426", "3.14"]),
    ("0.3333", ["1/3", "0.33333"], ["0.333", "0.3334"]),
    ("1.234e5", ["123449", "123450"], ["123451", "123349"]),
    ("2.50", ["2.5"], ["2.504", "2.496"]),  # three digits: exact
    ("1000", ["1000.0"], ["1000.4"]),  # no point: exact
  ],
)
def test_a_gold_with_four_digits_and_a_point_is_rounded(gold, right, wrong):
  assert [same(answer, gold) for answer in right] == [True] * len(right)
  assert [same(answer, gold) for answer in wrong] == [False] * len(wrong)


@few
@hypothesis.given(strategies.lists(strategies.integers(-9, 9), min_size=2))
def test_lists_and_sets_have_no_order_and_tuples_do(numbers):
  turned = [*numbers[1:], numbers[0]]
  a, b = (",".join(map(str, n)) for n in (numbers, turned))
  assert same(a, b) is True
  assert same(rf"\{{{a}\}}", rf"\{{{b}\}}") is True
  assert same(f"({a})", f"({b})") is (numbers == turned)
  assert same(a + ",77", b) is False


@few
@hypothesis.given(strategies.permutations([1, 2, 3]))
def test_coordinates_have_the_order_of_their_names(numbers):
  named = [f"{name}={n}" for name, n in zip("xyz", numbers, strict=True)]
  right = same(", ".join(named), "(1, 2, 3)")
  assert right is (list(numbers) == [1, 2, 3])


@few
@hypothesis.given(strategies.integers(0, 10**6), strategies.integers(2, 9))
def test_digits_of_a_base_are_no_other_number(n, base):
  digits, rest = "", n
  while rest or not digits:
    digits, rest = str(rest % base) + digits, rest // base
  gold = f"{digits}_{base}"
  assert same(gold, gold) is same(digits, gold) is True
  assert same(f"{digits}_{base + 1}", gold) is False
  assert same(str(n), gold) is (str(n) == digits)
  assert same(gold, str(n)) is True
  assert same(gold, digits) is (str(n) == digits)


@few
@hypothesis.given(
  strategies.sets(strategies.integers(-9, 9), min_size=1, max_size=4),
  strategies.sets(strategies.integers(-9, 9), min_size=1, max_size=4),
)
def test_all_numbers_but_some_are_the_intervals_between_these(some, others):
  ends = [r"-\infty", *map(str, sorted(some)), r"\infty"]
  pairs = itertools.pairwise(ends)
  union = r"\cup".join(f"({a},{b})" for a, b in pairs)
  without = ",".join(map(str, others))
  expected = some == others
  assert same(rf"\mathbb{{R}}\setminus\{{{without}\}}", union) is expected
  unequal = ", ".join(rf"x\neq {n}" for n in others)
  assert same(unequal, union) is expected


@few
@hypothesis.given(strategies.fractions(), strategies.fractions())
def test_rationals_are_decided_both_ways_alike(a, b):
  assert same(str(a), str(b)) is same(str(b), str(a)) is (a == b)
  assert same(f"{a.numerator + 1}", f"{a.numerator}") is False
