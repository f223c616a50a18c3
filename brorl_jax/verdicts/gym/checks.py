"""Our own checks of answers, for tasks whose scorer cannot be used.

Those scorers execute the answer, ignore text around it, raise, print, or accept
near misses. These checks are exact, take time linear in the length of the
answer, and accept only the form that the question asks for. A check returns the
reason why the answer is wrong, "" if it is right, and raises only if the entry
is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from brorl_jax.verdicts.gym import expressions

Entry = Mapping[str, Any]
Check = Callable[[str, Entry], str]

_WRONG = "wrong answer"
_TIMES = "\N{MULTIPLICATION SIGN}"
_DECIMAL = r"\d{1,20}(?:\.\d{1,20})?"


def _verdict(right: bool) -> str:
  return "" if right else _WRONG


def _rows(text: str) -> list[list[str]]:
  """The words of each non-empty line."""
  return [row for line in text.split("\n") if (row := line.split())]


# One right answer, in one form.


def _same_text(answer: str, entry: Entry) -> str:
  return _verdict(answer == entry["answer"])


def _same_word(answer: str, entry: Entry) -> str:
  # ASCII only, because lower() turns a Kelvin sign into a k.
  same = answer.lower() == entry["answer"].lower()
  return _verdict(same and answer.isascii())


def _same_rows(answer: str, entry: Entry) -> str:
  return _verdict(_rows(answer) == _rows(entry["answer"]))


def _same_list(answer: str, entry: Entry) -> str:
  """The stored list, with any white space and any quotes."""

  def parts(text: str) -> list[str]:
    return re.findall(r"[\[\],]|[^\[\],\s]+", text.replace('"', "'"))

  return _verdict(parts(answer) == parts(entry["answer"]))


# One right value that can be written in several ways.


def _same_hexadecimal(answer: str, entry: Entry) -> str:
  return _verdict(int(answer, 16) == int(entry["answer"], 16))


def _same_number(answer: str, entry: Entry) -> str:
  return _verdict(Fraction(answer) == Fraction(entry["answer"]))


def _same_numbers(answer: str, entry: Entry) -> str:
  rows = _rows(answer)
  pattern = re.compile(rf"[+-]?{_DECIMAL}", re.ASCII)
  if not all(pattern.fullmatch(word) for row in rows for word in row):
    return "refused: not rows of numbers"
  right = [[Fraction(x) for x in row] for row in _rows(entry["answer"])]
  return _verdict([[Fraction(x) for x in row] for row in rows] == right)


def _same_complex(answer: str, entry: Entry) -> str:
  dense = re.sub(r"\s*([+-])\s*", r"\1", answer)
  match = re.fullmatch(
    rf"([+-]?{_DECIMAL}(?![\d.]*i))?(?:([+-]?)({_DECIMAL})?(i))?",
    dense,
    re.ASCII,
  )
  if not match or not dense or (match[1] and match[4] and not match[2]):
    return "refused: not a complex number such as 2.0 - 3.5i"
  real = Fraction(match[1] or 0)
  imaginary = Fraction(match[3] or 1) if match[4] else Fraction(0)
  if match[2] == "-":
    imaginary = -imaginary
  return _verdict([real, imaginary] == list(entry["metadata"]["result"]))


def _same_candidate(answer: str, entry: Entry) -> str:
  """The number to pick, plain or in the format of the question."""
  metadata = entry["metadata"]
  right = {Decimal(entry["answer"])}
  for number, written in zip(
    metadata["candidates"], metadata["formatted_candidates"], strict=True
  ):
    if number == metadata["solution"]:
      right.add(Decimal(written.replace(",", "")))
  return _verdict(Decimal(answer.replace(",", "")) in right)


def _same_factors(answer: str, entry: Entry) -> str:
  def factors(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(_TIMES))

  return _verdict(factors(answer) == factors(entry["answer"]))


def _same_partitions(answer: str, entry: Entry) -> str:
  """All ways to cut the string, each once, in any order."""
  # Nested exactly twice, so json.loads cannot overflow the stack.
  return _verdict(
    sorted(json.loads(answer)) == sorted(entry["metadata"]["solution"])
  )


# Polynomials. The library uses sympy, which takes 3 ms and executes Python.


def _expanded(answer: str, entry: Entry) -> str:
  """The expanded product; the unexpanded question would be equal as well."""
  terms = expressions.terms(answer)
  if terms is None:
    return "refused: not a sum of terms such as -3*x**2*y"
  right = {m: c for m, c, _ in expressions.terms(entry["answer"]) or () if c}
  got = {m: c for m, c, _ in terms if c}
  if got != right:
    return _WRONG
  simplified = all(simple for _, _, simple in terms)
  return (
    "" if simplified and len(terms) <= max(1, len(right)) else "not simplified"
  )


def _antiderivative(answer: str, entry: Entry) -> str:
  variable = entry["metadata"]["variable"]
  terms = expressions.terms(answer)
  if terms is None:
    return "refused: not a sum of terms such as -3*x**2/5"
  right = expressions.terms(entry["answer"])
  if right is None:
    raise ValueError(f"entry.answer = {entry['answer']!r} is not a sum")
  letters = {letter for monomial, _, _ in terms for letter, _ in monomial}
  if not letters <= {variable, "C"}:
    return "refused: a letter other than the variable and C"
  return _verdict(_varying(terms, variable) == _varying(right, variable))


def _varying(
  terms: list[tuple[expressions.Monomial, Fraction, bool]], variable: str
) -> dict[expressions.Monomial, Fraction]:
  """Coefficients of the terms that depend on the variable."""
  total: dict[expressions.Monomial, Fraction] = {}
  for monomial, coefficient, _ in terms:
    if variable in dict(monomial):
      total[monomial] = total.get(monomial, Fraction(0)) + coefficient
  return {monomial: c for monomial, c in total.items() if c}


# Puzzles with many right answers.


def _reaches(
  answer: str, numbers: Sequence[int], target: int, operators: str
) -> str:
  """Whether an expression with every number once equals the target."""
  if len(answer) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", answer):
    return "refused: not up to 200 digits, + - * / ( ) and spaces"
  used = [int(number) for number in re.findall(r"\d+", answer)]
  # Checked first, because it bounds the size of the computation.
  if sorted(used) != sorted(numbers):
    return "wrong numbers"
  if not set(answer) & set("+-*/") <= set(operators):
    return f"wrong operators: use {operators}"
  result = expressions.value(answer)
  if result is None:
    return "refused: cannot be evaluated"
  return "" if result == target else _WRONG


def _countdown(answer: str, entry: Entry) -> str:
  metadata = entry["metadata"]
  return _reaches(answer, metadata["numbers"], metadata["target"], "+-*/")


def _puzzle24(answer: str, entry: Entry) -> str:
  # Only the question lists the operators.
  listed = re.search(r"operators ([-+*/, ]+)\.", entry.get("question") or "")
  operators = "".join(o for o in "+-*/" if not listed or o in listed[1])
  return _reaches(answer, entry["metadata"]["numbers"], 24, operators)


def _queens(answer: str, entry: Entry) -> str:
  right = [_rows(board) for board in entry["metadata"]["valid_answers"]]
  return "" if _rows(answer) in right else _WRONG


def _hanoi(answer: str, entry: Entry) -> str:
  """Legal moves that solve it, at most as many as in the stored answer."""
  metadata = entry["metadata"]
  pegs: dict[int, list[int]] = {
    peg: [] for peg in range(1, metadata["num_pegs"] + 1)
  }
  tower = list(range(metadata["num_disks"], 0, -1))
  pegs[metadata["start_peg"]] = list(tower)
  limit, target = metadata["solution_length"], metadata["target_peg"]
  lines = [line for line in answer.split("\n") if line.strip()]
  for line in lines:
    move = re.fullmatch(
      r"\s*Move disk (\d{1,3}) from Peg (\d{1,3}) to Peg (\d{1,3})\s*",
      line,
      re.ASCII,
    )
    if not move:
      return "refused: a line that is not a move"
    disk, start, end = map(int, move.groups())
    if start not in pegs or end not in pegs or pegs[start][-1:] != [disk]:
      return "illegal move"
    pegs[start].pop()
    if pegs[end] and pegs[end][-1] < disk:
      return "illegal move"
    pegs[end].append(disk)
  if len(lines) > limit:
    return "too many moves"
  return "" if pegs[target] == tower else _WRONG


def _survo(answer: str, entry: Entry) -> str:
  """Accepts any filling: one puzzle in sixty has two."""
  metadata = entry["metadata"]
  puzzle = metadata["puzzle"]
  candidates = sorted(metadata["candidate_numbers"])
  written = _rows(answer)
  if not all(
    re.fullmatch(r"\d{1,9}", word, re.ASCII) for row in written for word in row
  ):
    return "refused: not rows of numbers"
  grid = [[int(word) for word in row] for row in written]
  if [len(row) for row in grid] != [len(row) for row in puzzle]:
    return _WRONG
  cells = [
    (given, filled)
    for old, new in zip(puzzle, grid, strict=True)
    for given, filled in zip(old, new, strict=True)
  ]
  kept = all(given in (0, filled) for given, filled in cells)
  filled = sorted(filled for given, filled in cells if given == 0)
  sums = all(sum(row[:-1]) == row[-1] for row in grid)
  sums = sums and all(
    sum(column[:-1]) == column[-1] for column in zip(*grid, strict=True)
  )
  return "" if kept and filled == candidates and sums else _WRONG


CHECKS: Mapping[str, Check] = {
  "arc_agi": _same_rows,
  "bf": _same_text,
  "binary_matrix": _same_rows,
  "bitwise_arithmetic": _same_hexadecimal,
  "calendar_arithmetic": _same_word,
  "complex_arithmetic": _same_complex,
  "countdown": _countdown,
  "figlet_font": _same_word,
  "game_of_life": _same_list,
  "game_of_life_halting": _same_word,
  "gsm_symbolic": _same_number,
  "list_functions": _same_list,
  "n_queens": _queens,
  "number_format": _same_candidate,
  "number_sorting": _same_list,
  "palindrome_partitioning": _same_partitions,
  "polynomial_multiplication": _expanded,
  "pool_matrix": _same_numbers,
  "prime_factorization": _same_factors,
  "puzzle24": _puzzle24,
  "rearc": _same_rows,
  "simple_integration": _antiderivative,
  "spiral_matrix": _same_rows,
  "string_insertion": _same_text,
  "survo": _survo,
  "tower_of_hanoi": _hanoi,
}

_GROUPED = r"\d{1,3}(?:,\d{3})+(?:\.\d{1,20})?"
_PIECES = r'\[\s*"[a-z]+"(?:\s*,\s*"[a-z]+")*\s*\]'
_MOVE = r'"(?:(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z])"'

# Forms of answers, for our checks and for scorers that are sound but ignore
# extra text. An answer of another form is refused.
FORMS: Mapping[str, tuple[re.Pattern[str], str]] = {
  "bitwise_arithmetic": (
    re.compile(r"[+-]?0[xX][0-9a-fA-F]+"),
    "a hexadecimal number such as -0x1f",
  ),
  "gsm_symbolic": (
    re.compile(rf"[+-]?{_DECIMAL}", re.ASCII),
    "a number such as -12.5",
  ),
  "number_format": (
    re.compile(
      rf"[+-]?(?:{_GROUPED}|{_DECIMAL}(?:[eE][+-]?\d{{1,3}})?)", re.ASCII
    ),
    "a number such as -1,234.5 or 1.2e+3",
  ),
  "palindrome_partitioning": (
    re.compile(rf"\[\s*{_PIECES}(?:\s*,\s*{_PIECES})*\s*\]"),
    "a list of lists of letters",
  ),
  "prime_factorization": (
    re.compile(rf"\d{{1,20}}(?:\s*{_TIMES}\s*\d{{1,20}})*", re.ASCII),
    f"numbers joined by {_TIMES}",
  ),
  "jugs": (
    re.compile(rf"\[\s*{_MOVE}(?:\s*,\s*{_MOVE})*\s*\]"),
    "a JSON list of moves",
  ),
  "kakurasu": (
    re.compile(r"[01](?:[ \t]+[01])*(?:[ \t]*\n[ \t]*[01](?:[ \t]+[01])*)*"),
    "rows of 0 and 1",
  ),
  "quantum_lock": (re.compile(r"[ABC](?:\s*→\s*[ABC])*"), "letters and arrows"),
  "sokoban": (re.compile("[LDUR]+"), "the letters L, D, U and R"),
}
