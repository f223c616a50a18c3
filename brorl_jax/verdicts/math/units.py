"""Words beside a number: units, which may be left out but not exchanged.

No unit is converted: 5 m is not 500 cm, for a question that names its unit
wants it. The base that a number is written in and the modulus of a congruence
are units too, "(base 8)" and "(mod 7)".
"""

from __future__ import annotations

import re

_NAMES = {
  "m": "meter meters metre metres",
  "cm": "centimeter centimeters centimetre centimetres",
  "mm": "millimeter millimeters millimetre millimetres",
  "km": "kilometer kilometers kilometre kilometres",
  "in": "inch inches",
  "ft": "foot feet",
  "yd": "yard yards yds",
  "mi": "mile miles",
  "g": "gram grams",
  "mg": "milligram milligrams",
  "kg": "kilogram kilograms kgs",
  "lb": "pound pounds lbs",
  "oz": "ounce ounces",
  "s": "second seconds sec secs",
  "ms": "millisecond milliseconds",
  "min": "minute minutes mins",
  "h": "hour hours hr hrs",
  "day": "days",
  "week": "weeks",
  "month": "months",
  "year": "years yr yrs",
  "l": "L liter liters litre litres",
  "ml": "mL milliliter milliliters",
  "gal": "gallon gallons",
  "n": "N newton newtons",
  "j": "J joule joules",
  "w": "W watt watts",
  "hz": "Hz hertz",
  "pa": "Pa pascal pascals",
  "k": "K kelvin",
  "mol": "mole moles",
  "mph": "",
  "kmh": "kph",
  "degree": "degrees deg",
  "radian": "radians rad rads",
  "dollar": "dollars usd USD bucks",
  "cent": "cents",
  "euro": "euros",
  "unit": "units",
  "a.m.": "am AM",
  "p.m.": "pm PM",
  "percent": "",
  "bit": "bits",
  "byte": "bytes",
}
_CANON = {
  word: name
  for name, words in _NAMES.items()
  for word in [name, *words.split()]
}
# Words that would change the number they stand beside, or take it back.
_NOT_UNITS = frozenset(
  """
  zero one two three four five six seven eight nine ten eleven twelve thirteen
  fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
  sixty seventy eighty ninety hundred hundreds thousand thousands million
  millions billion billions trillion dozen dozens half halves third thirds
  quarter quarters double triple pair pairs score
  or and not no nor but maybe perhaps possibly probably either neither both
  about approximately approx around roughly nearly almost least most more less
  fewer than over under above below between to if unless when then else except
  is are was were be equals equal plus minus times divided multiplied mod modulo
  base factorial squared cubed root power negative positive undefined infinity
  infinite none any all every same gold answer correct true false yes wrong pi e
  i log sin cos tan where such that for with without also otherwise instead
  """.split()
)


def is_known(word: str) -> bool:
  """Whether a bare run of letters is a unit rather than a product."""
  return word in _CANON or word.casefold() in _CANON


def canon(words: str) -> str | None:
  """One spelling for a unit, or None for words that are no unit.

  Args:
    words: What follows the number: words, and powers, products and quotients
      of them, such as "square feet" or "m/s^2".
  """
  if re.fullmatch(r"\((?:base|mod) \d+\)", words):
    return words
  words = re.sub(r"[{}*]", " ", words).replace("per ", "/")
  words = re.sub(r"\s*([/^.])\s*", r"\1", " ".join(words.split()))
  words = re.sub(r"\ba\.m\b\.?", "am", words)
  words = re.sub(r"\bp\.m\b\.?", "pm", words)
  words = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", words)
  words = re.sub(r"\bcubic (\w+)", r"\1^3", words)
  if not re.fullmatch(
    r"[A-Za-z]+(?:\^-?\d)?(?:[ /][A-Za-z]+(?:\^-?\d)?){0,3}", words
  ):
    return None
  parts = re.split(r"([ /])", words)
  if any(part.casefold() in _NOT_UNITS for part in parts):
    return None
  return "".join(_one(part) for part in parts)


def _one(part: str) -> str:
  word, power, exponent = part.partition("^")
  same = _CANON.get(word) or _CANON.get(word.casefold())
  if same is None:
    same = word.casefold()
    if len(same) > 3 and same.endswith("s"):
      same = same[:-1]
  return same + power + exponent
