r"""Verdicts on answers to questions of mathematics.

  verify(r"... so \boxed{\frac12}", "0.5").status    # "pass"

The answer is the last complete box after the thinking (`extract`). It passes a
gate that is linear and has no library behind it (`gate`), is read to a
structure (`structure`), and compared exactly (`compare`, `exact`). What is left
open, an equality of expressions that are no fractions, is asked of a jailed
worker that is killed when it is late (`symbolic`).
"""

from __future__ import annotations

import functools
import re

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.math import compare, extract, gate
from brorl_jax.tasks.math.nodes import (
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
)
from brorl_jax.tasks.math.structure import parse
from brorl_jax.tasks.math.tokens import Unreadable, plain
from brorl_jax.tasks.sandbox.jail import Jail, mine

DEADLINE = 3.0  # seconds for the jailed part; its slowest honest pair took 0.2
_KNOWN_PAIRS = 16_384


def verify(response: str, gold: str, *, jail: Jail | None = None) -> Verdict:
  r"""Judges a response by a gold answer.

  What is equal:
    numbers by value: 0.5, 1/2, 50\%; 60\% is 0.6 and not 60, for a gold is
      not known to have lost its sign, and 0.5\% must not be 0.5
    a chain by its last part, if all its parts are equal: 3/5 = 0.6 is 0.6
    digits with their base, which may be left out for a gold that has one:
      1011 is 1011_2, and 11 is not; x \equiv 3 \pmod 7 is 3
    a gold with a decimal point and at least four significant digits, by what
      rounds to it: 3.14159 is \pi; all others exactly: 3.14 is not
    units may be left out and not exchanged: 5 cm is 5 and not 5 m
    x = 5 is 5, and not y = 5; an equation is its multiples
    sets and lists in any order; tuples, ratios, matrices in theirs; intervals
      by their ends, as inequalities too; \pm 2 is 2, -2; x \ne 2 is
      \mathbb{R}\setminus\{2\}; x = 1, y = 2 is (1, 2)
    words without case; the letter of a choice with it
    expressions that have one value wherever both are defined

  Args:
    response: Everything the policy wrote. Never executed.
    gold: The right answer, as `check_gold` accepts it.
    jail: Answers `ask("symbolic", ...)`; the thread's own if None, and only
      if the exact comparison leaves it open.

  Returns:
    A pass or a fail. Invalid if the jailed part failed.
  """
  answer = extract.boxed(response)
  if answer is None:
    return Verdict("fail", 0.0, "no answer", "")
  shown = answer[: gate.MAX_LENGTH]
  if not answer or answer.isspace():
    return Verdict("fail", 0.0, "empty answer", shown)
  clean, reason = gate.screen(answer)
  if reason:
    return Verdict("fail", 0.0, f"refused: {reason}", shown)
  wanted = _clean_gold(gold)
  found, reason = _exactly(clean, wanted)
  if found is None:
    try:
      found = _symbolically(clean, wanted, jail)
    except RuntimeError as error:
      return Verdict("invalid", 0.0, f"verifier failed: {error}", shown)
  if found:
    return Verdict("pass", 1.0, "", shown)
  return Verdict("fail", 0.0, reason or "wrong answer", shown)


@functools.lru_cache(maxsize=16_384)
def _clean_gold(gold: str) -> str:
  clean, reason = gate.screen(extract.unboxed(gold))
  if reason:
    raise ValueError(f"gold {gold[:80]!r} is refused: {reason}; correct it")
  return clean


@functools.lru_cache(maxsize=_KNOWN_PAIRS)
def _exactly(answer: str, gold: str) -> tuple[compare.Answer, str]:
  """The verdict without the jail, or None, and a reason for a False."""
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
  found = _readings(answer, given, gold, right)
  why = _unread(given)
  if found is not False or not why:
    return found, ""
  return (
    False,
    f"refused: {why}" if why == "too large" else f"unreadable: {why}",
  )


def _readings(
  answer: str, given: Node, gold: str, right: Node
) -> compare.Answer:
  """1,234 is a number and a list of two: equal in either way is equal."""
  answers = [given, *_thousands(answer)]
  golds = [right, *_thousands(gold)]
  found: compare.Answer = False
  for a in answers:
    for g in golds:
      one = compare.same(a, g, _undecided)
      if one:
        return True
      if one is None:
        found = None
  return found


def _thousands(text: str) -> list[Node]:
  bare = plain(text).replace(r"\$", "")
  if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\D{0,40}", bare):
    return [parse(plain(text).replace(",", ""))]
  return []


def _undecided(answer: Leaf, gold: Leaf) -> compare.Answer:
  """For the host: numbers were compared, the rest is open."""
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
  """Asks the jail, once for a pair; a failure is not remembered."""
  pair = (answer, gold)
  if pair not in _known:
    jail = mine() if jail is None else jail
    found = bool(jail.ask("symbolic", answer, gold, timeout=DEADLINE))
    while len(_known) >= _KNOWN_PAIRS:
      _known.pop(next(iter(_known)), None)
    _known[pair] = found
  return _known[pair]
