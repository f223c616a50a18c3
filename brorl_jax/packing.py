"""Groups of rollouts as batches of a few static shapes, on the host."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from brorl_jax.types import Batch, Prompts, Rollouts

_LEAST_LENGTH = 32  # shorter responses are not worth a program of their own
_MOST_LENGTHS = 6
# Microbatches of a batch at most: more would be zeros that travel to devices.
_MICROBATCHES = 8


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static shapes of batches.

  Blocks of a length that is half of another's are twice as many, so that every
  microbatch has about as many tokens.
  """

  rows: int  # R, rollouts per block; all of one prompt
  blocks: int  # P, blocks of the longest rollouts per microbatch, all devices
  length: int  # T, of the longest rollout

  @property
  def lengths(self) -> list[int]:
    """To which responses are padded, ascending."""
    found = [self.length]
    while found[0] >= 2 * _LEAST_LENGTH and len(found) < _MOST_LENGTHS:
      found.insert(0, -(-found[0] // 2))
    return found

  def blocks_of(self, length: int) -> int:
    """Per microbatch of this length."""
    halved = len(self.lengths) - 1 - self.lengths.index(length)
    return self.blocks * 2**halved


@dataclasses.dataclass(frozen=True)
class Block:
  """Rollouts of one prompt that are read side by side."""

  prompt: int
  rollout: np.ndarray  # n of each row
  count: np.ndarray  # identical rollouts it stands for
  length: int  # of the longest


def split(groups: int, minibatches: int, seed: Sequence[int]) -> np.ndarray:
  """Which groups go into which minibatch: [minibatches, groups / minibatches].

  Whole groups, shuffled: a minibatch averages over as many prompts as it can.
  """
  order = np.random.default_rng(list(seed)).permutation(groups)
  return np.sort(order.reshape(minibatches, -1), axis=1)


def pack(
  prompts: Prompts,
  rollouts: Rollouts,
  advantage: Float[np.ndarray, "P N"],
  layout: Layout,
) -> list[Batch]:
  """Cuts groups into blocks of similar length; of identical rollouts one stays.

  Identical rollouts have equal advantage and, up to rounding, log-probability,
  so that one with the count as its weight has the gradient of all of them. With
  short answers most of a group of 512 are copies.

  Args:
    prompts: P prompts, on the host.
    rollouts: Their N rollouts, on the host.
    advantage: One per rollout.
    layout: Static shapes.

  Returns:
    Batches in ascending order of their lengths; a length that no block has is
    left out.
  """
  found: dict[int, list[Block]] = {}
  for block in blocks(rollouts, layout.rows):
    length = next(x for x in layout.lengths if x >= block.length)
    found.setdefault(length, []).append(block)
  return [
    _batch(prompts, rollouts, advantage, some, layout, length)
    for length in sorted(found)
    for some in _cut(found[length], layout.blocks_of(length))
  ]


def blocks(rollouts: Rollouts, rows: int) -> Iterator[Block]:
  """Each group's different rollouts, the longest first, so many at a time."""
  for p in range(len(rollouts.tokens)):
    first, count = rollouts.distinct(p)
    length = rollouts.mask[p, first].sum(axis=1)
    order = np.argsort(-length, kind="stable")
    for start in range(0, len(first), rows):
      at = order[start : start + rows]
      yield Block(p, first[at], count[at], int(length[at[0]]))


def _cut(blocks: list[Block], per_microbatch: int) -> Iterator[list[Block]]:
  most = per_microbatch * _MICROBATCHES
  for start in range(0, len(blocks), most):
    yield blocks[start : start + most]


def _batch(
  prompts: Prompts,
  rollouts: Rollouts,
  advantage: Float[np.ndarray, "P N"],
  blocks: list[Block],
  layout: Layout,
  length: int,
) -> Batch:
  R, B, S = layout.rows, layout.blocks_of(length), prompts.tokens.shape[1]
  rows = _MICROBATCHES * B
  out = {
    "prompt": np.zeros((rows, S), np.int32),
    "prompt_mask": np.zeros((rows, S), bool),
    "response": np.zeros((rows, R, length), np.int32),
    "mask": np.zeros((rows, R, length), bool),
    "logp_sampled": np.zeros((rows, R, length), np.float32),
    "advantage": np.zeros((rows, R), np.float32),
    "weight": np.zeros((rows, R), np.float32),
  }
  # A block without rows still needs a prompt with a last token.
  out["prompt_mask"][:, -1] = True
  for i, one in enumerate(blocks):
    p, n, to = one.prompt, one.rollout, (i, slice(len(one.rollout)))
    out["prompt"][i] = prompts.tokens[p]
    out["prompt_mask"][i] = prompts.mask[p]
    out["response"][to] = rollouts.tokens[p, n, :length]
    out["mask"][to] = rollouts.mask[p, n, :length]
    out["logp_sampled"][to] = rollouts.logp[p, n, :length]
    out["advantage"][to] = advantage[p, n]
    out["weight"][to] = one.count
  folded = {
    k: v.reshape(_MICROBATCHES, B, *v.shape[1:]) for k, v in out.items()
  }
  used = -(-len(blocks) // B)
  return Batch(**folded, used=np.array(used, np.int32))


def padding_fraction(batches: Sequence[Batch]) -> float:
  """Response positions that are computed and hold no token, as a share."""
  tokens = sum(int(b.mask.sum()) for b in batches)
  places = sum(int(b.used) * b.mask[0].size for b in batches)
  return 1.0 - tokens / places
