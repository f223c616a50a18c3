r"""Scores answers to math questions, and checks that references are usable.

  verify(r"... so \boxed{\frac12}", "0.5").status    # "pass"

The answer is the last complete box after the thinking. A gate in linear time,
without libraries, refuses unsafe text (`gate`). The answer is then parsed
(`structure`) and compared exactly (`compare`). Equality of expressions that are
not fractions is left to a sandboxed worker with a deadline (`symbolic`).

A reference must equal itself and nothing trivial. A reference that everything
equals, or nothing, trains the policy on noise.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Field, Verdict, judged
from brorl_jax.verdicts.math import compare, gate
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
from brorl_jax.verdicts.math.tokens import plain
from brorl_jax.verdicts.sandbox.jail import Jail, mine

DEADLINE = 3.0  # seconds in the jail; the slowest honest pair took 0.2
_KNOWN_PAIRS = 16_384
_MAX_WORDS = 4
_MISSING = ("nan", "null")
_OF_SENTENCES = frozenset("is are was answer equals therefore".split())


def verify(response: str, gold: str, *, jail: Jail | None = None) -> Verdict:
  r"""Scores a response by a reference answer.

  Rules of equality:
    numbers by value: 0.5, 1/2, 50\% are equal; 60\% equals 0.6 but not 60
    a chain by its last part, if all its parts are equal: 3/5 = 0.6 equals 0.6
    digits with their base, which an answer may leave out: 1011 equals 1011_2,
      but 11 does not; x \equiv 3 \pmod 7 equals 3
    a reference with a decimal point and at least four significant digits equals
      whatever rounds to it: 3.14159 equals \pi; others are exact: 3.14 does not
    units may be left out but not changed: 5 cm equals 5 but not 5 m
    x = 5 equals 5 but not y = 5; an equation equals its multiples
    sets and lists in any order; tuples, ratios and matrices in order; intervals
      by their ends, also as inequalities; \pm 2 equals 2, -2; x \ne 2 equals
      \mathbb{R}\setminus\{2\}; x = 1, y = 2 equals (1, 2)
    words ignore case; letters of choices do not
    expressions that have the same value wherever both are defined

  Args:
    gold: The reference answer, as `check_reference` returns it.
    jail: Where "symbolic" runs, if the exact comparison does not decide; None:
      this thread's jail.

  Returns:
    "pass" or "fail"; "invalid" if the jail failed.
  """
  answer = gate.boxed(response)
  if answer is None:
    return judged("no answer", "")
  shown = answer[: gate.MAX_LENGTH]
  if not answer or answer.isspace():
    return judged("empty answer", shown)
  clean, reason = gate.screen(answer)
  if reason:
    return judged(f"refused: {reason}", shown)
  wanted = _clean_gold(gold)
  equal, reason = _exactly(clean, wanted)
  if equal is None:
    try:
      equal = _symbolically(clean, wanted, jail)
    except RuntimeError as error:
      return Verdict("invalid", 0.0, f"verifier failed: {error}", shown)
  return judged("" if equal else reason or "wrong answer", shown)


@functools.lru_cache(maxsize=_KNOWN_PAIRS)
def _clean_gold(gold: str) -> str:
  clean, reason = gate.screen(gate.unboxed(gold))
  if reason:
    raise ValueError(f"gold = {gold[:80]!r}: {reason}; correct it")
  return clean


@functools.lru_cache(maxsize=_KNOWN_PAIRS)
def _exactly(answer: str, gold: str) -> tuple[compare.Answer, str]:
  """The exact verdict, None if undecided, and the reason of a failure."""
  try:
    right = parse(gold)
  except Unreadable:
    right = None
  if plain(answer) == plain(gold):
    return True, ""
  if right is None:
    return False, "wrong answer"
  try:
    given = parse(answer)
  except Unreadable as error:
    return False, f"unreadable: {error}"
  equal = _readings(answer, given, gold, right)
  why = _unread(given)
  if equal is not False or not why:
    return equal, ""
  return (
    False,
    f"refused: {why}" if why == "too large" else f"unreadable: {why}",
  )


def _readings(
  answer: str, given: Node, gold: str, right: Node
) -> compare.Answer:
  """1,234 is a number or a list of two; either reading may be equal."""
  answers = [given, *_thousands(answer)]
  references = [right, *_thousands(gold)]
  equal: compare.Answer = False
  for a in answers:
    for g in references:
      pair_equal = compare.same(a, g, _undecided)
      if pair_equal:
        return True
      if pair_equal is None:
        equal = None
  return equal


def _thousands(text: str) -> list[Node]:
  bare = plain(text).replace(r"\$", "")
  if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\D{0,40}", bare):
    return [parse(plain(text).replace(",", ""))]
  return []


def _undecided(answer: Leaf, gold: Leaf) -> compare.Answer:
  """Leaves are undecided outside the jail, unless one is unreadable."""
  return False if answer.tree is None or gold.tree is None else None


def _unread(node: Node) -> str:
  """Why a part of the answer could not be read, or ""."""
  match node:
    case Leaf():
      return node.why if node.tree is None else ""
    case Assign():
      return _unread(node.value)
    case Items() | Row():
      return next(filter(None, map(_unread, node.items)), "")
    case Relation():
      return next(filter(None, map(_unread, node.sides)), "")
  return ""


_known: dict[tuple[str, str], bool] = {}


def _symbolically(answer: str, gold: str, jail: Jail | None) -> bool:
  """Asks the jail once per pair; failures are not cached."""
  pair = (answer, gold)
  if pair not in _known:
    jail = mine() if jail is None else jail
    equal = bool(jail.ask("symbolic", answer, gold, timeout=DEADLINE))
    while len(_known) >= _KNOWN_PAIRS:
      _known.pop(next(iter(_known)), None)
    _known[pair] = equal
  return _known[pair]


# References.


def check_reference(gold: str, *, jail: Jail | None = None) -> str:
  r"""Checks a reference answer and returns it as `verify` takes it.

  Returns:
    The reference without its box and outer spaces.

  Raises:
    ValueError: It is empty, unreadable, ambiguous ("4 or 5") or a sentence,
      does not equal itself, or wrongly equals 0, 1 or its negation. The message
      is one line.
  """
  if not isinstance(gold, str):
    raise ValueError(f"gold is a {type(gold).__name__}; use a text")
  bare = gate.unboxed(gold)
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
  if not _passes(clean, clean, jail):
    raise _refused(gold, "it does not equal itself")
  for trivial in ("0", "1"):
    if _value(node) != Fraction(trivial) and _passes(trivial, clean, jail):
      raise _refused(gold, f"{trivial} equals it")
  leaf = node.value if isinstance(node, Assign) else node
  if isinstance(leaf, Leaf) and leaf.tree is not None and _value(node) != 0:
    if _passes(f"-({leaf.text})", clean, jail):
      raise _refused(gold, "its negation equals it")
  return clean


def _refused(gold: str, reason: str) -> ValueError:
  return ValueError(
    f"gold = {gold[:80]!r}: {reason}; correct it or drop the line"
  )


def _passes(answer: str, gold: str, jail: Jail | None) -> bool:
  verdict = verify(f"\\boxed{{{answer}}}", gold, jail=jail)
  return verdict.status == "pass"


def _value(node: Node) -> Tree:
  node = node.value if isinstance(node, Assign) else node
  node = compare.single(node) or node
  node = node.sides[-1] if isinstance(node, Relation) else node  # of a chain
  return node.tree if isinstance(node, Leaf) else None


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
  if isinstance(node, Items | Row):
    if isinstance(node, Items) and node.choice and node.kind == "list":
      return "it offers a choice"
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


DOMAIN = Domain(
  name="math",
  verify=lambda response, entry, jail: verify(
    response, entry["answer"], jail=jail
  ),
  fields={"answer": Field(strict_json.answer)},
  check_reference=lambda record: {"answer": check_reference(record["answer"])},
  needs_jail="libraries",
  one_answer=True,
)
