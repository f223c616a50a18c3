"""Checks for puzzles with many right answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.verdicts.gym import expressions

Entry = Mapping[str, Any]

_WRONG = "wrong answer"


def rows(text: str) -> list[list[str]]:
  """The words of each non-empty line."""
  return [row for line in text.split("\n") if (row := line.split())]


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


def countdown(answer: str, entry: Entry) -> str:
  metadata = entry["metadata"]
  return _reaches(answer, metadata["numbers"], metadata["target"], "+-*/")


def puzzle24(answer: str, entry: Entry) -> str:
  # Only the question lists the operators.
  listed = re.search(r"operators ([-+*/, ]+)\.", entry.get("question") or "")
  operators = "".join(o for o in "+-*/" if not listed or o in listed[1])
  return _reaches(answer, entry["metadata"]["numbers"], 24, operators)


def queens(answer: str, entry: Entry) -> str:
  right = [rows(board) for board in entry["metadata"]["valid_answers"]]
  return "" if rows(answer) in right else _WRONG


def hanoi(answer: str, entry: Entry) -> str:
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


def survo(answer: str, entry: Entry) -> str:
  """Accepts any filling: one puzzle in sixty has two."""
  metadata = entry["metadata"]
  puzzle = metadata["puzzle"]
  candidates = sorted(metadata["candidate_numbers"])
  written = rows(answer)
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
