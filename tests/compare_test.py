import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.tasks.math import compare
from brorl_jax.tasks.math.structure import parse


def same(answer, gold, rule=lambda a, g: None):
  return compare.same(parse(answer), parse(gold), rule)


@pytest.mark.parametrize(
  "answer, gold, expected",
  [
    ("0.5", r"\frac12", True),
    ("0.5", "0.51", False),
    (r"\sqrt2", r"\sqrt2", True),
    (r"\sqrt2", "2", None),
    (r"\{\sqrt2, 1\}", r"\{1, 2\}", None),
    (r"\{\sqrt2, 1\}", r"\{1\}", None),  # the root might be 1
    ("1, x", "1, 2, 3", False),
    ("1, x, y", "1, 2, 3", None),
    ("(1, x)", "(2, x)", False),
    ("(1, x)", "(1, y)", None),
    ("x=1", "y=1", None),
    ("x=1, y=2", "1, 2", True),
    ("y=2, x=1", "1, 2", True),
    ("x=2, y=1", "1, 2", False),
    (r"\{1, 2\}", "x=1, y=2", False),
    ("1, 1, 2", "1, 2, 2", False),
    (r"\{1, 1, 2\}", r"\{1, 2\}", True),
    (r"1:00\text{ p.m.}", "1:00", True),
    (r"1:00\text{ p.m.}", r"1:00\text{ a.m.}", False),
  ],
)
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
def test_a_gold_with_four_digits_and_a_point_is_a_rounded_one(
  gold, right, wrong
):
  assert [same(answer, gold) for answer in right] == [True] * len(right)
  assert [same(answer, gold) for answer in wrong] == [False] * len(wrong)


@hypothesis.given(strategies.lists(strategies.integers(-9, 9), min_size=2))
def test_lists_and_sets_have_no_order_and_tuples_do(numbers):
  turned = [*numbers[1:], numbers[0]]
  a, b = (",".join(map(str, n)) for n in (numbers, turned))
  assert same(a, b) is True
  assert same(rf"\{{{a}\}}", rf"\{{{b}\}}") is True
  assert same(f"({a})", f"({b})") is (numbers == turned)
  assert same(a + ",77", b) is False


@hypothesis.given(strategies.fractions(), strategies.fractions())
def test_rationals_are_decided_both_ways_alike(a, b):
  assert same(str(a), str(b)) is same(str(b), str(a)) is (a == b)
  assert same(f"{a.numerator + 1}", f"{a.numerator}") is False
