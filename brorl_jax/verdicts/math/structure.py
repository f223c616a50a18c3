r"""Parses an answer: a number, a set, an interval, a matrix, words.

The parts of structures are structures; the leaves are expressions.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from brorl_jax.verdicts.math import expressions
from brorl_jax.verdicts.math.expressions import Token, Tree, Unreadable


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
  text: str  # its tokens, one way of writing it
  tree: Tree  # as `expressions.read` gives it, or None if that cannot read it
  unit: str = ""  # the unit of measurement, or ""
  # One unit of its last digit, if it is a number with a decimal point.
  step: Fraction | None = None
  fault: str = ""  # why it could not be read


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
  """Text without a number, in lower case if it is more than one letter."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
  """Elements in no order; "list" is 1, 2 or 1 or 2."""

  # "except" is all real numbers but these: \mathbb{R}\setminus\{2\}, x \ne 2.
  kind: Literal["list", "set", "union", "except"]
  items: tuple["Node", ...]
  choice: bool = False  # whether "or" stood between them


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """Elements in order: a tuple, an interval, a ratio, a row of a matrix."""

  open: str
  items: tuple["Node", ...]
  close: str


@dataclasses.dataclass(frozen=True, slots=True)
class Assign:
  """A variable with its value, its interval, or the chain x = 1/2 = 0.5."""

  name: str
  value: "Node"


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
  """Sides of an equation or inequality that assigns nothing, and the signs."""

  signs: tuple[str, ...]
  sides: tuple["Node", ...]


Node = Leaf | Words | Items | Row | Assign | Relation

_INFINITY = Leaf(r"\infty", ("constant", "infinity"))
_MINUS_INFINITY = Leaf(r"-\infty", ("-", ("constant", "infinity")))
_REALS = Row("(", (_MINUS_INFINITY, _INFINITY), ")")
_NAMED_SETS = {r"\emptyset": Items("set", ()), r"\mathbbR": _REALS}
_ALL_BUT = tuple((r"\mathbbR", minus, r"\{") for minus in (r"\setminus", "-"))
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_OPEN = ("(", "[", "{", r"\{", r"\langle")
_CLOSE = (")", "]", "}", r"\}", r"\rangle")
_SIGNS = r"""= < > \leq \geq \neq \approx \equiv \sim \to \rightarrow \mapsto
  \implies \Rightarrow \iff \simeq \cong \propto""".split()
_CURRENCIES = {r"\$": "dollar", "$": "dollar", "£": "£", "€": "€"}
_NAMED = re.compile(
  r"x|x\((?:-?[x1]|x\(-?[x1]\))\)|\((?:x,)+x,?\)|\(x\\circx\)\(-?[x1]\)"
)
_DERIVATIVE = re.compile(r"\\frac\{(d|\\partial)\w?\}\{\1\w\}[A-Za-z]?")
# The commands that a caption may have, and the words that it must not have.
_COMMANDS, _DENYING = expressions.table("captions.txt").split(";")
_SHOWN = expressions.LETTERS.union(expressions.MARKS, _COMMANDS.split())
_DENIED = re.compile(rf"\b(?:{'|'.join(_DENYING.split())})\b", re.I)
_LABEL = re.compile(r"(?i:\b\w - (?=coord|interc)|\bno \. (?=\w)|\^ \*)")
# One unknown: f(x), but not x(x+1); E[X], |S|, |A \cup B|, dy/dx, \cos A.
_UNKNOWN = re.compile(
  r"(?<!\S)(?:[A-Z]\S*|\\(?:Pr|det|gcd|lcm|mathbb\w|phi|sigma)|([a-z]\S*)) "
  r"(?:\^ (?:\{ - 1 \}|- 1) )?"
  r"(?:\( (?:(?!\1 )[^()]|\( (?:(?!\1 )[^()])*\))*+\)|\[ [^][]*\])"
  r"|[|[] (?:[A-Z](?![a-z])\S* |\\c[ua]p |\\vec (?:\w |\{ \w \} ))+[]|]"
  r"|\\frac \{ d (?:\w )?\} \{ d \w \}"
  r"|\\(?:sin|cos|tan) (?:[A-Z]\S*|\\[a-z]+)"
)
_EVENTS = ("P ", "p ", "n ", r"\Pr", r"\mathbbP")
_WORDS = re.compile(r"[A-Za-z]{3,}|no|No|NO|[A-Za-z]+(?: [A-Za-z]+)+")
_MIXED = re.compile(r"(?<![\w./}])(\d+) (\d+)/(\d+)(?![\w./])")


