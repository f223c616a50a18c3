r"""The domain of mathematics, and checks that reference answers are usable.

A reference must equal itself and nothing trivial. A reference that everything
equals, or nothing, trains the policy on noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from brorl_jax.verdicts import fields
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.domain import Domain, Field
from brorl_jax.verdicts.math import extract, gate, verifier
from brorl_jax.verdicts.math.nodes import (
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
  Tree,
  Unreadable,
  Words,
)
from brorl_jax.verdicts.math.structure import parse
from brorl_jax.verdicts.sandbox.jail import Jail

_MAX_WORDS = 4
_MISSING = ("nan", "null")
_OF_SENTENCES = frozenset("is are was answer equals therefore".split())


def check_reference(gold: str, *, jail: Jail | None = None) -> str:
  r"""Checks a reference answer and returns it as `verify` takes it.

  Args:
    gold: The reference, with or without a box.
    jail: As for `verify`.

  Returns:
    The reference without its box and outer spaces.

  Raises:
    ValueError: It is empty, unreadable, ambiguous ("4 or 5") or a sentence,
      does not equal itself, or wrongly equals 0, 1 or its negation. The message
      is one line.
  """
  if not isinstance(gold, str):
    raise ValueError(f"gold is a {type(gold).__name__}; use a text")
  bare = extract.unboxed(gold)
  if not bare:
    raise ValueError("gold is empty; write the reference answer")
  _, marks, last = bare.rpartition("####")
  if marks:
    raise ValueError(
      f"gold = {gold[:80]!r}: a solution with its answer after '####', as in"
      f" GSM8K; write only {last.strip()[:80]!r}"
    )
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
  if verifier.verify(box, clean, jail=jail).status != "pass":
    raise _refused(gold, "it does not equal itself")
  for trivial in ("0", "1"):
    if _value(node) != Fraction(trivial) and _passes(trivial, clean, jail):
      raise _refused(gold, f"{trivial} equals it")
  if _value(node) != 0 and isinstance(_bare(node), Leaf):
    leaf = _bare(node)
    assert isinstance(leaf, Leaf)
    if leaf.tree is not None and _passes(f"-({leaf.text})", clean, jail):
      raise _refused(gold, "its negation equals it")
  return clean


def _refused(gold: str, reason: str) -> ValueError:
  return ValueError(
    f"gold = {gold[:80]!r}: {reason}; correct it or drop the line"
  )


def _passes(answer: str, gold: str, jail: Jail | None) -> bool:
  verdict = verifier.verify(f"\\boxed{{{answer}}}", gold, jail=jail)
  return verdict.status == "pass"


def _bare(node: Node) -> Node:
  return node.value if isinstance(node, Assign) else node


def _value(node: Node) -> Tree:
  bare = _bare(node)
  if isinstance(bare, Items) and bare.kind == "set" and len(bare.items) == 1:
    bare = bare.items[0]
  if isinstance(bare, Relation):  # a chain is its last part
    bare = bare.sides[-1]
  return bare.tree if isinstance(bare, Leaf) else None


def _fault(node: Node) -> str:
  """The error in the structure of a reference, or ""."""
  if isinstance(node, Words):
    words = node.text.split()
    if node.text in _MISSING:
      return "it marks a missing value"
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


def _verify(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return verifier.verify(response, entry["answer"], jail=jail)


def _entry(record: Mapping[str, Any]) -> Mapping[str, Any]:
  return {"answer": check_reference(record["answer"])}


DOMAIN = Domain(
  name="math",
  verify=_verify,
  fields={"answer": Field(fields.answer)},
  check_reference=_entry,
  needs_jail="libraries",
  one_answer=True,
)
