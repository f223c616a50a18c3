r"""Equality of expressions that are no fractions: the part for the jail.

Two expressions are equal if they agree at points drawn from a hash of both,
positive and negative, to more digits than their texts could encode. Nothing is
rounded to a tolerance, so 15 digits of pi are not pi.

What the own reader does not know is read by math-verify, with the names
in both texts the same: its grammar drops case, primes and degrees.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from fractions import Fraction
from typing import Any

from brorl_jax.tasks.math import compare, numeric
from brorl_jax.tasks.math.exact import Tree
from brorl_jax.tasks.math.nodes import Leaf
from brorl_jax.tasks.math.structure import parse
from brorl_jax.tasks.math.tokens import Unreadable

_POINTS = 4
_MAX_TERMS = 2_000  # worked out by sympy in about a second


def symbolic(answer: str, gold: str) -> bool:
  """Whether an answer says what the gold says.

  Args:
    answer: LaTeX that passed the gate.
    gold: Likewise.
  """
  try:
    return same(answer, gold)
  except (Unreadable, RecursionError):
    return False


def same(answer: str, gold: str) -> bool:
  """As `symbolic`, but raises if a side has no structure."""
  seed = hashlib.sha256(f"{answer}\0{gold}".encode()).digest()
  cost = 4 * (len(answer) + len(gold))

  def rule(a: Leaf, g: Leaf) -> bool:
    if a.tree is None or g.tree is None:
      return _by_math_verify(a, g)
    return _equal(a, g, seed, cost)

  return compare.same(parse(answer), parse(gold), rule) is True


def _equal(a: Leaf, g: Leaf, seed: bytes, cost: int) -> bool:
  names = sorted(_names(a.tree) | _names(g.tree))
  equations = [leaf.tree[0] == "=" for leaf in (a, g) if _is_tuple(leaf)]
  if any(equations):
    return (
      all(equations)
      and len(equations) == 2
      and (_equivalent(a.tree, g.tree, names, seed, cost))
    )
  try:
    if not names and compare.is_rounded(g):
      return _rounds_to(a.tree, g)
    # One point decides between constants.
    points = [_point(names, seed, i) for i in range(_POINTS if names else 1)]
    if names and (_has_cases(a.tree) or _has_cases(g.tree)):
      far = 4 * _product(a.tree) * _product(g.tree)
      points += [{n: far * x for n, x in p.items()} for p in points]
    return all(numeric.agree(a.tree, g.tree, point, cost) for point in points)
  except numeric.Undefined:
    return False


def _is_tuple(leaf: Leaf) -> bool:
  return isinstance(leaf.tree, tuple)


def _names(tree: Tree) -> set[str]:
  if not isinstance(tree, tuple):
    return set()
  if tree[0] == "symbol":
    return {tree[1]}
  if tree[0] == "constant":
    return set()
  return set().union(*map(_names, tree[1:]))


def _has_cases(tree: Tree) -> bool:
  """Whether a tree may be one function here and another elsewhere."""
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return False
  cases = tree[0] in ("abs", "floor", "ceil", "root")
  if tree[0] == "^":
    cases = not isinstance(tree[2], Fraction) or tree[2].denominator > 1
  return cases or any(map(_has_cases, tree[1:]))


def _product(tree: Tree) -> int:
  """Beyond what the numbers of a tree can place a change of case."""
  if isinstance(tree, Fraction):
    return max(abs(tree.numerator), 1) * tree.denominator
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return 1
  return math.prod(map(_product, tree[1:]))


def _point(names: list[str], seed: bytes, i: int) -> dict[str, Fraction]:
  """Where to compare: all positive, all negative, then mixed signs."""
  point = {}
  for name in names:
    digest = hashlib.sha256(seed + f"{i}{name}".encode()).digest()
    # Between 1/4 and 3 1/4, with 60 random bits.
    size = Fraction(int.from_bytes(digest[:8], "big") >> 4, 2**60) * 3
    sign = (1, -1)[i] if i < 2 else 1 - 2 * (digest[8] & 1)
    point[name] = sign * (size + Fraction(1, 4))
  return point


def _rounds_to(tree: Tree, gold: Leaf) -> bool:
  """Whether a constant is the gold to the digits that the gold shows."""
  assert gold.step is not None
  difference, _ = numeric.difference(tree, gold.tree, {}, 400)
  half = gold.step / 2
  return bool(abs(difference) * half.denominator <= half.numerator)


def _equivalent(
  a: Tree, g: Tree, names: list[str], seed: bytes, cost: int
) -> bool:
  """Whether an equation is a multiple of the other, by a number."""
  if _names(a) != _names(g):
    return False
  left, right = (("+", tree[1], ("-", tree[2])) for tree in (a, g))
  try:
    first = _point(names, seed, 0)
    origin = [_at(tree, first) for tree in (left, right)]
    # left(p) right(q) = left(q) right(p) at all points q, and neither is zero.
    for i in range(1, _POINTS + 1):
      here = _point(names, seed, i)
      one = ("*", _at(left, here), origin[1])
      other = ("*", _at(right, here), origin[0])
      if not numeric.agree(one, other, {}, cost):
        return False
      for value in (one, other):
        if numeric.agree(value, Fraction(0), {}, cost):
          return False
    return True
  except numeric.Undefined:
    return False


def _at(tree: Tree, point: dict[str, Fraction]) -> Tree:
  """The tree with numbers for its symbols."""
  if not isinstance(tree, tuple) or tree[0] == "constant":
    return tree
  if tree[0] == "symbol":
    return point[tree[1]]
  return (tree[0], *(_at(argument, point) for argument in tree[1:]))


_SIGNS = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|'|°")
# What its grammar drops, or reads in a way of its own: 5 6 as 11.
_LEFT_OUT = re.compile(r"\\(?:text|circ|begin|end|quad)|[;:?%]|\d \d|[^ -~]")


def _by_math_verify(a: Leaf, g: Leaf) -> bool:
  """Equality of what math-verify reads, term by term."""
  import sympy

  for leaf in (a, g):
    if leaf.tree is None and not leaf.why.startswith("unknown"):
      return False
  if a.unit != g.unit or _LEFT_OUT.search(a.text + g.text):
    return False
  if set(_SIGNS.findall(a.text)) != set(_SIGNS.findall(g.text)):
    return False
  left, right = _parsed(a.text), _parsed(g.text)
  if left is None or right is None:
    return False
  if max(_terms(left), _terms(right)) > _MAX_TERMS:
    return left == right  # working it out would take longer than there is
  return sympy.expand(left - right) == 0


def _terms(expression: Any) -> int:
  """At most so many terms has any part of an expression, worked out."""
  parts = [_terms(part) for part in expression.args]
  if expression.is_Add:
    return sum(parts)
  if expression.is_Mul:
    return math.prod(parts)
  if expression.is_Pow and expression.exp.is_Integer:
    power = min(abs(int(expression.exp)), _MAX_TERMS)
    return math.comb(parts[0] + power - 1, power) if parts[0] > 1 else 1
  return max(parts, default=1)


def _parsed(text: str) -> Any:
  import math_verify
  import sympy
  from latex2sympy2_extended.math_normalization import NormalizationConfig

  # It warns of every reading without its own clock, which jails replace.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  config = math_verify.LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
      basic_latex=True,
      units=False,
      malformed_operators=False,
      nits=False,
      boxed="none",
      equations=False,
    ),
  )
  found = math_verify.parse(
    rf"\boxed{{{text}}}",
    extraction_config=[config],
    fallback_mode="no_fallback",
    parsing_timeout=None,  # pyright: ignore[reportArgumentType]
  )
  if len(found) != 1 or not isinstance(found[0], sympy.Expr):
    return None
  return found[0]
