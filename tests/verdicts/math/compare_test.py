import itertools
import json
import pathlib

import hypothesis
import pytest
from hypothesis import strategies

from brorl_jax.verdicts.math import compare
from brorl_jax.verdicts.math.structure import parse

few = hypothesis.settings(max_examples=30)


def same(answer, gold, rule=lambda a, g: None):
  return compare.same(parse(answer), parse(gold), rule)


THREE = pathlib.Path(__file__).with_name("three_answers.jsonl")


@pytest.mark.parametrize("answer, gold, expected", [
  tuple(json.loads(line)) for line in THREE.read_text().splitlines()
])  # fmt: skip
def test_three_answers_by_hand(answer, gold, expected):
  assert same(answer, gold) is expected


@pytest.mark.parametrize("gold, right, wrong", [
  ("3.142", ["3.1415", "3.1425", "3.14159"], ["3.1414", "3.1426", "3.14"]),
  ("0.3333", ["1/3", "0.33333"], ["0.333", "0.3334"]),
  ("1.234e5", ["123449", "123450"], ["123451", "123349"]),
  ("2.50", ["2.5"], ["2.504", "2.496"]),  # three digits: exact
  ("1000", ["1000.0"], ["1000.4"]),  # no point: exact
])  # fmt: skip
def test_a_gold_with_four_digits_and_a_point_is_rounded(gold, right, wrong):
  assert [same(answer, gold) for answer in right] == [True] * len(right)
  assert [same(answer, gold) for answer in wrong] == [False] * len(wrong)


@few
@hypothesis.given(strategies.lists(strategies.integers(-9, 9), min_size=2))
def test_lists_and_sets_have_no_order_and_tuples_do(numbers):
  turned = [*numbers[1:], numbers[0]]
  a, b = (",".join(map(str, n)) for n in (numbers, turned))
  assert same(a, b) is True and same(rf"\{{{a}\}}", rf"\{{{b}\}}") is True
  assert same(f"({a})", f"({b})") is (numbers == turned)
  assert same(a + ",77", b) is False


@few
@hypothesis.given(strategies.permutations([1, 2, 3]))
def test_coordinates_have_the_order_of_their_names(numbers):
  named = [f"{name}={n}" for name, n in zip("xyz", numbers, strict=True)]
  assert same(", ".join(named), "(1, 2, 3)") is (list(numbers) == [1, 2, 3])


@few
@hypothesis.given(strategies.integers(0, 10**6), strategies.integers(2, 9))
def test_digits_of_a_base_are_no_other_number(n, base):
  digits, rest = "", n
  while rest or not digits:
    digits, rest = str(rest % base) + digits, rest // base
  gold = f"{digits}_{base}"
  assert same(gold, gold) is same(digits, gold) is True
  assert same(f"{digits}_{base + 1}", gold) is False
  assert same(str(n), gold) is (str(n) == digits) and same(gold, str(n)) is True
  assert same(gold, digits) is (str(n) == digits)


@few
@hypothesis.given(
  strategies.sets(strategies.integers(-9, 9), min_size=1, max_size=4),
  strategies.sets(strategies.integers(-9, 9), min_size=1, max_size=4),
)
def test_all_numbers_but_some_are_the_intervals_between_these(some, others):
  pairs = itertools.pairwise([r"-\infty", *map(str, sorted(some)), r"\infty"])
  union = r"\cup".join(f"({a},{b})" for a, b in pairs)
  without = ",".join(map(str, others))
  expected = some == others
  assert same(rf"\mathbb{{R}}\setminus\{{{without}\}}", union) is expected
  assert same(", ".join(rf"x\neq {n}" for n in others), union) is expected


@few
@hypothesis.given(strategies.fractions(), strategies.fractions())
def test_rationals_are_decided_both_ways_alike(a, b):
  assert same(str(a), str(b)) is same(str(b), str(a)) is (a == b)
  assert same(f"{a.numerator + 1}", f"{a.numerator}") is False