@functools.lru_cache(maxsize=2_048)
def parse(text: str) -> Node:
  r"""Parses a text that passed the gate.

    parse(r"0 < x \le 1")   # Assign("x", Row("(", (0, 1), "]"))
    parse(r"\{2, 1\}")      # Items("set", (2, 1))

  Raises Unreadable if a part is empty or brackets do not match. An unreadable
  expression is a leaf without a tree.
  """
  text = expressions.plain(text)
  if _WORDS.fullmatch(text):
    if text not in ("pi", "sqrt") and " or " not in f" {text} ":
      return Words(text.casefold())
  try:
    return _structure(expressions.tokens(_MIXED.sub(r"\1\\frac{\2}{\3}", text)))
  except RecursionError:
    raise Unreadable("too deep") from None


def _structure(part: Sequence[Token]) -> Node:
  if not part:
    raise Unreadable("an empty part")
  for form in (_several, _words, _united, _related, _ratio, _bracketed):
    node = form(part)
    if node is not None:
      return node
  return _leaf(part)


def _structures(parts: Sequence[Sequence[Token]]) -> tuple[Node, ...]:
  return tuple(map(_structure, parts))


def _nesting(token: Token) -> int:
  """1 for a bracket that opens, -1 for one that closes."""
  opens = token.text in _OPEN or token.text.startswith(r"\begin")
  return opens - (token.text in _CLOSE or token.text.startswith(r"\end"))


def _split(
  part: Sequence[Token], *texts: str
) -> tuple[list[Sequence[Token]], list[Token]]:
  """The pieces between separators outside all brackets, and the separators."""
  pieces, separators, start, depth = [], [], 0, 0
  for i, token in enumerate(part):
    depth += _nesting(token)
    if depth < 0:
      break
    if depth == 0 and token.text in texts:
      pieces.append(part[start:i])
      separators.append(token)
      start = i + 1
  if depth:
    raise Unreadable("brackets that do not match")
  return [*pieces, part[start:]], separators


def _is_around(part: Sequence[Token]) -> bool:
  """Whether the first bracket closes with the last one."""
  depths = [*itertools.accumulate(map(_nesting, part))]
  return 0 in depths and depths.index(0) == len(part) - 1


def _several(part: Sequence[Token]) -> Node | None:
  """1, 2 and 3; x < 1 or x > 2."""
  pieces, links = _split(part, ",", "or", "and", r"\lor", r"\land")
  if not links:
    return None
  # In "1, 2, and 3" the piece between the comma and "and" is empty.
  twice = lambda i: links[i - 1].text == "," and links[i].kind == "word"
  empty = [i for i in range(1, len(links)) if twice(i) and not pieces[i]]
  nodes = [_structure(p) for i, p in enumerate(pieces) if i not in empty]
  choice = any(link.text in ("or", r"\lor") for link in links)
  named = [node for node in nodes if isinstance(node, Assign)]
  if len(named) == len(nodes) and len({node.name for node in named}) == 1:
    values = tuple(node.value for node in named)
    if choice and all(isinstance(value, Row) for value in values):
      return Assign(named[0].name, _union(values, choice=True))
    some = [x for x in values if isinstance(x, Items) and x.kind == "except"]
    if not choice and len(some) == len(values):
      points = itertools.chain.from_iterable(x.items for x in some)
      return Assign(named[0].name, Items("except", tuple(points)))
  flat: list[Node] = []
  for node in nodes:
    inner = node.value if isinstance(node, Assign) else node
    is_list = isinstance(inner, Items) and inner.kind == "list"
    flat += inner.items if is_list else (node,)  # pyright: ignore
  return Items("list", tuple(flat), choice=choice)


