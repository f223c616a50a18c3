import pytest

from brorl_jax.verdicts.math import units


@pytest.mark.parametrize(
  "words, canon",
  [
    ("cm", "cm"), ("centimeters", "cm"), ("Meters", "m"),
    ("square feet", "ft^2"), ("sq ft", "ft^2"), ("ft ^ { 2 }", "ft^2"),
    ("cubic inches", "in^3"), ("m / s ^ 2", "m/s^2"),
    ("meters per second", "m/s"), ("p . m .", "p.m."), ("PM", "p.m."),
    ("apples", "apple"), ("or", None), ("million", None), ("not sure", None),
    ("five", None), ("is wrong", None), ("", None), ("( cm )", None),
    ("a very long phrase of many words", None),
  ],
)  # fmt: skip
def test_units_by_hand(words, canon):
  assert units.canon(words) == canon


def test_known_units_and_products_of_letters():
  assert units.is_known("cm") and units.is_known("MPH")
  assert not units.is_known("xy")
