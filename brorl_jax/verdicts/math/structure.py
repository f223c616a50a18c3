r"""Parses an answer: a number, a set, an interval, a matrix, words.

  parse(r"0 < x \le 1")   # Assign("x", Row("(", (0, 1), "]"))
  parse(r"\{2, 1\}")      # Items("set", (2, 1))

The elements of structures are structures; the leaves are expressions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TypeGuard

from brorl_jax.verdicts.math import reader
from brorl_jax.verdicts.math.nodes import (
  FLIPPED,
  REALS,
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
  Unreadable,
  Words,
  between,
  ray,
  union,
)
from brorl_jax.verdicts.math.tokens import (
  LETTERS,
  Token,
  is_unit,
  plain,
  tokens,
)

_OPEN, _CLOSE = ("(", "[", "{", r"\{", r"\langle"), (
  ")", "]", "}", r"\}", r"\rangle")  # fmt: skip
_SIGNS = (
  "=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\equiv", r"\sim",
  r"\to", r"\rightarrow", r"\mapsto", r"\implies", r"\Rightarrow", r"\iff",
  r"\simeq", r"\cong", r"\propto",
)  # fmt: skip
_NAMED = re.compile(r"x|x\(x\)|\((?:x,)+x,?\)")
_WORDS = re.compile(r"[A-Za-z]{3,}|no|No|NO|[A-Za-z]+(?: [A-Za-z]+)+")


@functools.lru_cache(maxsize=2_048)
def parse(text: str) -> Node:
  """Parses a text that passed the gate.

  Raises:
    Unreadable: A part is empty, or brackets do not match. An unreadable
      expression is a leaf without a tree.
  """
  text = plain(text)
  if _WORDS.fullmatch(text) and not is_unit(text):
    if text not in ("pi", "sqrt") and " or " not in f" {text} ":
      return Words(text.casefold())
  try:
    return _structure(tokens(_mixed(text)))
  except RecursionError:
    raise Unreadable("too deep") from None


def _mixed(text: str) -> str:
  r"""`1 1/2` as LaTeX writes it."""
  return re.sub(
    r"(?<![\w./}])(\d+) (\d+)/(\d+)(?![\w./])", r"\1\\frac{\2}{\3}", text
  )


def _structure(part: Sequence[Token]) -> Node:
  if not part:
    raise Unreadable("an empty part")
  for read in (_several, _words, _united, _related, _ratio, _bracketed):
    node = read(part)
    if node is not None:
      return node
  return reader.leaf(part)


def _split(
  part: Sequence[Token], is_separator: Callable[[Token], bool]
) -> tuple[list[Sequence[Token]], list[Token]]:
  """The pieces between separators outside all brackets, and the separators."""
  pieces, separators, start, depth = [], [], 0, 0
  for i, token in enumerate(part):
    if token.kind in ("sign", "command"):
      if token.text in _OPEN or token.text.startswith(r"\begin"):
        depth += 1
      elif token.text in _CLOSE or token.text.startswith(r"\end"):
        depth -= 1
        if depth < 0:
          raise Unreadable("brackets that do not match")
    if depth == 0 and is_separator(token):
      pieces.append(part[start:i])
      separators.append(token)
      start = i + 1
  if depth:
    raise Unreadable("brackets that do not match")
  return [*pieces, part[start:]], separators


def _is(*texts: str) -> Callable[[Token], bool]:
  return lambda token: token.kind in ("sign", "command") and token.text in texts


def _is_link(token: Token) -> bool:
  if token.kind == "word":
    return token.text.casefold() in ("or", "and")
  return _is(",", r"\lor", r"\land")(token)


def _several(part: Sequence[Token]) -> Node | None:
  """1, 2 and 3; x < 1 or x > 2."""
  pieces, links = _split(part, _is_link)
  if not links:
    return None
  # In "1, 2, and 3" the piece between the comma and "and" is empty.
  kept = _without_empty(pieces, links)
  choice = any(link.text.casefold() in ("or", r"\lor") for link in links)
  nodes = tuple(_structure(piece) for piece in kept)
  named = [node for node in nodes if isinstance(node, Assign)]
  if len(named) == len(nodes) and len({node.name for node in named}) == 1:
    values = tuple(node.value for node in named)
    if choice and all(isinstance(value, Row) for value in values):
      return Assign(named[0].name, union(values, choice=True))
    points = [value.items for value in values if _is_except(value)]
    if not choice and len(points) == len(values):
      return Assign(named[0].name, Items("except", sum(points, ())))
  flat: list[Node] = []
  for node in nodes:
    inner = node.value if isinstance(node, Assign) else node
    is_list = isinstance(inner, Items) and inner.kind == "list"
    flat += inner.items if is_list else (node,)  # pyright: ignore
  return Items("list", tuple(flat), choice=choice)


def _is_except(node: Node) -> TypeGuard[Items]:
  return isinstance(node, Items) and node.kind == "except"


def _flat(nodes: Sequence[Node]) -> tuple[Node, ...]:
  """Flattens lists and sets."""
  flat: list[Node] = []
  for node in nodes:
    if isinstance(node, Items) and node.kind != "except":
      flat += node.items
    else:
      flat.append(node)
  return tuple(flat)


def _without_empty(
  pieces: Sequence[Sequence[Token]], links: Sequence[Token]
) -> list[Sequence[Token]]:
  kept = []
  for i, piece in enumerate(pieces):
    between = 0 < i < len(links) and links[i - 1].text == ","
    if piece or not between or links[i].kind != "word":
      kept.append(piece)
  return kept


def _words(part: Sequence[Token]) -> Node | None:
  if all(
    token.kind == "word" or token.text in ("-", "'", ".", "?") for token in part
  ) and any(token.kind == "word" for token in part):
    words = [token.text for token in part if token.kind == "word"]
    if len(words) == 1 and len(words[0]) == 1:
      return Words(words[0])
    return Words(" ".join(words).casefold())
  return None


def _united(part: Sequence[Token]) -> Node | None:
  r"""A \cup B; x \in A; all numbers but some."""
  pieces, separators = _split(part, _is(r"\in"))
  if len(separators) == 1 and (name := _name(pieces[0])):
    return Assign(name, _structure(pieces[1]))
  texts = [token.text for token in part]
  minus = texts[:1] == [r"\mathbbR"] and texts[1:2] in ([r"\setminus"], ["-"])
  if minus and texts[2:3] == [r"\{"] and _is_around(part[2:]):
    without = _structure(part[2:])
    if isinstance(without, Items) and without.kind == "set":
      return Items("except", without.items)
  pieces, separators = _split(part, _is(r"\cup"))
  if not separators:
    return None
  nodes = _flat([_structure(piece) for piece in pieces])
  if all(isinstance(n, Leaf) for n in nodes):
    return Items("set", nodes)
  return union(nodes)


def _related(part: Sequence[Token]) -> Node | None:
  sides, separators = _split(part, _is(*_SIGNS))
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
  if names[0] and set(signs) == {"="}:
    rest = tuple(_structure(side) for side in sides[1:])
    return Assign(names[0], Relation(signs[1:], rest))
  if len(signs) == 1 and signs[0] in FLIPPED and any(names):
    if names[0]:
      return ray(names[0], signs[0], _structure(sides[1]))
    return ray(names[1] or "", FLIPPED[signs[0]], _structure(sides[0]))
  if len(signs) == 2 and names[1] and all(sign in FLIPPED for sign in signs):
    low, high = _structure(sides[0]), _structure(sides[2])
    left, right = signs
    if {left, right} <= {">", r"\geq"}:
      low, high, left, right = high, low, FLIPPED[right], FLIPPED[left]
    if {left, right} <= {"<", r"\leq"}:
      return between(names[1], left, low, high, right)
  return Relation(signs, tuple(_structure(side) for side in sides))


def _name(part: Sequence[Token]) -> str | None:
  """The name on one side of an assignment: x, f(x), (x, y)."""
  texts = [token.text for token in part]
  # A letter for a variable, as in x and f(x) and (x,y).
  form = "".join(
    "x" if _is_variable(t) else t.text if t.kind == "sign" else "?"
    for t in part
  )
  return "".join(texts) if _NAMED.fullmatch(form) else None


def _is_variable(token: Token) -> bool:
  if token.kind == "symbol":
    return token.text not in ("e", "i")
  return token.kind == "command" and token.text in LETTERS


def _ratio(part: Sequence[Token]) -> Node | None:
  part, unit = reader.without_unit(part)
  pieces, separators = _split(part, _is(":"))
  if not separators:
    return None
  row = Row(":", tuple(_structure(piece) for piece in pieces), ":")
  # 1:00 p.m. differs from 1:00 a.m.
  return Row(f":{unit}", row.items, ":") if unit else row


def _bracketed(part: Sequence[Token]) -> Node | None:
  first, last = part[0].text, part[-1].text
  if part[0].kind == "command":
    if first == r"\emptyset" and len(part) == 1:
      return Items("set", ())
    if first == r"\mathbbR" and len(part) == 1:
      return REALS
    if first.startswith(r"\begin"):
      return _matrix(part)
  if first not in _OPEN or last not in _CLOSE or not _is_around(part):
    return None
  inside = part[1:-1]
  if first == r"\{" and last == r"\}":
    return _set(inside)
  if first == "{" and last == "}":
    return _structure(inside)
  pieces, commas = _split(inside, _is(","))
  if commas:
    return Row(first, tuple(_structure(piece) for piece in pieces), last)
  if (first, last) == ("(", ")"):
    # Brackets around the whole part, not around a factor of an expression.
    return _structure(inside)
  return None


def _is_around(part: Sequence[Token]) -> bool:
  """Whether the first bracket closes with the last one."""
  depth = 0
  for i, token in enumerate(part):
    if token.text in _OPEN or token.text.startswith(r"\begin"):
      depth += 1
    elif token.text in _CLOSE or token.text.startswith(r"\end"):
      depth -= 1
    if depth == 0:
      return i == len(part) - 1
  return False


def _set(inside: Sequence[Token]) -> Node:
  if not inside:
    return Items("set", ())
  pieces, separators = _split(inside, _is("|", ":"))
  if len(separators) == 1 and pieces[0] and pieces[1]:
    # {x : 0 < x < 1}, {x \in R | ...}: the condition is the set.
    left, right = _structure(pieces[0]), _structure(pieces[1])
    names = {_name(pieces[0])}
    if isinstance(left, Assign) and left.value == REALS:
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
  # Round and square brackets are equal; bars are a determinant.
  same = {"bmatrix": "matrix", "pmatrix": "matrix", "smallmatrix": "matrix"}
  inside = part[1:-1]
  if kind == "array" and inside and inside[0].text == "{":
    end = next(i for i, token in enumerate(inside) if token.text == "}")
    inside, kind = inside[end + 1 :], "matrix"
  rows, _ = _split(inside, _is(r"\\"))
  if len(rows) > 1 and not rows[-1]:
    rows = rows[:-1]
  cells = [_split(row, _is("&"))[0] for row in rows]
  return Row(
    same.get(kind, kind),
    tuple(Row("&", tuple(_structure(c) for c in row), "&") for row in cells),
    "matrix",
  )
