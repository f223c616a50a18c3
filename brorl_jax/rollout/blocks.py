"""Who has which blocks of the cache: a stack of free ones and a table.

For decoding over a pool, see `model/cache.py`. A row takes a block when its
next token begins one, and gives all of them back when its rollout ends. A slot
holds what its rollout has written, not what the longest one would write.

The pool may be smaller than all rows need at once. Then

  1. longer rows get blocks before shorter ones;
  2. a row without a block for its next token does not advance in that step;
  3. the shortest row that holds blocks gives them back and begins again;
  4. a row begins only while more blocks are free than other rows may want next.

By 1 and 3 the longest row always goes on, if the pool has room for one longest
rollout: so every rollout ends. By 4 few rows begin that would soon begin again.

Everything runs on the device, in a few operations per step. B is rows, `most`
the blocks of the longest rollout.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Blocks(NamedTuple):
  """The free blocks, and those of every row."""

  free: Int[Array, " blocks"]  # a stack; the first `count` are free
  count: Int[Array, " one"]
  table: Int[Array, "B most"]  # the first `held` of each row are its own
  held: Int[Array, " B"]
  stalled: Int[Array, " one"]  # how often a row had to wait for a next block
  restarted: Int[Array, " one"]  # how often a row gave its blocks back


def all_free(blocks: int, rows: int, most: int) -> Blocks:
  """No row has a block."""
  zero = jnp.zeros((1,), jnp.int32)
  return Blocks(
    free=jnp.arange(blocks, dtype=jnp.int32),
    count=zero + blocks,
    table=jnp.zeros((rows, most), jnp.int32),
    held=jnp.zeros((rows,), jnp.int32),
    stalled=zero,
    restarted=zero,
  )


def give(
  blocks: Blocks,
  length: Int[Array, " B"],
  busy: Bool[Array, " B"],
  columns: int,
) -> tuple[Blocks, Bool[Array, " B"], Bool[Array, " B"]]:
  """A block for each row whose next token needs one, while there are any.

  Args:
    blocks: Before the step.
    length: Tokens of each row; the last is not in the cache yet. A row that
      holds no block has 1.
    busy: Rows with a rollout.
    columns: C, of a block.

  Returns:
    The blocks, the rows that advance, and of the others those that hold blocks,
    which rows that have not begun do not.
  """
  B, most = blocks.table.shape
  row = jnp.arange(B, dtype=jnp.int32)
  need = busy & (blocks.held * columns < length)
  begins = need & (blocks.held == 0)
  goes_on = need & ~begins
  # Rows of length 1 are last, so the rows that begin come after all others.
  order = _order(length)
  before = jnp.sum(need[None] & (order[None] > order[:, None]), axis=1)
  left = blocks.count - before
  # Each row that has begun may want another block in the next step.
  after = blocks.held + goes_on
  wanted = jnp.sum((after > 0) & (after < most))
  if most > 1:
    wanted += before - jnp.sum(goes_on)  # by those that begin in this step
  given = need & (left > jnp.where(begins, wanted, 0))
  top = blocks.free.at[left - 1].get(mode="clip")
  at = jnp.where(given, blocks.held, most)
  held = blocks.held + given
  blocks = blocks._replace(
    count=blocks.count - jnp.sum(given, dtype=jnp.int32),
    table=blocks.table.at[row, at].set(top, mode="drop"),
    held=held,
    stalled=blocks.stalled + jnp.sum(goes_on & ~given, dtype=jnp.int32),
  )
  return blocks, busy & (held * columns >= length), goes_on & ~given


def shortest(blocks: Blocks, length: Int[Array, " B"]) -> Bool[Array, " B"]:
  """The row that is last in the order of `give` of those that hold blocks."""
  none = jnp.iinfo(jnp.int32).max
  order = jnp.where(blocks.held > 0, _order(length), none)
  last = jnp.arange(len(order)) == jnp.argmin(order)
  return last & (blocks.held > 0)


def take_back(blocks: Blocks, rows: Bool[Array, " B"]) -> Blocks:
  """All blocks of these rows are free again."""
  returned = jnp.where(rows, blocks.held, 0)
  end = blocks.count + jnp.cumsum(returned, dtype=jnp.int32)
  index = jnp.arange(blocks.table.shape[1], dtype=jnp.int32)[None]
  at = jnp.where(
    index < returned[:, None],
    (end - returned)[:, None] + index,
    len(blocks.free),  # out of bounds
  )
  return blocks._replace(
    free=blocks.free.at[at].set(blocks.table, mode="drop"),
    count=end[-1:],
    held=blocks.held - returned,
  )


def _order(length: Int[Array, " B"]) -> Int[Array, " B"]:
  """Numbers that differ, larger for a longer row, then for an earlier one."""
  B = len(length)
  return length * B - jnp.arange(B, dtype=jnp.int32)
