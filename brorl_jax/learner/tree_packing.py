"""Groups of short rollouts as trees, several in a row of tokens.

What the responses to a prompt have in common is read once: the prompt, and
every prefix that some of them share. 512 answers of three tokens are some 45
distinct ones with 104 distinct prefixes, of which 63 are read: the last token
of a response is only predicted.

The tokens of a tree lie in the order of a walk that visits a token before those
that follow it. A token's descendants are then its neighbours up to `end`, and
token i sees token j if j <= i < end[j]. A row holds trees of several prompts.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from brorl_jax.learner.layout import MICROBATCHES, Source, folded
from brorl_jax.learner.row_packing import Distinct
from brorl_jax.types import Batch, Trees

_TERMS = 16  # of the loss, per token of a row; see `room_of`


@dataclasses.dataclass(frozen=True)
class Tree:
  """A prompt with some of its distinct responses; `grow` makes its arrays."""

  prompt: int
  rollout: np.ndarray  # n of each response, in lexicographic order
  count: np.ndarray  # identical rollouts that each stands for
  size: tuple[int, int, int]  # tokens, targets and responses


@dataclasses.dataclass(frozen=True)
class Plan:
  """Trees of each row, the room of a row, and the positions of all rows."""

  rows: list[list[Tree]]
  each: int  # P, rows of a microbatch
  tokens: int  # Q
  targets: int  # E
  responses: int  # M
  positions: int


def grow(
  prompt: Int[np.ndarray, " S"], text: Int[np.ndarray, "M T"]
) -> dict[str, np.ndarray]:
  """The arrays of a tree.

  Tokens that are read have numbers from 0. A target is a token that is
  predicted, the same for all responses that begin alike.

  Args:
    prompt: Its tokens, without padding.
    text: Distinct responses in lexicographic order, -1 behind the last token.

  Returns:
    token: [Q], those that are read.
    end: [Q], one behind the last descendant of each.
    parent: [E], the token from which a target is predicted.
    target: [E].
    at: [M,T], target of each response token, 0 behind the last.
  """
  S, t = len(prompt), np.arange(text.shape[1])
  length, shared, read, read_before = (x[:, None] for x in _lengths(text))
  new_target = (t >= shared) & (t < length)
  new_token = (t >= np.minimum(shared, read_before)) & (t < read)
  token_of, target_of = _numbered(new_token), _numbered(new_target)
  depth = np.concatenate([np.arange(S), S + np.nonzero(new_token)[1]])
  before = np.pad(S + token_of[:, :-1], ((0, 0), (1, 0)), constant_values=S - 1)
  return {
    "token": np.concatenate([prompt, text[new_token]]),
    "end": _ends(depth),
    "parent": before[new_target],
    "target": text[new_target],
    "at": np.where(t < length, target_of, 0),
  }


def _lengths(text: Int[np.ndarray, "M T"]) -> tuple[np.ndarray, ...]:
  """Of each response: its tokens, those that it shares with the response before
  it, those that are read, and those that are read of the response before it."""
  length = np.sum(text >= 0, axis=1)
  # Responses with a common prefix are neighbours: what one does not share with
  # the one before it, it shares with none before.
  same = (text[1:] == text[:-1]) & (text[1:] >= 0)
  shared = np.pad(np.cumprod(same, axis=1).sum(axis=1), (1, 0))
  read = np.maximum(length - 1, 0)  # the last token is only predicted
  return length, shared, read, np.pad(read[:-1], (1, 0))


def _numbered(new: np.ndarray) -> np.ndarray:
  """Numbers of what is new, in rows that keep what a row above them has."""
  number = np.cumsum(new).reshape(new.shape) - 1
  return np.maximum.accumulate(np.where(new, number, -1), axis=0)


def _ends(depth: np.ndarray) -> np.ndarray:
  """Index of the next token that is not deeper, for each token."""
  depths = depth.tolist()
  end, open_ = [len(depths)] * len(depths), []  # of ancestors, the deepest last
  for i, d in enumerate(depths):
    while open_ and depths[open_[-1]] >= d:
      end[open_.pop()] = i
    open_.append(i)
  return np.array(end)


def trees(
  source: Source, distinct: Distinct, room: tuple[int, int, int]
) -> Iterator[Tree]:
  """The trees of all groups: as few per group as have room in a row each.

  Args:
    room: Tokens, targets and responses of a row, see `room_of`.
  """
  for p, (first, count) in enumerate(distinct):
    prompt, text = _texts(source, p, first)
    order = np.lexsort(text.T[::-1])
    order = order[text[order, 0] >= 0]  # rollouts left out have no token
    for part, size in _cut(order, text, len(prompt), room):
      yield Tree(p, first[part], count[part], size)


def _texts(
  source: Source, p: int, rollout: np.ndarray
) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, "M T"]]:
  """A prompt without padding, and these rollouts with -1 behind each."""
  mask = source.rollouts.mask[p, rollout]
  text = np.where(mask, source.rollouts.tokens[p, rollout], -1)
  return source.prompts.tokens[p, source.prompts.mask[p]], text


def _cut(
  order: np.ndarray,
  text: Int[np.ndarray, "M T"],
  prompt: int,
  room: tuple[int, int, int],
) -> Iterator[tuple[np.ndarray, tuple[int, int, int]]]:
  """Neighbours of one tree, as many as fit, and its size; then of the next.

  Halves of what is too large would fill three quarters of a row on average.
  """
  length, shared, read, read_before = _lengths(text[order])
  # What each response adds to a tree that holds the one before it.
  added = np.stack(
    [
      np.maximum(read - np.minimum(shared, read_before), 0),
      length - shared,
      np.ones_like(length),
    ]
  )
  total = np.cumsum(added, axis=1)
  start = 0
  while start < len(order):
    alone = np.array([prompt + read[start], length[start], 1])
    # The sizes of the tree that ends with each of the responses.
    size = alone[:, None] + total[:, start:] - total[:, start, None]
    fitting = np.all(size <= np.array(room)[:, None], axis=0)
    end = start + max(int(np.sum(fitting)), 1)
    tokens, targets, responses = size[:, end - start - 1].tolist()
    yield order[start:end], (tokens, targets, responses)
    start = end


def room_of(tokens: int, length: int) -> tuple[int, int, int]:
  """Tokens, targets and responses of a row, the same in a whole run.

  A response adds at most one target to the tokens that are read. The loss has a
  term for each of its `length` places, so there is room for 16 such terms per
  token: for responses that add a sixteenth of the longest length on average.

  `configs/smoke.py` has .6 responses for each token that is read, with N = 16
  .4, and `configs/n512.py` .02.
  """
  responses = min(max(_TERMS * tokens // length, 1), tokens)
  return tokens, tokens + responses, responses


def plan(source: Source, distinct: Distinct, shape: tuple[int, int]) -> Plan:
  """Puts trees into rows, the largest first, each where it first fits.

  Args:
    shape: From `Layout.trees`.
  """
  each, tokens = shape
  room = room_of(tokens, source.rollouts.tokens.shape[2])
  found = list(trees(source, distinct, room))
  sizes = np.array([tree.size for tree in found], int).reshape(-1, 3)
  rows: list[list[Tree]] = []
  left = np.zeros((len(found), 3), int)
  for i in np.argsort(-sizes[:, 0], kind="stable"):
    fits = np.all(left[: len(rows)] >= sizes[i], axis=1)
    row = int(np.argmax(fits)) if fits.any() else len(rows)
    if row == len(rows):
      rows.append([])
      left[row] = room
    rows[row].append(found[i])
    left[row] -= sizes[i]
  positions = -(-len(rows) // each) * each * tokens
  return Plan(rows, each, tokens, room[1], room[2], positions)


def batches(source: Source, plan: Plan) -> list[Batch]:
  """Batches of all rows."""
  most = plan.each * MICROBATCHES
  return [
    _batch(source, plan, plan.rows[start : start + most])
    for start in range(0, len(plan.rows), most)
  ]


def _batch(source: Source, plan: Plan, rows: list[list[Tree]]) -> Batch:
  count, M = plan.each * MICROBATCHES, plan.responses
  T = source.rollouts.tokens.shape[2]
  out = source.empty(count, M, T)
  none = lambda size: np.zeros((count, size), np.int32)
  grown = Trees(
    token=none(plan.tokens),
    end=none(plan.tokens),
    parent=none(plan.targets),
    target=none(plan.targets),
    at=np.zeros((count, M, T), np.int32),
  )
  for i, row in enumerate(rows):
    q = e = m = 0
    for tree in row:
      Q, E, M = tree.size
      own = grow(*_texts(source, tree.prompt, tree.rollout))
      grown.token[i, q : q + Q] = own["token"]
      grown.end[i, q : q + Q] = own["end"] + q
      grown.parent[i, e : e + E] = own["parent"] + q
      grown.target[i, e : e + E] = own["target"]
      grown.at[i, m : m + M] = own["at"] + e
      source.put(out, i, m, tree.prompt, tree.rollout, tree.count)
      q, e, m = q + Q, e + E, m + M
  empty = np.zeros((count, 0), np.int32)
  return folded(
    {**out, "prompt": empty, "prompt_mask": empty > 0, "trees": grown},
    plan.each,
    len(rows),
  )
