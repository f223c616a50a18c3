"""Compares two parsed answers: structure with structure, leaf with leaf.

True or False, or None if it depends on the values of leaves (see symbolic.py).
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from brorl_jax.verdicts.math import structure
from brorl_jax.verdicts.math.expressions import canonical_unit, variables
from brorl_jax.verdicts.math.structure import Assign, Items, Leaf, Node, Row

Answer = bool | None
LeafRule = Callable[[Leaf, Leaf], Answer]

# A reference of this many digits counts as rounded. With fewer it is often
# exact (2.5, 0.125), and half a unit of the last digit would be too much.
_ROUNDED_DIGITS = 4
_LETTERS_LAST = re.compile(r"(.*[\d})]) ([A-Za-z](?: [/^*] .*)?)")


def same(answer: Node, gold: Node, rule: LeafRule) -> Answer:
  """Whether two answers are equal; `rule` decides what leaves leave open."""
  match answer, gold:
    case (Assign(), _) | (_, Assign()):
      return _assigned(answer, gold, rule)
    case Leaf(), Leaf():
      return _leaves(answer, gold, rule)
    case (structure.Words(), _) | (_, structure.Words()):
      return _letter(answer) == _letter(gold)
    case Items(), Items():
      return _items(answer, gold, rule)
    case Row(), Row():
      a, g = answer.items, gold.items
      if _is_mixed(a, g) and _moduli(a) != _moduli(g):
        return False
      marks = {answer.open, gold.open}
      # A time may leave out its p.m.
      times = ":" in marks and marks <= {":", ":p.m.", ":a.m."}
      if answer.close != gold.close or (len(marks) > 1 and not times):
        return False
      return _in_order(a, g, rule)
    case structure.Relation(), structure.Relation():
      if answer.signs == gold.signs:
        equal = _in_order(answer.sides, gold.sides, rule)
        if equal or answer.signs != ("=",):
          return equal
      return _equations(answer, gold, rule)
    case structure.Relation(), _ if value := _without_left_side(answer, gold):
      return same(value, gold, rule)
    case structure.Relation(), _:
      return _chain(answer, (answer.sides[-1], gold), rule)
    case _, structure.Relation():
      return _chain(gold, (answer, gold.sides[-1]), rule)
    # x = 1, y = 2 and (1, 2)
    case Items(), Row():
      return _in_order(_coordinates(answer), (gold,), rule)
    case Row(), Items():
      return _in_order((answer,), _coordinates(gold), rule)
    # {5} and 5: a set of one solution.
    case (Items(), Leaf()) | (Leaf(), Items()):
      a, g = single(answer), single(gold)
      return bool(a or g) and same(a or answer, g or gold, rule)
  return False


def single(node: Node) -> Node | None:
  """The element of a set of one."""
  if isinstance(node, Items) and node.kind == "set" and len(node.items) == 1:
    return node.items[0]
  return None


def is_rounded(leaf: Leaf) -> bool:
  if leaf.step is None or not isinstance(leaf.tree, Fraction):
    return False
  return abs(leaf.tree) / leaf.step >= 10 ** (_ROUNDED_DIGITS - 1)


def _leaves(answer: Leaf, gold: Leaf, rule: LeafRule) -> Answer:
  if bool(answer.unit) != bool(gold.unit):
    answer, gold = _lettered(answer, gold.unit), _lettered(gold, answer.unit)
  if answer.unit != gold.unit:
    if "?" in answer.unit + gold.unit or (answer.unit and gold.unit):
      return False
    if _is_base(answer.unit):
      return gold.tree is not None and _based(answer) == gold.tree
  a, g = answer.tree, gold.tree
  if a is not None and a == g:
    return True
  if isinstance(a, Fraction) and isinstance(g, Fraction):
    return is_rounded(gold) and abs(a - g) <= (gold.step or 0) / 2
  return rule(answer, gold)


def _is_base(unit: str) -> bool:
  """Whether it is a base that an answer must not keep to itself."""
  return unit.startswith("(base") and unit != "(base 10)"


def _based(leaf: Leaf) -> Fraction | None:
  """The value of 101_2, which is 5."""
  whole, _, part = leaf.text.replace(" ", "").partition(".")
  base = int(leaf.unit.strip("(base )"))
  if not re.fullmatch(r"-?[0-9A-F]+", whole + part):
    return None
  return Fraction(int(whole + part, base), base ** len(part))


def _lettered(leaf: Leaf, unit: str) -> Leaf:
  """The leaf "5 m / s" with these letters as its unit, if that is the unit."""
  found = unit and _LETTERS_LAST.fullmatch(leaf.text)
  if not found or canonical_unit(found[2]) != unit:
    return leaf
  bare = structure.parse(found[1])
  return dataclasses.replace(bare, unit=unit) if type(bare) is Leaf else leaf


def _letter(node: Node) -> object:
  """A letter as text equals the same letter as a symbol."""
  if isinstance(node, Leaf) and len(node.text) == 1 and not node.unit:
    return node.text
  return node.text if isinstance(node, structure.Words) else node


def _assigned(answer: Node, gold: Node, rule: LeafRule) -> Answer:
  """Where one is an assignment; x = 5 equals 5 but not y = 5."""
  if _is_named(gold):
    answer = _each(answer)
  if _is_named(answer):
    gold = _each(gold)
  match answer, gold:
    case Items(), Items():
      return same(answer, gold, rule)
    case Assign(), Assign() if answer.name == gold.name:
      return same(answer.value, gold.value, rule)
    case (Assign() | structure.Relation(), Assign() | structure.Relation()):
      return _equations(answer, gold, rule)
    case Assign(), _:
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


def _each(node: Node) -> Node:
  """x = 1, y = 2 for (x, y) = (1, 2); anything else as it is."""
  if not isinstance(node, Assign) or not isinstance(node.value, Row):
    return node
  names, values = node.name.strip("()").split(","), node.value.items
  if len(names) != len(values):
    return node
  return Items("list", tuple(map(Assign, names, values)))


def _equation(node: Node) -> Leaf | None:
  """Both sides of an equation as one leaf, marked as an equation."""
  if isinstance(node, structure.Relation) and node.signs == ("=",):
    sides = [s.tree if isinstance(s, Leaf) else None for s in node.sides]
  elif isinstance(node, Assign) and isinstance(node.value, Leaf):
    named = node.name.isalpha() or node.name.startswith("\\")
    sides = [("symbol", node.name) if named else None, node.value.tree]
  else:
    return None
  return None if None in sides else Leaf("=", ("=", *sides))


def _without_left_side(chain: structure.Relation, gold: Node) -> Node | None:
  """The value of m + n = 256 + 37 = 293, where a value is the reference."""
  left, *rest = chain.sides
  if {*chain.signs} != {"="} or not _has_names(left) or _has_names(gold):
    return None
  if not _is_asked(left, gold):
    return None
  return structure.Relation(chain.signs[1:], (*rest,)) if rest[1:] else rest[0]


def _is_asked(left: Node, gold: Node) -> bool:
  match left, gold:
    case Leaf(text=text, tree=tree, unit=""), _ if tree:
      inverse = type(gold) is Row and re.fullmatch(r"[A-Z] \^ \{ - 1 \}", text)
      return bool(inverse) or structure.is_asked(text, tree)
    case Row(), Row():
      rational = lambda x: isinstance(getattr(x, "tree", None), Fraction)
      return all(rational(x) or _is_asked(x, x) for x in left.items)
  return False


def _has_names(node: Node) -> bool:
  match node:
    case Leaf():
      return bool(variables(node.tree))
    case Items() | Row():
      return any(map(_has_names, node.items))
  return True


def _chain(
  chain: structure.Relation, ends: tuple[Node, Node], rule: LeafRule
) -> Answer:
  """Whether a = b = c is what stands on the other side.

  All parts must be equal, and differ in writing: 8 = 9, 8 = 8 and 8 = 8 cm are
  no calculations; 2 * 4 = 8 cm is.
  """
  bare = lambda x: dataclasses.replace(x, step=None) if type(x) is Leaf else x
  parts = [*map(bare, chain.sides)]
  if set(chain.signs) != {"="} or len(set(parts)) < len(parts):
    return False
  written = [part.unit if isinstance(part, Leaf) else "" for part in parts]
  if any(_is_base(b) and not a for a, b in itertools.pairwise(written)):
    return False  # 11 = 11_2; but 11_2 = 3
  units = {unit for unit in written if not _is_base(unit)}
  if len(units - {""}) > 1 or (units > {""} and not _ends_in_unit(chain.sides)):
    return False
  return _in_order((ends[0], *parts[:-1]), (ends[1], *parts[1:]), rule)


def _ends_in_unit(parts: Sequence[Node]) -> bool:
  """Whether only calculations leave out the unit, as in 2 * 3 = 6 cm."""
  leaves = [part for part in parts if isinstance(part, Leaf)]
  if len({leaf.text for leaf in leaves}) < len(parts) or not leaves[-1].unit:
    return False
  bare = [leaf.text for leaf in leaves if not leaf.unit]
  return not any(re.fullmatch(r"[-+ ]*[\d.,]+", text) for text in bare)


def _coordinates(node: Items) -> tuple[Row, ...]:
  """The tuple that x = 1, y = 2 names; y = 2, x = 1 may be (2, 1)."""
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
  kinds = {answer.kind, gold.kind}
  if len(kinds) > 1 and not kinds.isdisjoint(("union", "except")):
    return False
  a, g = answer.items, gold.items
  if _is_mixed(a, g):
    return _moduli(a) == _moduli(g) and _in_order(a, g, rule)
  names = lambda items: {x.name for x in items if isinstance(x, Assign)}
  few, many = sorted((len(names(a)), len(names(g))))
  if many > 1 and few == 0:
    # x=1, y=2 against 1, 2: the alphabet is all that can name them.
    if "set" in kinds:
      return False  # which has no order
    name = lambda item: item.name if isinstance(item, Assign) else ""
    return _in_order(sorted(a, key=name), sorted(g, key=name), rule)
  table = [[same(x, y, rule) for y in g] for x in a]
  if kinds in ({"set"}, {"except"}):
    return _covered(table, len(g))
  return _matched(table, len(g))


def _is_mixed(a: Sequence[Node], g: Sequence[Node]) -> bool:
  """Whether a modulus is not that of all elements; all may leave it out."""
  return any(len(set(_moduli(items))) > 1 for items in (a, g))


def _moduli(items: Sequence[Node]) -> list[str]:
  """The modulus of each element; one at the end is that of all before it."""
  leaves = [item.value if isinstance(item, Assign) else item for item in items]
  units = [leaf.unit if isinstance(leaf, Leaf) else "" for leaf in leaves]
  moduli = [unit if unit.startswith("(mod") else "" for unit in units]
  return moduli if any(moduli[:-1]) else moduli[-1:] * len(moduli)


def _covered(table: list[list[Answer]], columns: int) -> Answer:
  """Whether every row and every column of comparisons has an equality."""
  lines = [*table, *([row[j] for row in table] for j in range(columns))]
  if any(all(cell is False for cell in line) for line in lines):
    return False
  return all(any(cell is True for cell in line) for line in lines) or None


def _matched(table: list[list[Answer]], columns: int) -> Answer:
  free = [*range(columns)]
  open_rows = []
  for row in table:
    partner = next((j for j in free if row[j] is True), None)
    if partner is None:
      open_rows.append(row)
    else:
      free.remove(partner)
  left = [[row[j] for j in free] for row in open_rows]
  return len(table) == columns and _covered(left, len(free))
