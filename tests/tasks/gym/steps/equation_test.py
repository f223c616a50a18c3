"""Equations by hand: what they come to, and two in one."""

import pytest

from brorl_jax.tasks.gym.steps import equation


@pytest.mark.parametrize(
  "first, second, both",
  [
    ("57+80=137", "137+7=144", "57+80+7=144"),
    ("57+80=137", "137-7=130", "57+80-7=130"),
    ("15-40=-25", "-25-3=-28", "15-40-3=-28"),
    ("36*2=72", "84-72=12", "84-36*2=12"),
    ("60/20=3", "3*100=300", "60/20*100=300"),
    ("84/2=42", "42/2=21", "84/2/2=21"),
    ("14*2=28", "30+28=58", "30+14*2=58"),
    # These would need brackets.
    ("10+5=15", "28-15=13", None),
    ("10-5=5", "28-5=23", None),
    ("10-5=5", "28+5=33", None),
    ("10+5=15", "15*3=45", None),
    ("10+5=15", "15/3=5", None),
    ("4*3=12", "60/12=5", None),
    ("4*3=12", "2*12=24", None),
    ("-5+20=15", "15+1=16", None),
    # The result is used twice, not at all, or is only a part of a number.
    ("36*2=72", "72-72=0", None),
    ("36*2=72", "84-12=72", None),
    ("36*2=72", "172-12=160", None),
    ("1=1=1", "1+2=3", None),
    ("f r e e 0+2=2", "2+1=3", None),
  ],
)
def test_two_equations_in_one(first, second, both):
  assert equation.merge(first, second) == both
  if both:
    sides = equation.sides(both)
    assert sides and equation.holds(sides)


@pytest.mark.parametrize(
  "text, value",
  [
    ("2+3*4-1", 13),
    ("-5+20", 15),
    ("7--29", 36),
    ("84%36", 12),
    ("84/2%5", 2),
    ("2*3*4", 24),
    ("7-3*2-1", 0),
    ("84/5", None),
    ("84/0", None),
    ("84%0", None),
  ],
)
def test_values_of_sides_by_hand(text, value):
  sides = equation.sides(f"{text}=1")
  assert sides and equation.value(sides[0]) == value
  assert equation.holds(sides) == (value == 1)


def test_the_longest_line_that_is_read():
  text = "1+" * 97 + "1=98"
  assert len(text) < equation.LONGEST_LINE
  sides = equation.sides(text)
  assert sides and equation.holds(sides)
  assert equation.sides("1+" * 99 + "1=100") is None
  assert equation.sides("9" * 12 + "=1") is not None
  assert equation.sides("9" * 13 + "=1") is None


def test_numbers_that_are_too_long_are_no_numbers():
  assert equation.numbers(["a-12*034", "5"]) == {12, 34, 5}
  assert equation.numbers(["9" * 13, "1" * 12]) == {111111111111}
