"""Steps of tasks about digits in another base: base_conversion, count_bits."""

from __future__ import annotations

import string

from launch.embedded.steps.pen import Entry, Pen, Task, near

_DIGITS = string.digits + string.ascii_lowercase


def _base_conversion(entry: Entry, pen: Pen) -> str:
  """To a number digit by digit, then divides by the target's base."""
  metadata = entry["metadata"]
  source, target = metadata["source_base"], metadata["target_base"]
  written = metadata["source_repr"]
  number = 0
  if source == 10:
    number = int(written)
  else:
    for digit in map(_DIGITS.index, written):
      number = pen.equals(f"{number}*{source}+{digit}", number * source + digit)
  return str(number) if target == 10 else _to_base(number, target, pen)


def _to_base(number: int, base: int, pen: Pen) -> str:
  digits = ""
  while number or not digits:
    quotient, digit = divmod(number, base)
    slips = [(q, digit) for q in near(quotient) if q < number]
    slips += [(quotient, d) for d in near(digit) if d < base]
    line = lambda v, n=number: f"{n}={v[0]}*{base}+{v[1]}"
    number, digit = pen.step((quotient, digit), line, slips)
    digits = _DIGITS[digit] + digits
  return digits


def _count_bits(entry: Entry, pen: Pen) -> str:
  """Halves the number; each line ends with the ones that were counted."""
  number, total = entry["metadata"]["number"], 0
  while number:
    half, bit = divmod(number, 2)
    slips = [(q, bit, total + bit) for q in near(half) if q < number]
    slips += [(half, 1 - bit, total + 1 - bit), (half, bit, total + 1 - bit)]
    line = lambda v, n=number: f"{n}=2*{v[0]}+{v[1]} {v[2]}"
    number, _, total = pen.step((half, bit, total + bit), line, slips)
  return str(total)


TASKS = {
  "base_conversion": Task(_base_conversion),
  "count_bits": Task(_count_bits),
}