def _flat(nodes: Sequence[Node]) -> tuple[Node, ...]:
  flat: list[Node] = []
  for node in nodes:
    several = isinstance(node, Items) and node.kind != "except"
    flat += node.items if several else (node,)  # pyright: ignore
  return tuple(flat)


def _words(part: Sequence[Token]) -> Node | None:
  words = [token.text for token in part if token.kind == "word"]
  marks = [token.text for token in part if token.kind != "word"]
  if not words or not {"-", "'", ".", "?"}.issuperset(marks):
    return None
  text = " ".join(words)
  return Words(text if len(text) == 1 else text.casefold())


def _united(part: Sequence[Token]) -> Node | None:
  r"""A \cup B; x \in A; all numbers but some."""
  pieces, separators = _split(part, r"\in")
  if len(separators) == 1 and (name := _name(pieces[0])):
    return Assign(name, _structure(pieces[1]))
  if tuple(token.text for token in part[:3]) in _ALL_BUT:
    without = _structure(part[2:]) if _is_around(part[2:]) else None
    if isinstance(without, Items) and without.kind == "set":
      return Items("except", without.items)
  pieces, separators = _split(part, r"\cup")
  if not separators or any(token.text == "|" for token in pieces[0]):
    return None
  nodes = _flat(_structures(pieces))
  points = all(isinstance(node, Leaf) for node in nodes)
  return Items("set", nodes) if points else _union(nodes)


def _union(values: tuple[Node, ...], *, choice: bool = False) -> Items:
  """Intervals side by side; (-oo, 2) and (2, oo) are all numbers but 2."""
  following = {
    _tree(row.items[0]): row.items[1]
    for row in values
    if isinstance(row, Row) and (row.open, row.close) == ("(", ")")
    if len(row.items) == 2
  }
  ends: list[Node] = [_MINUS_INFINITY]
  while _tree(ends[-1]) in following:
    ends.append(following.pop(_tree(ends[-1])))
  *points, last = map(_tree, ends[1:] or ends)
  # That they ascend is known of rational numbers, and of a single point.
  known = len(points) == 1 and points[0] != _INFINITY.tree
  if all(isinstance(point, Fraction) for point in points):
    known = points == sorted(points)  # pyright: ignore
  if known and last == _INFINITY.tree and len(ends) == len(values) + 1:
    return Items("except", tuple(ends[1:-1]))
  return Items("union", values, choice=choice)


def _tree(node: Node) -> object:
  """The tree of an expression; what has none is itself."""
  return node.tree if isinstance(node, Leaf) and node.tree is not None else node


def _related(part: Sequence[Token]) -> Node | None:
  sides, separators = _split(part, *_SIGNS)
  if not separators:
    return None
  signs = tuple(token.text for token in separators)
  names = [_name(side) for side in sides]
  if signs == ("=",):
    for name, value in ((names[0], sides[1]), (names[1], sides[0])):
      if name:
        return Assign(name, _structure(value))
  if names[0] and signs == (r"\equiv",):
    return Assign(names[0], _structure(sides[1]))
  if names[0] and signs == (r"\neq",):
    return Assign(names[0], Items("except", _flat([_structure(sides[1])])))
  if set(signs) == {"="} and (name := names[0] or _caption(sides[0])):
    values = _structures(sides[1:])
    return Assign(name, Relation(signs[1:], values) if signs[1:] else values[0])
  name = names[0] or names[1]
  if name and len(signs) == 1 and signs[0] in _FLIPPED:
    sign, end = signs[0], sides[0]
    if names[0]:  # x < 1 is 1 > x
      sign, end = _FLIPPED[sign], sides[1]
    up = sign in ("<", r"\leq")
    far = _INFINITY if up else _MINUS_INFINITY
    row = _interval(_structure(end), sign, "<" if up else ">", far)
    return Assign(name, row or far)
  if len(signs) == 2 and names[1] and _FLIPPED.keys() >= {*signs}:
    row = _interval(_structure(sides[0]), *signs, _structure(sides[2]))
    if row:
      return Assign(names[1], row)
  return Relation(signs, _structures(sides))


