"""The types of a parsed answer, and the error of one that is none."""

from __future__ import annotations

import dataclasses
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
  unit: str = ""  # what stands beside it, or ""
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
