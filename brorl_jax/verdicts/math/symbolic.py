r"""Equality of expressions that are not fractions; runs in the jail.

Two expressions are equal if they agree at positive and negative points, drawn
from a hash of both, to more digits than their texts could encode. There is no
tolerance, so 15 digits of pi do not equal pi.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

from brorl_jax.verdicts.math import compare, numeric
from brorl_jax.verdicts.math.nodes import Leaf, Tree, Unreadable
from brorl_jax.verdicts.math.structure import parse

_POINTS = 4
# For expressions whose case depends on the order of several names: max(a, b)
# equals a at all of 4 points once in 16 times, at 16 points once in 65,536.
_POINTS_OF_CASES = 16


def symbolic(answer: str, gold: str) -> bool:
  """Whether an answer equals the reference.

  Args:
    answer: LaTeX that passed the gate.
    gold: The reference, likewise.
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
    readable = a.tree is not None and g.tree is not None
    return readable and _equal(a, g, seed, cost)

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
    count = _count(a.tree, g.tree, names) if names else 1
    points = [_point(names, seed, i) for i in range(count)]
    if names and (_has_cases(a.tree) or _has_cases(g.tree)):
      far = 4 * _product(a.tree) * _product(g.tree)
      points += [{n: far * x for n, x in p.items()} for p in points[:_POINTS]]
    return all(numeric.agree(a.tree, g.tree, point, cost) for point in points)
  except numeric.Undefined:
    return False


def _count(a: Tree, g: Tree, names: list[str]) -> int:
  """The number of points at which two expressions are compared."""
  cases = _has_cases(a) or _has_cases(g)
  return _POINTS_OF_CASES if cases and len(names) > 1 else _POINTS


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
  """Whether a tree may be a different function in different regions."""
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return False
  cases = tree[0] in ("abs", "floor", "ceil", "root", "max", "min")
  if tree[0] == "^":
    cases = not isinstance(tree[2], Fraction) or tree[2].denominator > 1
  return cases or any(map(_has_cases, tree[1:]))


def _product(tree: Tree) -> int:
  """A bound on where the numbers of a tree can put a change of case."""
  if isinstance(tree, Fraction):
    return max(abs(tree.numerator), 1) * tree.denominator
  if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant"):
    return 1
  return math.prod(map(_product, tree[1:]))


def _point(names: list[str], seed: bytes, i: int) -> dict[str, Fraction]:
  """The i-th point: all positive, all negative, then mixed signs."""
  point = {}
  for name in names:
    digest = hashlib.sha256(seed + f"{i}{name}".encode()).digest()
    # Between 1/4 and 3 1/4, with 60 random bits.
    size = Fraction(int.from_bytes(digest[:8], "big") >> 4, 2**60) * 3
    sign = (1, -1)[i] if i < 2 else 1 - 2 * (digest[8] & 1)
    point[name] = sign * (size + Fraction(1, 4))
  return point


def _rounds_to(tree: Tree, gold: Leaf) -> bool:
  """Whether a constant rounds to the reference."""
  assert gold.step is not None
  difference, _ = numeric.difference(tree, gold.tree, {}, 400)
  half = gold.step / 2
  return bool(abs(difference) * half.denominator <= half.numerator)


def _equivalent(
  a: Tree, g: Tree, names: list[str], seed: bytes, cost: int
) -> bool:
  """Whether one equation is a numeric multiple of the other."""
  if _names(a) != _names(g):
    return False
  left, right = (("+", tree[1], ("-", tree[2])) for tree in (a, g))
  try:
    first = _point(names, seed, 0)
    origin = [_at(tree, first) for tree in (left, right)]
    # left(p) right(q) = left(q) right(p) at all points q, and neither is zero.
    for i in range(1, _count(a, g, names) + 1):
      point = _point(names, seed, i)
      one = ("*", _at(left, point), origin[1])
      other = ("*", _at(right, point), origin[0])
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
