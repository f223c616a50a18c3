"""The types of a parsed answer, the error of one that is none, intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

# A Fraction, or a tuple of an operator and its arguments:
#   ("symbol", name) ("constant", "pi" | "e" | "i" | "infinity")
#   ("+" | "*" | "/" | "^" | "binom" | "root" | "log", a, b) ("-", a)
#   ("!" | "abs" | "floor" | "ceil" | name of a function, a)
#   ("max" | "min", a, b, ...)
Tree = Any


class Unreadable(ValueError):
  """The text is none of what is understood here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
  """An expression."""

  text: str  # its tokens, one way of writing it
  tree: Tree  # as `reader.read` gives it, or None if that cannot read it
  unit: str = ""  # the unit of measurement, or ""
  # One unit of its last digit, if it is a number with a decimal point.
  step: Fraction | None = None
  why: str = ""  # why it could not be read


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
  """Text without a number, in lower case if it is more than one letter."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
  r"""Elements in no order: "list" (1, 2 or 1 or 2), "set", "union", "except".

  "except" is all real numbers but these: \mathbb{R}\setminus\{2\}, x \ne 2.
  """

  kind: Literal["list", "set", "union", "except"]
  items: tuple[Node, ...]
  choice: bool = False  # whether "or" stood between them


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """Elements in order: a tuple, an interval, a ratio, a row of a matrix."""

  open: str
  items: tuple[Node, ...]
  close: str


@dataclasses.dataclass(frozen=True, slots=True)
class Assign:
  """A variable with its value, or with the interval it lies in.

  The value of x = 1/2 = 0.5 is the chain behind x, a relation.
  """

  name: str
  value: Node


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
  """Sides of an equation or inequality that assigns nothing, and the signs."""

  signs: tuple[str, ...]
  sides: tuple[Node, ...]


Node = Leaf | Words | Items | Row | Assign | Relation


FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
INFINITY = Leaf(r"\infty", ("constant", "infinity"))
MINUS_INFINITY = Leaf(r"-\infty", ("-", ("constant", "infinity")))
REALS = Row("(", (MINUS_INFINITY, INFINITY), ")")


def between(name: str, left: str, low: Node, high: Node, right: str) -> Assign:
  """low < x <= high."""
  row = Row(
    "(" if left == "<" else "[", (low, high), ")" if right == "<" else "]"
  )
  return Assign(name, row)


def ray(name: str, sign: str, end: Node) -> Assign:
  """x < end, and the like."""
  if sign in (">", r"\geq"):
    row = Row("(" if sign == ">" else "[", (end, INFINITY), ")")
  else:
    row = Row("(", (MINUS_INFINITY, end), ")" if sign == "<" else "]")
  return Assign(name, row)


def union(values: tuple[Node, ...], *, choice: bool = False) -> Items:
  """Intervals side by side; (-oo, 2) and (2, oo) are all numbers but 2."""
  ends = {
    _tree(row.items[0]): row.items[1]
    for row in values
    if isinstance(row, Row) and (row.open, row.close) == ("(", ")")
    if len(row.items) == 2
  }
  points: list[Node] = []
  end = ends.pop(MINUS_INFINITY.tree, None)
  while end is not None and _tree(end) in ends:
    points.append(end)
    end = ends.pop(_tree(end))
  whole = end is not None and _tree(end) == INFINITY.tree
  if whole and len(points) + 1 == len(values) and _is_ascending(points):
    return Items("except", tuple(points))
  return Items("union", values, choice=choice)


def _is_ascending(points: Sequence[Node]) -> bool:
  """Whether it is known exactly: of rational numbers, or of a single point."""
  trees = [_tree(point) for point in points]
  rational = [tree for tree in trees if isinstance(tree, Fraction)]
  if len(rational) < len(trees):
    return len(trees) == 1 and trees[0] != INFINITY.tree
  return rational == sorted(rational)


def _tree(node: Node) -> object:
  """The tree of an expression; what has none is itself."""
  return node.tree if isinstance(node, Leaf) and node.tree is not None else node
