"""Compares two parsed answers.

True or False, or None if it depends on the values of their leaves, which the
symbolic judge compares.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from brorl_jax.verdicts.math.nodes import (
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
  Words,
)

Answer = bool | None
LeafRule = Callable[[Leaf, Leaf], Answer]

# A reference with this many significant digits counts as rounded. With fewer it
# is often exact (2.5, 0.125), and half a unit of the last digit would accept
# wrong answers.
_ROUNDED_DIGITS = 4


def same(answer: Node, gold: Node, rule: LeafRule) -> Answer:
  """Compares structure with structure and leaf with leaf.

  Args:
    rule: Compares two leaves whose exact comparison left it open.
  """
  if isinstance(answer, Assign) or isinstance(gold, Assign):
    return _assigned(answer, gold, rule)
  if isinstance(answer, Leaf) and isinstance(gold, Leaf):
    return _leaves(answer, gold, rule)
  if isinstance(answer, Words) or isinstance(gold, Words):
    return _letter(answer) == _letter(gold)
  if isinstance(answer, Items) and isinstance(gold, Items):
    return _items(answer, gold, rule)
  if isinstance(answer, Row) and isinstance(gold, Row):
    if answer.close != gold.close or not _fit(answer.open, gold.open):
      return False
    if _is_mixed(answer.items, gold.items) and (
      _moduli(answer.items) != _moduli(gold.items)
    ):
      return False
    return _in_order(answer.items, gold.items, rule)
  if isinstance(answer, Relation) and isinstance(gold, Relation):
    return _relations(answer, gold, rule)
  if isinstance(answer, Relation):
    return _chain(answer, (answer.sides[-1], gold), rule)
  if isinstance(gold, Relation):
    return _chain(gold, (answer, gold.sides[-1]), rule)
  # x = 1, y = 2 and (1, 2)
  if isinstance(answer, Items) and isinstance(gold, Row):
    return _in_order(_coordinates(answer), (gold,), rule)
  if isinstance(answer, Row) and isinstance(gold, Items):
    return _in_order((answer,), _coordinates(gold), rule)
  # {5} and 5: a set of one solution.
  if isinstance(gold, Leaf) and (alone := single(answer)):
    return same(alone, gold, rule)
  if isinstance(answer, Leaf) and (alone := single(gold)):
    return same(answer, alone, rule)
  return False


def single(node: Node) -> Node | None:
  """The element of a set of one."""
  if isinstance(node, Items) and node.kind == "set" and len(node.items) == 1:
    return node.items[0]
  return None


def _fit(mark: str, gold_mark: str) -> bool:
  """Whether brackets are equal; a time may leave out its p.m."""
  if mark[0] == gold_mark[0] == ":":
    return mark == gold_mark or ":" in (mark, gold_mark)
  return mark == gold_mark


def is_rounded(leaf: Leaf) -> bool:
  """Whether a reference is a rounded decimal."""
  if leaf.step is None or not isinstance(leaf.tree, Fraction):
    return False
  return abs(leaf.tree) / leaf.step >= 10 ** (_ROUNDED_DIGITS - 1)


def _leaves(answer: Leaf, gold: Leaf, rule: LeafRule) -> Answer:
  if answer.unit and gold.unit and answer.unit != gold.unit:
    return False
  if _is_base(answer.unit) and not gold.unit:
    return False  # 11_2 is three
  a, g = answer.tree, gold.tree
  if isinstance(a, Fraction) and isinstance(g, Fraction):
    if a == g:
      return True
    return is_rounded(gold) and abs(a - g) <= (gold.step or 0) / 2
  if a is not None and a == g:
    return True
  return rule(answer, gold)


def _is_base(unit: str) -> bool:
  """Whether it is a base that an answer must not keep to itself."""
  return unit.startswith("(base") and unit != "(base 10)"


def _letter(node: Node) -> object:
  """A letter as text equals the same letter as a symbol."""
  if isinstance(node, Words):
    return node.text
  if isinstance(node, Leaf) and len(node.text) == 1 and not node.unit:
    return node.text
  return node


def _assigned(answer: Node, gold: Node, rule: LeafRule) -> Answer:
  if isinstance(answer, Assign) and _is_named(gold):
    answer = _each(answer)
  if isinstance(gold, Assign) and _is_named(answer):
    gold = _each(gold)
  if isinstance(answer, Items) and isinstance(gold, Items):
    return same(answer, gold, rule)
  if isinstance(answer, Assign) and isinstance(gold, Assign):
    if answer.name == gold.name:
      return same(answer.value, gold.value, rule)
    return _equations(answer, gold, rule)
  if isinstance(answer, Relation) or isinstance(gold, Relation):
    return _equations(answer, gold, rule)
  if isinstance(answer, Assign):
    return same(answer.value, gold, rule)
  assert isinstance(gold, Assign)
  return same(answer, gold.value, rule)


def _equations(answer: Node, gold: Node, rule: LeafRule) -> Answer:
  left, right = _equation(answer), _equation(gold)
  return left is not None and right is not None and rule(left, right)


def _is_named(node: Node) -> bool:
  """Whether it is x = 1, y = 2, or x = 1 and y = 2."""
  if not isinstance(node, Items) or node.kind != "list" or node.choice:
    return False
  return all(isinstance(item, Assign) for item in node.items)


def _each(node: Assign) -> Node:
  """x = 1, y = 2 for (x, y) = (1, 2); anything else as it is."""
  names = node.name.strip("()").split(",")
  row = node.value
  if not isinstance(row, Row) or len(names) != len(row.items):
    return node
  return Items("list", tuple(map(Assign, names, row.items)))


def _equation(node: Node) -> Leaf | None:
  """Left side minus right side, marked as an equation."""
  if isinstance(node, Assign):
    if not isinstance(node.value, Leaf) or node.value.tree is None:
      return None
    if not node.name.isalpha() and not node.name.startswith("\\"):
      return None
    left: object = ("symbol", node.name)
    right = node.value.tree
  elif isinstance(node, Relation) and node.signs == ("=",):
    left, right = (
      side.tree if isinstance(side, Leaf) else None for side in node.sides
    )
    if left is None or right is None:
      return None
  else:
    return None
  return Leaf("=", ("=", left, right))


def _relations(answer: Relation, gold: Relation, rule: LeafRule) -> Answer:
  if answer.signs == gold.signs:
    equal = _in_order(answer.sides, gold.sides, rule)
    if equal or answer.signs != ("=",):
      return equal
  return _equations(answer, gold, rule)


def _chain(chain: Relation, ends: tuple[Node, Node], rule: LeafRule) -> Answer:
  """Whether a = b = c is what stands on the other side.

  Its last part must be that, and every part exactly the next one: 8 = 9 is
  neither, nor is 8 = 8 cm; 2 * 4 = 8 cm is. A part that stands there twice (8
  = 8) is no calculation.
  """
  parts = [
    dataclasses.replace(part, step=None) if isinstance(part, Leaf) else part
    for part in chain.sides
  ]
  if set(chain.signs) != {"="} or len(set(parts)) < len(parts):
    return False
  units = {part.unit for part in parts if isinstance(part, Leaf)}
  if len(units - {""}) > 1 or ("" in units and any(map(_is_base, units))):
    return False
  if len(units) > 1 and not _ends_in_unit(chain.sides):
    return False
  return _in_order((ends[0], *parts[:-1]), (ends[1], *parts[1:]), rule)


def _ends_in_unit(parts: Sequence[Node]) -> bool:
  """Whether only calculations leave out the unit, as in 2 * 3 = 6 cm."""
  last, texts = parts[-1], set()
  for part in parts:
    if not isinstance(part, Leaf) or part.text in texts:
      return False
    texts.add(part.text)
    if not part.unit and re.fullmatch(r"[-+ ]*[\d.,]+", part.text):
      return False
  return isinstance(last, Leaf) and last.unit != ""


def _coordinates(node: Items) -> tuple[Row, ...]:
  """The tuple that x = 1, y = 2 names, if its order is that of the alphabet.

  y = 2, x = 1 may be (1, 2) or (2, 1), and so is none.
  """
  named = [item for item in node.items if isinstance(item, Assign)]
  names = [item.name for item in named]
  alike = re.fullmatch("[a-z]+|[A-Z]+", "".join(names))
  if not _is_named(node) or not alike or names != sorted(set(names)):
    return ()
  return (Row("(", tuple(item.value for item in named), ")"),)


def _in_order(
  answers: Sequence[Node], references: Sequence[Node], rule: LeafRule
) -> Answer:
  if len(answers) != len(references):
    return False
  all_equal: Answer = True
  for pair in zip(answers, references, strict=True):
    equal = same(*pair, rule)
    if equal is False:
      return False
    all_equal = all_equal and equal
  return all_equal


def _items(answer: Items, gold: Items, rule: LeafRule) -> Answer:
  if answer.kind != gold.kind and not (
    {"union", "except"}.isdisjoint((answer.kind, gold.kind))
  ):
    return False
  a, g = answer.items, gold.items
  if _is_mixed(a, g):
    return _moduli(a) == _moduli(g) and _in_order(a, g, rule)
  named = [
    {item.name for item in items if isinstance(item, Assign)}
    for items in (a, g)
  ]
  if max(map(len, named)) > 1 and min(map(len, named)) == 0:
    # x=1, y=2 against 1, 2: the alphabet is all that can name them.
    if "set" in (answer.kind, gold.kind):
      return False  # which has no order
    return _in_order(_by_name(a), _by_name(g), rule)
  table = [[same(x, y, rule) for y in g] for x in a]
  if answer.kind == gold.kind and gold.kind in ("set", "except"):
    return _covered(table, len(g))
  return _matched(table, len(g))


def _is_mixed(a: Sequence[Node], g: Sequence[Node]) -> bool:
  """Whether a modulus is not that of all elements of both.

  All of one side may leave it out, as one number may.
  """
  return any(len(set(_moduli(items))) > 1 for items in (a, g))


def _moduli(items: Sequence[Node]) -> list[str]:
  """The modulus of each element; one at the end is that of all before it."""
  leaves = [item.value if isinstance(item, Assign) else item for item in items]
  units = [leaf.unit if isinstance(leaf, Leaf) else "" for leaf in leaves]
  moduli = [unit if unit.startswith("(mod") else "" for unit in units]
  return moduli if any(moduli[:-1]) else moduli[-1:] * len(moduli)


def _by_name(items: Sequence[Node]) -> Sequence[Node]:
  if not all(isinstance(item, Assign) for item in items):
    return items
  return sorted(items, key=lambda item: getattr(item, "name", ""))


def _covered(table: list[list[Answer]], columns: int) -> Answer:
  """Whether every element is in the other set."""
  lines = [*table, *([row[j] for row in table] for j in range(columns))]
  if any(all(cell is False for cell in line) for line in lines):
    return False
  if all(any(cell is True for cell in line) for line in lines):
    return True
  return None


def _matched(table: list[list[Answer]], columns: int) -> Answer:
  """Whether the lists match one to one, in any order."""
  if len(table) != columns:
    return False
  free = set(range(columns))
  open_rows = []
  for row in table:
    partner = next((j for j in sorted(free) if row[j] is True), None)
    if partner is None:
      open_rows.append(row)
    else:
      free.discard(partner)
  for row in open_rows:
    if all(row[j] is False for j in free):
      return False
  for j in free:
    if all(row[j] is False for row in open_rows):
      return False
  return None if open_rows else True
