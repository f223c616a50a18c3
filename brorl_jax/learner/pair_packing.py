"""Prompt-response pairs packed into rows of one static shape, on the host."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int


class Pair(NamedTuple):
  """Token ids of a prompt and of its response, the end token included."""

  prompt: Sequence[int]
  response: Sequence[int]


class Layout(NamedTuple):
  """The static shape of all updates."""

  tokens: int  # T, of a row
  rows: int  # B, of a microbatch, over all devices
  microbatches: int  # C, of an update


class Rows(NamedTuple):
  """The pairs of one update; `Policy.packed_logp` explains segments."""

  tokens: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  segment: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  counts: Bool[Array, "C B T"] | Bool[np.ndarray, "C B T"]  # response tokens
  used: Int[Array, ""] | Int[np.ndarray, ""]  # microbatches with any pair


def epoch(
  lengths: Sequence[int], layout: Layout, order: Sequence[int]
) -> Iterator[list[list[int]]]:
  """The rows of each update of one epoch, as indices of pairs.

  A pair goes into the first row with room. A pair that fits into no row waits
  for the next update, which begins with it. An update ends when as many pairs
  wait as it has rows.

  Args:
    lengths: Tokens of each pair; none is longer than a row.
  """
  rows, waiting = layout.rows * layout.microbatches, list(order)
  while waiting:
    placed: list[list[int]] = [[] for _ in range(rows)]
    room = np.full(rows, layout.tokens)
    left = []
    for number, pair in enumerate(waiting):
      fits = room >= lengths[pair]
      if fits.any():
        row = int(fits.argmax())
        placed[row].append(pair)
        room[row] -= lengths[pair]
        continue
      left.append(pair)
      if len(left) == rows:
        left += waiting[number + 1 :]
        break
    yield [row for row in placed if row]
    waiting = left


def updates(
  pairs: Sequence[Pair], layout: Layout, *, seed: int
) -> Iterator[tuple[int, list[list[int]]]]:
  """The epoch, from 0, and the rows of each update, without end.

  Args:
    pairs: At least one.
    seed: Of the shuffled order, which differs in each epoch.
  """
  lengths = [len(x.prompt) + len(x.response) for x in pairs]
  for number in itertools.count():
    order = np.random.default_rng([seed, number]).permutation(len(pairs))
    for rows in epoch(lengths, layout, order.tolist()):
      yield number, rows


def updates_in(
  pairs: Sequence[Pair], layout: Layout, *, epochs: int, seed: int
) -> int:
  """The number of updates in `epochs` epochs."""
  each = updates(pairs, layout, seed=seed)
  return sum(1 for _ in itertools.takewhile(lambda x: x[0] < epochs, each))


def pack(
  pairs: Sequence[Pair], rows: Sequence[Sequence[int]], layout: Layout
) -> Rows:
  """The pairs of each row, as arrays."""
  C, B, T = layout.microbatches, layout.rows, layout.tokens
  tokens = np.zeros((C * B, T), np.int32)
  segment, counts = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
  for i, row in enumerate(rows):
    at = 0
    for number, pair in enumerate(row, 1):
      prompt, response = pairs[pair]
      middle, end = at + len(prompt), at + len(prompt) + len(response)
      tokens[i, at:end] = [*prompt, *response]
      segment[i, at:end] = number
      counts[i, middle:end] = True
      at = end
  fold = lambda x: x.reshape(C, B, T)
  used = np.array(-(-len(rows) // B), np.int32)
  return Rows(fold(tokens), fold(segment), fold(counts), used)


def check(pairs: Sequence[Pair], layout: Layout, names: Sequence[str]) -> None:
  """Raises ValueError for pairs that cannot be trained on.

  Args:
    names: Of each pair in error messages, such as file:line.

  Raises:
    ValueError: A pair has no prompt, no response, or is longer than a row.
  """
  for pair, name in zip(pairs, names, strict=True):
    for what, ids in zip(("prompt", "response"), pair, strict=True):
      if not ids:
        raise ValueError(f"{name}: the {what} has no tokens")
    if (length := len(pair.prompt) + len(pair.response)) > layout.tokens:
      raise ValueError(
        f"{name}: prompt and response have {length:,} tokens, more than the "
        f"{layout.tokens:,} of a row; shorten them or use longer rows"
      )
