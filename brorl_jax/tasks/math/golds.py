r"""Gold answers, before a run starts: each must be usable.

A gold must verify against itself and against nothing trivial; a gold that
anything equals, or nothing, trains the policy on noise.
"""

from __future__ import annotations

from fractions import Fraction

from brorl_jax.tasks.math import exact, extract, gate, judging
from brorl_jax.tasks.math.nodes import (
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
  Words,
)
from brorl_jax.tasks.math.structure import parse
from brorl_jax.tasks.math.tokens import Unreadable

_MAX_WORDS = 4
_MISSING = ("nan", "null")
_OF_SENTENCES = frozenset("is are was answer equals therefore".split())


def check_gold(gold: str, *, jail: judging.Jail | None = None) -> str:
  r"""The gold as `verify` takes it.

  Args:
    gold: As a data set has it, with or without a box around it.
    jail: As for `verify`.

  Returns:
    The gold without its box and outer spaces.

  Raises:
    ValueError: One line, if it is empty, cannot be read, hedges ("4 or 5"), is
      a sentence, is not equal to itself, or equals 0, 1 or its negation without
      being that.
  """
  if not isinstance(gold, str):
    raise ValueError(f"gold is a {type(gold).__name__}; it must be text")
  bare = extract.unboxed(gold)
  if not bare:
    raise ValueError("gold is empty; give the right answer")
  clean, reason = gate.screen(bare)
  if reason:
    raise _refused(gold, reason)
  try:
    node = parse(clean)
  except Unreadable as error:
    raise _refused(gold, f"unreadable: {error}") from None
  if reason := _fault(node):
    raise _refused(gold, reason)
  box = f"\\boxed{{{clean}}}"
  if judging.verify(box, clean, jail=jail).status != "pass":
    raise _refused(gold, "it does not verify against itself")
  for trivial in ("0", "1"):
    if _value(node) != Fraction(trivial) and _passes(trivial, clean, jail):
      raise _refused(gold, f"{trivial} verifies against it")
  if _value(node) != 0 and isinstance(_bare(node), Leaf):
    leaf = _bare(node)
    assert isinstance(leaf, Leaf)
    if leaf.tree is not None and _passes(f"-({leaf.text})", clean, jail):
      raise _refused(gold, "its negation verifies against it")
  return clean


def _refused(gold: str, reason: str) -> ValueError:
  return ValueError(
    f"gold {gold[:80]!r} cannot be used: {reason}; correct it or drop the line"
  )


def _passes(answer: str, gold: str, jail: judging.Jail | None) -> bool:
  verdict = judging.verify(f"\\boxed{{{answer}}}", gold, jail=jail)
  return verdict.status == "pass"


def _bare(node: Node) -> Node:
  return node.value if isinstance(node, Assign) else node


def _value(node: Node) -> exact.Tree:
  bare = _bare(node)
  if isinstance(bare, Items) and bare.kind == "set" and len(bare.items) == 1:
    bare = bare.items[0]
  if isinstance(bare, Relation):  # a chain is its last part
    bare = bare.sides[-1]
  return bare.tree if isinstance(bare, Leaf) else None


def _fault(node: Node) -> str:
  """What is wrong with a gold's structure, or ""."""
  if isinstance(node, Words):
    words = node.text.split()
    if node.text in _MISSING:
      return "it is what a table has where a value is missing"
    if len(words) > _MAX_WORDS or not _OF_SENTENCES.isdisjoint(words):
      return "it is a sentence"
    return ""
  if isinstance(node, Assign):
    return _fault(node.value)
  if isinstance(node, Items):
    if node.choice and node.kind == "list":
      return "it offers a choice"
    parts = node.items
  elif isinstance(node, Row):
    parts = node.items
  elif isinstance(node, Relation):
    parts = node.sides
    values = {part.tree for part in parts if isinstance(part, Leaf)}
    numbers = all(isinstance(value, Fraction) for value in values)
    if set(node.signs) == {"="} and numbers and len(values) > 1:
      return "its parts are not equal"
  else:
    return f"unreadable: {node.why}" if node.tree is None else ""
  return next(filter(None, map(_fault, parts)), "")
