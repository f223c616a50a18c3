"""Steps of tasks about digits in another base: base_conversion, count_bits."""

from __future__ import annotations

import re
import string

from brorl_jax.tasks.gym.steps import equation
from brorl_jax.tasks.gym.steps.pen import Pen, near
from brorl_jax.tasks.gym.steps.task import Entry, Task

_DIGITS = string.digits + string.ascii_lowercase
_PLACES = 12
_BITS = re.compile(
  r"([0-9]{1,12})=2\*([0-9]{1,12})\+([01]) ([0-9]{1,4})", re.ASCII
)


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


def _judge_base(entry: Entry, lines: list[str]) -> equation.Equations:
  metadata = entry["metadata"]
  known = equation.numbers(lines)
  for base in (metadata["source_base"], metadata["target_base"]):
    known.add(base)
    # And what its places are worth, for a sum over all digits.
    powers = (base**place for place in range(2, _PLACES))
    known |= {power for power in powers if power <= metadata["decimal_value"]}
  known |= {_DIGITS.index(digit) for digit in metadata["source_repr"]}
  return equation.Equations(known | {metadata["decimal_value"]})


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


class _Bits:
  """Judges lines of `_count_bits`: the division, and the count so far."""

  def __init__(self, number: int, lines: list[str]):
    found = [_BITS.fullmatch(line) for line in lines]
    rows = [[int(n) for n in match.groups()] for match in found if match]
    self._counted = {(row[0], row[3]) for row in rows}
    # What the last line leaves: a number to halve, and the count.
    self._next = (number, 0)

  def read(self, text: str, stands: bool) -> bool | None:
    match = _BITS.fullmatch(text)
    if not match:
      return None
    number, half, bit, total = map(int, match.groups())
    follows = (number, total - bit) == self._next
    counted = follows or (number, total) in self._counted
    right = number == 2 * half + bit and counted
    if stands:
      self._next = (half, total)
    return right


def _judge_bits(entry: Entry, lines: list[str]) -> _Bits:
  return _Bits(entry["metadata"]["number"], lines)


TASKS = {
  "base_conversion": Task(_base_conversion, _judge_base),
  "count_bits": Task(_count_bits, _judge_bits),
}
