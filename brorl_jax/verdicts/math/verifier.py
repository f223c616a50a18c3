r"""Scores answers to math questions.

  verify(r"... so \boxed{\frac12}", "0.5").status    # "pass"

The answer is the last complete box after the thinking (`extract`). A gate in
linear time, without libraries, refuses unsafe text (`gate`). The answer is then
parsed (`structure`) and compared exactly (`compare`, `exact`). Equality of
expressions that are not fractions is left to a sandboxed worker with a deadline
(`symbolic`).
"""

from __future__ import annotations

import functools
import re

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.math import compare, extract, gate
from brorl_jax.verdicts.math.nodes import (
  Assign,
  Items,
  Leaf,
  Node,
  Relation,
  Row,
  Unreadable,
)
from brorl_jax.verdicts.math.structure import parse
from brorl_jax.verdicts.math.tokens import plain
from brorl_jax.verdicts.sandbox.jail import Jail, mine

DEADLINE = 3.0  # seconds in the jail; the slowest honest pair took 0.2
_KNOWN_PAIRS = 16_384


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
    response: The text of the response. Never executed.
    gold: The reference answer, as `check_reference` returns it.
    jail: Where "symbolic" runs, if the exact comparison does not decide; None:
      this thread's jail.

  Returns:
    "pass" or "fail"; "invalid" if the jail failed.
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
  equal, reason = _exactly(clean, wanted)
  if equal is None:
    try:
      equal = _symbolically(clean, wanted, jail)
    except RuntimeError as error:
      return Verdict("invalid", 0.0, f"verifier failed: {error}", shown)
  if equal:
    return Verdict("pass", 1.0, "", shown)
  return Verdict("fail", 0.0, reason or "wrong answer", shown)


@functools.lru_cache(maxsize=16_384)
def _clean_gold(gold: str) -> str:
  clean, reason = gate.screen(extract.unboxed(gold))
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