def _interval(start: Node, left: str, right: str, end: Node) -> Row | None:
  """Where x lies by start < x <= end or start > x >= end."""
  if {left, right} <= {">", r"\geq"}:
    start, left, right, end = end, _FLIPPED[right], _FLIPPED[left], start
  if not {left, right} <= {"<", r"\leq"}:
    return None
  opened, closed = "(" if left == "<" else "[", ")" if right == "<" else "]"
  return Row(opened, (start, end), closed)


def _name(part: Sequence[Token]) -> str | None:
  """The name on one side of an assignment: x, f(x), f(2), (x, y), dy/dx."""
  if part and part[0].text in expressions.MARKS:
    marks = ("{", "}", *expressions.MARKS)
    part = [token for token in part if token.text not in marks]
  form = ""  # a letter for a variable, as in x and f(x) and (x,y)
  for kind, text in part:
    letter = kind == "symbol" and text not in ("e", "i")
    sign = text if kind == "sign" else "1" if kind == "number" else "?"
    form += "x" if letter or text in expressions.LETTERS else sign
  name = "".join(token.text for token in part)
  return name if _NAMED.fullmatch(form) or _DERIVATIVE.fullmatch(name) else None


def _caption(part: Sequence[Token]) -> str | None:
  r"""What names a value and is no expression: P(X=2), \angle A, \text{Area}."""
  text = " ".join(token.text for token in part)
  try:
    expressions.read(part)
  except Unreadable:
    return text if is_asked(text, None) else None
  return None


def is_asked(text: str, tree: Tree) -> bool:
  r"""Whether a left side is a name or has several unknowns: m + n, but not 2x.

  A caption, which has no tree, must stand alone and deny or compare nothing:
  neither \text{Area}^2 nor \text{less than}.
  """
  units = {found[0] for found in _UNKNOWN.finditer(text)}
  rest = _UNKNOWN.sub("F", _LABEL.sub("", text)).split()
  said = " ".join([*rest, *(x for x in units if not x.startswith(_EVENTS))])
  letters = "".join(x for x in text.split() if len(x) == 1)
  if _DENIED.search(said) or re.search("isnt|not", letters) or rest[-1] == "!":
    return False
  if tree is None:
    named = [re.sub("(?<=.)[_'].*", "", x) for x in rest]
    return all(x[0].isalpha() or x in _SHOWN for x in named)
  names = expressions.variables(tree)
  count = len(units) + len(names.intersection(rest) if units else names)
  return count > 1 or tree[0] == "symbol" or units == {text}


def _ratio(part: Sequence[Token]) -> Node | None:
  part, unit = _without_unit(part)
  pieces, separators = _split(part, ":")
  # 1:00 p.m. differs from 1:00 a.m.
  return Row(f":{unit}", _structures(pieces), ":") if separators else None


def _bracketed(part: Sequence[Token]) -> Node | None:
  first, last = part[0].text, part[-1].text
  named = first in _NAMED_SETS or first[:7] in (r"\mathbb", r"\ldots")
  if len(part) == 1 and named:
    return _NAMED_SETS.get(first, Words(first))
  if first.startswith(r"\begin"):
    return _matrix(part)
  if last not in _CLOSE or not _is_around(part):
    return None
  inside = part[1:-1]
  if (first, last) == (r"\{", r"\}"):
    return _set(inside)
  if (first, last) == ("{", "}"):
    return _structure(inside)
  pieces, commas = _split(inside, ",")
  if commas:
    if (first, last) == (r"\langle", r"\rangle"):
      first, last = "(", ")"  # a vector
    return Row(first, _structures(pieces), last)
  matrix = first + last == "[]" and inside and inside[0].text[:6] == r"\begin"
  # Brackets around the whole part, not around a factor of an expression.
  return _structure(inside) if matrix or first + last == "()" else None


