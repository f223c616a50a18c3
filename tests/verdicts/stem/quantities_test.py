# ruff: noqa: RUF001
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.verdicts.stem.quantities import MAX_EXPONENT, read, same

few = settings(max_examples=30)


@pytest.mark.parametrize(
  "text, value, step, unit",
  [
    ("5", "5", "0", {}), ("-5", "-5", "0", {}), ("+1,234", "1234", "0", {}),
    ("1,234.50", "1234.5", "0.01", {}), (".5", "0.5", "0.1", {}),
    ("2.0", "2", "0.1", {}), ("3/4", "0.75", "0", {}),
    (r"-\frac{3}{4}", "-0.75", "0", {}),
    (r"3.0 \times 10^{8}", "300000000", "10000000", {}),
    ("3×10⁸", "300000000", "100000000", {}),
    ("1.6e-2", "0.016", "0.001", {}), (r"10^{-3}", "0.001", "0", {}),
    ("5 m/s", "5", "0", {"m": 1, "s": -1}),
    ("5 m s^-1", "5", "0", {"m": 1, "s": -1}),
    ("5 meters per second", "5", "0", {"m": 1, "s": -1}),
    (r"9.8\,\mathrm{m/s^2}", "9.8", "0.1", {"m": 1, "s": -2}),
    ("9.8 m/s²", "9.8", "0.1", {"m": 1, "s": -2}),
    ("8.314 J/(mol K)", "8.314", "0.001", {"J": 1, "mol": -1, "K": -1}),
    ("8.314 J/mol·K", "8.314", "0.001", {"J": 1, "mol": -1, "K": -1}),
    ("25 °C", "25", "0", {"°C": 1}),
    ("25 degrees Celsius", "25", "0", {"°C": 1}),
    (r"30^\circ", "30", "0", {"°": 1}),
    (r"50\%", "50", "0", {"%": 1}), ("2 kilojoules", "2", "0", {"kJ": 1}),
    ("2 kJ", "2", "0", {"kJ": 1}),
    ("4 µm", "4", "0", {"μm": 1}),
    ("4 Ohms", "4", "0", {"Ω": 1}),
    ("v = 5 m", "5", "0", {"m": 1}), ("pH 7.4", "7.4", "0.1", {}),
    ("pH of about 7.4", "7.4", "0.1", {}), ("pH = 7.4", "7.4", "0.1", {}),
    ("≈ 5.3 kg", "5.3", "0.1", {"kg": 1}),
    ("about 7 min", "7", "0", {"min": 1}), ("6 m/m", "6", "0", {}),
    ("5 million", "5", "0", {"million": 1}),
  ],
)  # fmt: skip
def test_quantities_by_hand(text, value, step, unit):
  quantity = read(text)
  assert quantity is not None
  assert (quantity.value, quantity.step) == (Fraction(value), Fraction(step))
  assert quantity.unit == unit
  assert quantity.known == ("million" not in unit)


@pytest.mark.parametrize(
  "text",
  [
    "", "m", "five", "5 5", "5 or 6", "5, 6", "1,2345", "5!", "5±0.1", "1/0",
    "2(3)", "x^2", "5-6", "1:2", "2-butanol", "9" * 61, f"1e{MAX_EXPONENT + 1}",
    f"10^{MAX_EXPONENT + 1}", "1e99999", "5 m/s or 6 m/s", "..", "-", "e5",
    "pH", "H 7", "pOH 7", "PH 7", "pH is", "pH or 7",
  ],
)  # fmt: skip
def test_what_is_no_quantity(text):
  assert read(text) is None
  assert not same(text, "5")
  assert not same("5", text)


@pytest.mark.parametrize(
  "gold, right, wrong",
  [
    ("5", ["5", "5.0", "10/2", "5 m", "x = 5"], ["5.001", "-5", "5 apples"]),
    ("9.8", ["9.8", "9.81", "9.75", "9.85"], ["9.74", "9.9", "10", "9"]),
    ("0.5", ["0.5", "0.503", "1/2"], ["0.46", "0.54", "0.506"]),  # 1 % at most
    ("1.23456", ["1.234", "1.2352"], ["1.23", "1.237"]),  # 0.1 % at least
    ("6.02e23", ["6.022 × 10^23", r"6.02\times10^{23}"], ["6.1e23", "6.02e22"]),
    ("0.0", ["0", "0.00"], ["0.01", "1e-9"]),
    ("-1.6e-19 C", ["-1.602e-19 C", "-1.6e-19"], ["1.6e-19 C", "-1.6e-19 V"]),
    ("5 km", ["5", "5 km", "5 kilometers"], ["5000 m", "5 m", "5 apples"]),
    ("4 MeV", ["4 MeV", "4"], ["4 meV", "4 eV", "4 keV"]),
    ("3 mW", ["3 mW", "3 milliwatts"], ["3 MW"]),
    ("50%", ["50 %", "50 percent", "50"], ["0.5", "5%"]),
    ("5 million", ["5 million"], ["5", "5 billion", "5000000"]),
    ("3d", ["3d"], ["3", "3p", "4d"]),
    ("5 m/s", ["5 m s^{-1}", "5 m/s", "5"], ["5 m/s^2", "5 m s", "5 s/m"]),
    ("pH 7.4", ["7.4", "pH = 7.4", "pH of 7.4"], ["7.4 M", "pH 7.4 M",
      "pOH=7.4", "pKa = 7.4", "pK_a=7.4", "x = 7.4"]),
    ("pOH = 7.4", ["pOH = 7.4", "7.4"], ["pH 7.4", "pH = 7.4"]),
    ("7.4 M", ["7.4 M", "7.4"], ["pH 7.4", "pH = 7.4", "pH 7.4 M"]),
    ("7.4 m/s", ["7.4"], ["pH 7.4", r"\text{pH} = 7.4"]),
    ("7 mol", ["7"], ["pH 7", "pH is 7"]),
    ("1/3", ["1/3", r"\frac{1}{3}", "2/6"], ["0.333", "0.33"]),
  ],
)  # fmt: skip
def test_the_same_measurement(gold, right, wrong):
  assert {text: same(text, gold) for text in right} == dict.fromkeys(
    right, True
  )
  assert {text: same(text, gold) for text in wrong} == dict.fromkeys(
    wrong, False
  )


NUMBERS = st.decimals(
  min_value=-(10**6), max_value=10**6, places=3, allow_nan=False
).filter(bool)
UNITS = st.sampled_from(["", " m", " kg m^2", " J/mol", "%", " °C"])


@few
@given(NUMBERS, UNITS)
def test_a_quantity_is_itself_however_it_is_written(number, unit):
  gold = f"{number}{unit}"
  power = f"{number.scaleb(2)}" + r" \times 10^{-2}" + unit
  for text in (gold, f"${number}$ {unit}", f"v = {gold}", power):
    assert same(text, gold), text


@few
@given(NUMBERS, UNITS)
def test_what_is_off_is_seen(number, unit):
  gold = f"{number}{unit}"
  for factor in ("-1", "1.02", "0.98", "10", "0.1"):
    wrong = Fraction(number) * Fraction(factor)
    text = f"{wrong.numerator}/{wrong.denominator}"
    assert not same(text, gold), text


@few
@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_fractions_are_exact(above, below):
  assert same(f"{2 * above}/{2 * below}", f"{above}/{below}")
  assert not same(f"{above * below + 1}/{below * below}", f"{above}/{below}")
