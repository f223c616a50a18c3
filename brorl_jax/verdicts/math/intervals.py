"""Intervals: from inequalities, from unions, and all numbers but some."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from brorl_jax.verdicts.math.nodes import Assign, Items, Leaf, Node, Row

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
