"""Reads numbers with units and compares them as measurements."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from brorl_jax.verdicts.stem.wording import plain

MAX_EXPONENT = 500  # larger powers of ten are not measurements
_MAX_DIGITS = 60
_LEAST, _MOST = Fraction(1, 1000), Fraction(1, 100)

_PREFIXES = {
  **{"tera": "T", "giga": "G", "mega": "M", "kilo": "k", "hecto": "h"},
  **{"deci": "d", "centi": "c", "milli": "m", "micro": "μ", "nano": "n"},
  **{"pico": "p", "femto": "f", "atto": "a", "": ""},
}
# A symbol and its names, the plural's s apart. These take any prefix.
_PREFIXED = """
  m meter metre, g gram gramme, s second sec, A ampere amp, K kelvin, mol mole,
  cd candela, Hz hertz, N newton, Pa pascal, J joule, W watt, C coulomb, V volt,
  F farad, Ω ohm, S siemens, Wb weber, T tesla, H henry, lm lumen, lx lux,
  Bq becquerel, Gy gray, Sv sievert, L liter litre l, M molar, eV electronvolt,
  cal calorie, bar, Da dalton, bit, B byte, u amu, pc parsec, rad radian
"""
_OTHER = """
  min minute mins, h hour hr, d day, yr year, ° degree deg, °C, °F, % percent, Å
  angstrom, atm atmosphere, torr Torr, mmHg, ly, AU, ppm, ppb, rpm, week, month,
  in inch inche, ft foot feet, mi mile, lb pound, dB decibel, psi, sr, dyn dyne,
  erg, Ci curie, hp horsepower
