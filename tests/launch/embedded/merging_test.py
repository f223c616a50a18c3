"""Two equations in one, by hand."""

import pytest

from launch.embedded.steps.merging import merge


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
  ],
)
def test_two_equations_in_one(first, second, both):
  assert merge(first, second) == both
