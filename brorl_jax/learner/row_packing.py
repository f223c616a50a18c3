"""Groups of rollouts as blocks of rows of similar length.

A block is up to M distinct rollouts of one prompt, read side by side. Rollouts
of similar length share a block, and each length is one compiled program.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from brorl_jax.learner.layout import MICROBATCHES, Layout, Source, folded
from brorl_jax.types import Batch, Rollouts

Distinct = list[tuple[np.ndarray, np.ndarray]]  # `Rollouts.distinct` of each


@dataclasses.dataclass(frozen=True)
class Block:
  """Distinct rollouts of one prompt that are read side by side."""

  prompt: int
  rollout: np.ndarray  # n of each row
  count: np.ndarray  # identical rollouts that each row stands for
  length: int  # of the longest row


@dataclasses.dataclass(frozen=True)
class Plan:
  """Blocks of each length, and how many positions they take."""

  rows: int  # M
  by_length: dict[int, list[Block]]
  positions: int  # with the prompts and all padding


def blocks(
  rollouts: Rollouts, distinct: Distinct, rows: int
) -> Iterator[Block]:
  """Each group's distinct rollouts in blocks of `rows`, the longest first."""
  for p, (first, count) in enumerate(distinct):
    length = rollouts.mask[p, first].sum(axis=1)
    # Sorted, 512 lengths spread evenly over 1 to 1,024 pad to 684 on average in
    # blocks of 32; unsorted, nearly every block has one of more than 512.
    order = np.argsort(-length, kind="stable")
    # A block that is not full stays so, as it reads one prompt alone: 32 rows
    # for 7 distinct rollouts of 16 made 93 % of the positions padding.
    for start in range(0, len(first), rows):
      at = order[start : start + rows]
      yield Block(p, first[at], count[at], int(length[at[0]]))


def plan(source: Source, distinct: Distinct, layout: Layout, rows: int) -> Plan:
  """Assigns blocks to lengths.

  What would fill less than half of a microbatch goes to the next length, where
  each block has at most twice the positions.
  """
  by_length = {length: [] for length in layout.lengths}
  for block in blocks(source.rollouts, distinct, rows):
    by_length[next(x for x in layout.lengths if x >= block.length)].append(
      block
    )
  S, positions = source.prompts.tokens.shape[1], 0
  for i, length in enumerate(layout.lengths):
    each = layout.blocks_of(length, rows)
    own = by_length[length]
    rest = len(own) % each
    if 2 * rest < each and i + 1 < len(layout.lengths):
      longer = by_length[layout.lengths[i + 1]]
      longer += own[len(own) - rest :]
      del own[len(own) - rest :]
    positions += -(-len(own) // each) * each * (S + rows * length)
  return Plan(rows, {k: v for k, v in by_length.items() if v}, positions)


def batches(source: Source, plan: Plan, layout: Layout) -> list[Batch]:
  """Batches in ascending order of length."""
  return [
    _batch(source, part, plan.rows, layout.blocks_of(length, plan.rows), length)
    for length, own in plan.by_length.items()
    for part in _cut(own, layout.blocks_of(length, plan.rows))
  ]


def _cut(blocks: list[Block], per_microbatch: int) -> Iterator[list[Block]]:
  most = per_microbatch * MICROBATCHES
  for start in range(0, len(blocks), most):
    yield blocks[start : start + most]


def _batch(
  source: Source, blocks: list[Block], M: int, each: int, length: int
) -> Batch:
  rows, S = MICROBATCHES * each, source.prompts.tokens.shape[1]
  out = source.empty(rows, M, length)
  out["prompt"] = np.zeros((rows, S), np.int32)
  out["prompt_mask"] = np.zeros((rows, S), bool)
  # A block of padding still needs one real prompt token: attention over no key
  # is 0 / 0.
  out["prompt_mask"][:, -1] = True
  for i, block in enumerate(blocks):
    out["prompt"][i] = source.prompts.tokens[block.prompt]
    out["prompt_mask"][i] = source.prompts.mask[block.prompt]
    source.put(out, i, 0, block.prompt, block.rollout, block.count)
  return folded(out, each, len(blocks))