"""


def _spellings() -> dict[str, str]:
  """Every way of writing a unit, and its symbol."""
  symbols = {}
  for table, prefixes in ((_OTHER, {"": ""}), (_PREFIXED, _PREFIXES)):
    for long, short in prefixes.items():
      for symbol, *names in map(str.split, table.split(",")):
        symbols.setdefault(short + symbol, short + symbol)
        for name in names:
          symbols[long + name] = symbols[f"{long}{name}s"] = short + symbol
  return symbols | {"ml": "mL", "kcals": "kcal", "Kg": "kg", "atms": "atm"}


_UNITS = _spellings()
_NUMBER = re.compile(
  r"([+-]?)\s*(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?"
  r"(?:\s*[x×·*]\s*10\s*\^?\s*\(?([+-]?\d{1,4})\)?|[eE]([+-]?\d{1,4}))?"  # noqa: RUF001
)
_POWER_OF_TEN = re.compile(r"([+-]?)10\s*\^\s*\(?([+-]?\d{1,4})\)?(?!\d)")
_FRACTION = re.compile(r"([+-]?\d{1,20})\s*/\s*(\d{1,20})(?![\d.])")
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_FACTOR = re.compile(
  r"\s*([/·*.])?\s*\(?\s*([^\W\d_]+|°[CF]?|%)(?:\^\(?|)([+-]?\d)?\)?\s*\)?"
)
_DEGREES = re.compile(r"\bdegrees?\s+([CF])(?:elsius|ahrenheit)?\b", re.I)
_BEFORE = re.compile(
  r"(?:([A-Za-zα-ωΑ-Ω][A-Za-z0-9]{0,7})\s*=|(pH)(?: of| is)?)?\s*"  # noqa: RUF001
  r"(?:[≈~=]|about |approximately |approx\.? )?\s*"
)


class Quantity(NamedTuple):
  """A number as it was written."""

  value: Fraction
  # One unit of its last digit, or 0 for a whole number or a fraction.
  step: Fraction
  unit: dict[str, int]  # symbol -> power, for symbols whose power is not 0
  known: bool  # whether all of these are known as units
  name: str = ""  # what stands before it, "v" in "v = 5", or ""


def read(text: str) -> Quantity | None:
  """Reads a quantity from a text, or returns None.

  "v = ", "pH", "≈" and "about" may stand before it.
  """
  text = _FRAC.sub(r"\1/\2", plain(text)).strip().rstrip(".,; ")
  before = _BEFORE.match(text)
  number = _read_number(text, before.end() if before else 0)
  unit = _read_unit(text[number[2] :]) if number else None
  if number is None or unit is None:
    return None
  powers, known = unit
  # 1s and 3d are orbitals as well.
  known = known and not re.fullmatch(r"\d[A-Za-z]", text)
  name = (before[1] or before[2] or "") if before else ""
  return Quantity(*number[:2], powers, known, name)


def same(answer: str, gold: str) -> bool:
  r"""Whether an answer equals the reference; False if one is not a quantity.

    same(r"3.0 \times 10^8 m/s", "3.00e8 m s^-1")       # True
    same("5 km", "5000 m")                              # False: not converted

  Whole numbers and fractions are compared exactly. If the reference has a
  decimal point or a power of ten it was rounded: what differs by no more than
  half a unit of its last digit is equal, but at least 0.1 % and at most 1 %.

  Units may be left out, for a question often names its own, but not exchanged:
  none is converted, and a prefix is part of it. "m/s", "m s^-1" and "meters per
  second" are one unit; after a "/" all is divided by. mW is not MW. A word that
  is not known as a unit must be there in both: "5 million" is not 5, and
  neither must the letter of "3d" be left out, which may be no unit. A pH has no
  unit: pH 7 is neither 7 M nor pOH = 7.
  """
  given, right = read(answer), read(gold)
  if given is None or right is None or not _same_unit(given, right):
    return False
  size = abs(right.value)
  tolerance = min(max(right.step / 2, _LEAST * size), _MOST * size)
  return abs(given.value - right.value) <= (tolerance if right.step else 0)


def _same_unit(given: Quantity, right: Quantity) -> bool:
  names = {given.name, right.name}
  if "pH" in names:  # has no unit; pOH and pKa differ
    return not given.unit and not right.unit and names <= {"", "pH"}
  if given.unit and right.unit:
    return given.unit == right.unit
  return (given.known or not given.unit) and (right.known or not right.unit)


def _read_number(
  text: str, start: int
) -> tuple[Fraction, Fraction, int] | None:
  """Value, unit of the last digit, and where the number ends."""
  if match := _FRACTION.match(text, start):
    below = int(match[2])
    value = Fraction(int(match[1]), below) if below else None
    return None if value is None else (value, Fraction(0), match.end())
  if match := _POWER_OF_TEN.match(text, start):
    digits, decimals, exponent, step = "1", "", match[2], False
  elif match := _NUMBER.match(text, start):
    whole, decimals = match[2].replace(",", ""), match[3] or ""
    digits, exponent = whole + decimals, match[4] or match[5]
    step = match[3] is not None or exponent is not None
  else:
    return None
  power = int(exponent or 0)
  if not digits or len(digits) > _MAX_DIGITS or abs(power) > MAX_EXPONENT:
    return None
  last = Fraction(10) ** (power - len(decimals))
  value = int(match[1] + digits) * last
  return value, last if step else Fraction(0), match.end()


def _read_unit(text: str) -> tuple[dict[str, int], bool] | None:
  text = _DEGREES.sub(lambda m: "°" + m[1].upper(), text)
  text = re.sub(r"\bper\b", "/", text).strip()
  powers: Counter[str] = Counter()
  at, sign, known = 0, 1, True
  while at < len(text):
    factor = _FACTOR.match(text, at)
    if factor is None:
      return None
    sign = -1 if factor[1] == "/" else sign
    symbol = _UNITS.get(factor[2])
    if symbol is None and len(factor[2]) > 3:
      symbol = _UNITS.get(factor[2].lower())  # a name, such as Meters
    known = known and symbol is not None
    powers[symbol or factor[2]] += sign * int(factor[3] or 1)
    at = factor.end()
  return {unit: power for unit, power in powers.items() if power}, known
