"""Steps of tasks that divide: gcd, lcm, prime_factorization, equations."""

from __future__ import annotations

import re

from launch.embedded.steps.merging import merge
from launch.embedded.steps.pen import Entry, Pen, Task, near, parts

_MOST_DIVISIONS = 60  # Euclid needs 58 for 12 digits; a slip may need more
_MOST_DIGITS = 12  # of a quotient; after slips no division may end
_TIMES = " \N{MULTIPLICATION SIGN} "


def _euclid(a: int, b: int, pen: Pen) -> int:
  """Greatest common divisor: a multiple, and what is left of it."""
  a, b = max(a, b), min(a, b)
  for _ in range(_MOST_DIVISIONS):
    if b == 0:
      break
    multiple = pen.equals(f"{b}*{a // b}", a // b * b)
    left = abs(pen.equals(f"{a}-{multiple}", a - multiple))
    # After a slip more may be left than the divisor.
    a, b = max(b, left), min(b, left)
  return a


def _gcd(entry: Entry, pen: Pen) -> str:
  result, *others = entry["metadata"]["numbers"]
  for other in others:
    result = _euclid(result, other, pen)
  return str(result)


def _lcm(entry: Entry, pen: Pen) -> str:
  result, *others = entry["metadata"]["numbers"]
  for other in others:
    divisor = max(_euclid(result, other, pen), 1)
    quotient = pen.equals(f"{result}/{divisor}", result // divisor)
    result = _multiply(quotient, other, pen)
  return str(result)


def _multiply(a: int, b: int, pen: Pen) -> int:
  """The parts of the first number times the second, summed up."""
  first, *others = parts(a)
  total = pen.equals(f"{first}*{b}", first * b)
  for part in others:
    more = pen.equals(f"{part}*{b}", part * b)
    total = pen.equals(f"{total}+{more}", total + more)
  return total


def _prime_factorization(entry: Entry, pen: Pen) -> str:
  """Divides by the primes up to the square root, the lowest first."""
  number, divisor = entry["metadata"]["number"], 2
  factors = []
  while divisor * divisor <= number:
    # A slip to 0 takes a number for a divisor that is none.
    if number % divisor and pen.equals(
      f"{number}%{divisor}", number % divisor, 0
    ):
      divisor = _next_prime(divisor)
      continue
    factors.append(divisor)
    number = pen.equals(f"{number}/{divisor}", number // divisor)
  if number > 1 or not factors:
    factors.append(number)
  return _TIMES.join(map(str, factors))


def _next_prime(number: int) -> int:
  number += 1
  while any(number % n == 0 for n in range(2, int(number**0.5) + 1)):
    number += 1
  return number


def _simple_equations(entry: Entry, pen: Pen) -> str:
  """Takes the constant to the other side, then divides place by place."""
  metadata = entry["metadata"]
  left, _, right = metadata["equation"].replace(" ", "").partition("=")
  match = re.search(rf"([-+]?)(?:(\d+)\*)?{metadata['variable']}", left)
  if not match:
    raise ValueError(f"equation {metadata['equation']!r} has no variable")
  constant = int(left.replace(match[0], "", 1) or 0)
  number = int(right)
  # With a negative coefficient both sides change their sign.
  if match[1] == "-":
    number, constant = constant, number
  if constant:
    sign = "-" if constant > 0 else "+"
    number = pen.equals(
      f"{number}{sign}{abs(constant)}", number - constant, number + constant
    )
  return str(_divide(number, int(match[2] or 1), pen))


def _divide(number: int, by: int, pen: Pen) -> int:
  total = None
  for _ in range(_MOST_DIGITS):
    if number < by:
      break
    part = parts(number // by)[0]
    multiple = by * part
    # A slip may take a number for another one's multiple; what is left of a
    # wrong multiple is divided again, which mends some slips.
    slips = [(part, n) for n in near(multiple)]
    slips += [(n, multiple) for n in near(part)]
    line = lambda v: f"{by}*{v[0]}={v[1]}"
    part, multiple = pen.step((part, multiple), line, slips)
    number = pen.equals(f"{number}-{multiple}", number - multiple)
    if total is None:
      total = part
    else:
      total = pen.equals(f"{total}+{part}", total + part)
  return total or 0


TASKS = {
  "gcd": Task(_gcd, merge),
  "lcm": Task(_lcm, merge),
  "prime_factorization": Task(_prime_factorization, merge),
  "simple_equations": Task(_simple_equations, merge),
}
