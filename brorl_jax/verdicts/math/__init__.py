r"""Scores answers to math questions, and checks that references are usable.

The last box after the thinking passes the `gate`, is parsed (`structure`) and
compared (`compare`), in a sandboxed worker where it needs numbers (`symbolic`).
"""

import functools
import re
from fractions import Fraction
from typing import Any

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Field, Verdict, judged, require_text
from brorl_jax.verdicts.math import compare, gate, structure
from brorl_jax.verdicts.math.expressions import Tree, Unreadable, plain
from brorl_jax.verdicts.math.structure import Assign, Items, Leaf, Node, parse
from brorl_jax.verdicts.sandbox.jail import Jail, mine

DEADLINE = 3.0  # seconds in the jail; the slowest honest pair took 0.2
_KNOWN_PAIRS = 16_384
_MAX_WORDS = 4
_THOUSANDS = re.compile(
  r"(?:[^,]{1,60}=\s*)?[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\D{0,40}"
)
_MISSING = ("nan", "null")
_OF_SENTENCES = frozenset("is are was answer equals therefore".split())


def verify(response: str, gold: str, *, jail: Jail | None = None) -> Verdict:
  r"""Scores a response by a reference answer.

  Rules of equality:
    numbers by value: 0.5, 1/2, 50\% are equal; 60\% equals 0.6 but not 60
    a chain by its last part, if all its parts are equal: 3/5 = 0.6 equals 0.6
    digits with their base, which an answer may leave out: 1011 equals 1011_2,
      but 11 does not; 1011_2 equals 11; x \equiv 3 \pmod 7 equals 3
    a reference with a decimal point and at least four significant digits equals
      whatever rounds to it: 3.14159 equals \pi; others are exact: 3.14 does not
    units may be left out but not changed: 5 cm equals 5 but not 5 m; a word
      that is no unit must be in both: 5 tenths is not 5
    x = 5 equals 5 but not y = 5, and so do m + n = 5 and P(X = 2) = 5; an
      equation equals its multiples
    sets and lists in any order; tuples, ratios and matrices in order; intervals
      by their ends, also as inequalities; \pm 2 equals 2, -2; x \ne 2 equals
      \mathbb{R}\setminus\{2\}; x = 1, y = 2 equals (1, 2)
    words ignore case; letters of choices do not
    expressions that have the same value wherever both are defined and real

  `gold` is what `check_reference` returns. Where the exact comparison does not
  decide, `jail` (default: this thread's) does; if it fails, it is "invalid".
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
  if plain(answer) == plain(gold):
    return True, ""
  try:
    references = _readings(gold)
  except Unreadable:
    return False, "wrong answer"
  try:
    answers = _readings(answer)
  except Unreadable as error:
    return False, f"unreadable: {error}"
  # Leaves are undecided outside the jail, unless one is unreadable.
  rule = lambda a, g: False if a.tree is None or g.tree is None else None
  verdicts = [compare.same(a, g, rule) for a in answers for g in references]
  if True in verdicts:
    return True, ""
  if None in verdicts:
    return None, ""
  fault = _fault_of_leaves(answers[0])
  if not fault:
    return False, ""
  kind = "refused" if fault == "too large" else "unreadable"
  return False, f"{kind}: {fault}"


def _readings(text: str) -> list[Node]:
  """1,234 is a number or a list of two; either reading may be equal."""
  readings = [parse(text)]
  if "," in text and _THOUSANDS.fullmatch(plain(text).replace(r"\$", "")):
    readings.append(parse(plain(text).replace(",", "")))
  return readings


def _parts(node: Node) -> tuple[Node, ...]:
  match node:
    case Assign():
      return (node.value,)
    case Items() | structure.Row():
      return node.items
    case structure.Relation():
      return node.sides
  return ()


def _fault_of_leaves(node: Node) -> str:
  if isinstance(node, Leaf):
    return node.fault
  return next(filter(None, map(_fault_of_leaves, _parts(node))), "")


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


def check_reference(gold: str, *, jail: Jail | None = None) -> str:
  """The reference without its box and outer spaces, as `verify` takes it.

  Raises ValueError if it is empty, unreadable, ambiguous ("4 or 5") or a
  sentence, does not equal itself, or wrongly equals 0, 1 or its negation.
  """
  require_text(gold, "gold")
  bare = gate.unboxed(gold)
  if not bare:
    raise ValueError("gold is empty; write the reference answer")
  if "####" in bare:
    last = bare.rpartition("####")[2].strip()
    why = "a solution with its answer after '####', as in GSM8K"
    raise ValueError(f"gold = {gold[:80]!r}: {why}; write only {last[:80]!r}")
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


def _refused(gold: str, why: str) -> ValueError:
  return ValueError(f"gold = {gold[:80]!r}: {why}; correct it or drop the line")


def _passes(answer: str, gold: str, jail: Jail | None) -> bool:
  return verify(f"\\boxed{{{answer}}}", gold, jail=jail).status == "pass"


def _value(node: Node) -> Tree:
  node = node.value if isinstance(node, Assign) else node
  node = compare.single(node) or node
  if isinstance(node, structure.Relation):
    node = node.sides[-1]  # of a chain
  return node.tree if isinstance(node, Leaf) else None


def _of_sentence(words: list[str]) -> bool:
  return len(words) > _MAX_WORDS or not _OF_SENTENCES.isdisjoint(words)


def _fault(node: Node) -> str:
  if isinstance(node, Leaf) and node.tree is None:
    return f"unreadable: {node.fault}"
  if isinstance(node, Leaf) and _of_sentence(node.unit.strip("?").split()):
    return "it is a sentence"
  if isinstance(node, structure.Words):
    if node.text in _MISSING:
      return "it marks a missing value"
    if _of_sentence(node.text.split()):
      return "it is a sentence"
  if isinstance(node, Items) and node.choice and node.kind == "list":
    return "it offers a choice"
  if isinstance(node, structure.Relation) and set(node.signs) == {"="}:
    values = {part.tree for part in node.sides if isinstance(part, Leaf)}
    if len(values) > 1 and all(isinstance(x, Fraction) for x in values):
      return "its parts are not equal"
  return next(filter(None, map(_fault, _parts(node))), "")


def _answer(value: Any) -> str:
  """A text, or a list of one, as in OlympiadBench; 142.0, as in AMC, is 142."""
  if isinstance(value, list) and len(value) == 1:
    (value,) = value
  if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
    value = int(value)
  return strict_json.answer(value)


DOMAIN = Domain(
  name="math",
  verify=lambda text, entry, jail: verify(text, entry["answer"], jail=jail),
  fields={"answer": Field(_answer)},
  check_reference=lambda record: {"answer": check_reference(record["answer"])},
  needs_jail="libraries",
  one_answer=True,
)