def _set(inside: Sequence[Token]) -> Node:
  if not inside:
    return Items("set", ())
  pieces, separators = _split(inside, "|", ":")
  if len(separators) == 1 and pieces[0] and pieces[1]:
    # {x : 0 < x < 1}, {x \in R | ...}: the condition is the set.
    left, right = _structures(pieces)
    names = {_name(pieces[0])}
    if isinstance(left, Assign) and left.value == _REALS:
      names.add(left.name)
    if isinstance(right, Assign) and right.name in names:
      return right
    raise Unreadable("a set given by a condition")
  node = _structure(inside)
  if isinstance(node, Items) and node.kind == "list":
    return Items("set", node.items)
  return Items("set", (node,))


def _matrix(part: Sequence[Token]) -> Node | None:
  kind = part[0].text.removeprefix(r"\begin")
  if part[-1].text != rf"\end{kind}" or not _is_around(part):
    return None
  inside, kind = part[1:-1], kind.removesuffix("*")
  if kind == "array" and inside and inside[0].text == "{":
    end = next(i for i, token in enumerate(inside) if token.text == "}")
    inside, kind = inside[end + 1 :], "matrix"
  rows, _ = _split(inside, r"\\")
  if len(rows) > 1 and not rows[-1]:
    rows = rows[:-1]
  cells = [_split(row, "&")[0] for row in rows]
  made = tuple(Row("&", _structures(row), "&") for row in cells)
  if kind.endswith("matrix") and kind[0] not in "vV":
    kind = "matrix"  # brackets of all forms are equal; bars are a determinant
  return Row(kind, made, "matrix")


def _leaf(part: Sequence[Token]) -> Node:
  """An expression; one that cannot be read has no tree but a fault."""
  signed = [i for i, token in enumerate(part) if token.text in (r"\pm", r"\mp")]
  if len(signed) == 1:
    before, after = part[: signed[0]], part[signed[0] + 1 :]
    both = (_leaf([*before, Token("sign", sign), *after]) for sign in "+-")
    return Items("list", tuple(both))
  bare, unit = _without_unit(part)
  try:
    tree = expressions.read(bare)
  except Unreadable as error:
    text = " ".join(token.text for token in part)
    return Leaf(text, None, fault=str(error))
  digits = [token for token in bare if token.text not in "+-"]
  step = None
  based = unit.startswith("(base")  # its last digit is not a tenth
  if len(digits) == 1 and digits[0].kind == "number" and not based:
    step = expressions.decimal_step(digits[0].text)
  return Leaf(" ".join(token.text for token in bare), tree, unit, step)


def _without_unit(part: Sequence[Token]) -> tuple[Sequence[Token], str]:
  for mark, rest in ((part[0], part[1:]), (part[-1], part[:-1])):
    if rest and mark.text in _CURRENCIES:
      return rest, _CURRENCIES[mark.text]
  end = next((i for i, t in enumerate(part) if t.kind == "word"), len(part))
  bare, words = part[:end], part[end:]
  if not bare:
    return part, ""
  unit = ""
  if words:
    canon = expressions.canonical_unit(" ".join(token.text for token in words))
    if canon is None:
      return part, ""
    if canon == "percent":
      return [*bare, Token("sign", "%")], ""
    unit = canon
  texts = [token.text for token in bare]
  for form in expressions.DEGREES:
    if tuple(texts[-len(form) :]) == form and len(texts) > len(form):
      # Inside an expression a degree is a number, pi / 180.
      inside = not {"+", "-", "*", "/"}.isdisjoint(texts[1 : -len(form)])
      if not inside and expressions.FUNCTIONS.isdisjoint(texts):
        return bare[: -len(form)], f"degree {unit}".strip()
  return bare, unit
