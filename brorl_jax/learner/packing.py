"""Groups of rollouts as batches of a few static shapes, on the host.

A block is up to M distinct rollouts of one prompt, read side by side. Rollouts
of similar length share a block, and each length is one compiled program.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from brorl_jax.types import Batch, Prompts, Rollouts

# How a minibatch averages its policy loss; see `loss_scale`.
Mean = Literal["token", "sequence", "prompt", "constant"]

# Lengths are halved from T down to 32, at most 6 of them: each is a program of
# some seconds to compile, and padding to the next length is at most half.
_LEAST_LENGTH = 32
_MOST_LENGTHS = 6
# Microbatches of a batch. The last batch of a length is filled up with zeros,
# which are copied to the devices but not computed (`Batch.used`).
MICROBATCHES = 8


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static shapes of batches.

  A microbatch of half the length has twice the blocks, so that all microbatches
  have about the same number of tokens.
  """

  rows: int  # M, rollouts per block, all of one prompt
  blocks: int  # P, blocks per microbatch of the longest length, on all devices
  length: int  # T, of the longest rollout

  @property
  def lengths(self) -> list[int]:
    """The lengths to which responses are padded, ascending."""
    lengths = [self.length]
    while lengths[0] >= 2 * _LEAST_LENGTH and len(lengths) < _MOST_LENGTHS:
      lengths.insert(0, -(-lengths[0] // 2))
    return lengths

  def blocks_of(self, length: int) -> int:
    """Blocks per microbatch of this length."""
    # Halves are rounded up, so a microbatch has up to 3 % more positions than
    # one of the longest length (T = 1,025: 32 times the blocks, of 33).
    halved = len(self.lengths) - 1 - self.lengths.index(length)
    return self.blocks * 2**halved


@dataclasses.dataclass(frozen=True)
class Block:
  """Distinct rollouts of one prompt that are read side by side."""

  prompt: int
  rollout: np.ndarray  # n of each row
  count: np.ndarray  # identical rollouts that each row stands for
  length: int  # of the longest row


def split(groups: int, minibatches: int, seed: Sequence[int]) -> np.ndarray:
  """The groups of each minibatch: [minibatches, groups / minibatches].

  Groups are shuffled and stay whole, so a group's advantages, which sum to 0,
  are in one update.
  """
  order = np.random.default_rng(list(seed)).permutation(groups)
  # With one minibatch this is 0, 1, ... for every seed: sums keep their order,
  # and so their rounding.
  return np.sort(order.reshape(minibatches, -1), axis=1)


def loss_scale(
  length: Int[np.ndarray, "P N"],
  *,
  unit: Literal["token", "sequence"],
  mean: Mean,
  constant: int,
) -> Float[np.ndarray, "P N"] | None:
  """Factors of each rollout's loss, which select the mean of a minibatch.

  The summed loss is always divided by Z, the tokens of the minibatch. A factor
  f per rollout turns this into

    token     f = 1: the mean over all tokens (DAPO)
    sequence  f = Z / (rollouts * tokens of the rollout): the mean over rollouts
              of their means over tokens (GRPO)
    prompt    f = Z / (prompts * tokens of the prompt): the mean over prompts of
              their means over tokens
    constant  f = Z / (rollouts * constant): the sum over tokens, divided by one
              length for all rollouts (Dr. GRPO)

  A loss with one value per rollout, such as GSPO, gets the mean over rollouts,
  or over prompts of their means over rollouts. Rollouts without tokens are not
  counted.

  Args:
    length: Tokens of each rollout; 0 if the rollout does not count.
    unit: Whether the loss has a value per token or per sequence.
    mean: One of the four above.
    constant: Tokens, such as the longest response; used only by "constant".

  Returns:
    Factors, 0 for rollouts that do not count; None if all are 1.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3.
    Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.
    Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
  """
  if unit == "token" and mean == "token":
    return None
  # In float64, rounded once: 65,536 rollouts of 1,024 tokens are 6.7e7, and
  # float32 counts to 1.7e7.
  counts, total = length > 0, float(length.sum())
  size = length if unit == "token" else counts  # values of each rollout
  if mean == "prompt":
    parts = counts.any(axis=1).sum() * size.sum(axis=1, keepdims=True)
  elif mean == "constant":
    parts = counts.sum() * np.float64(constant)
  else:
    parts = counts.sum() * size
  return np.where(counts, total / np.maximum(parts, 1), 0.0).astype(np.float32)


def pack(
  prompts: Prompts,
  rollouts: Rollouts,
  advantage: Float[np.ndarray, "P N"],
  layout: Layout,
  scale: Float[np.ndarray, "P N"] | None = None,
) -> list[Batch]:
  """Cuts groups into blocks of similar length and merges identical rollouts.

  Identical rollouts have the same advantage and, up to rounding, the same
  log-probability, so one row with the count as its weight has the gradient of
  all. With short answers a group of 512 has 10 to 36 distinct rollouts.

  Args:
    prompts: P prompts, on the host.
    rollouts: Their N rollouts, on the host.
    advantage: One per rollout.
    layout: Static shapes.
    scale: From `loss_scale`.

  Returns:
    Batches in ascending order of length; lengths without a block are left out.
  """
  by_length: dict[int, list[Block]] = {}
  for block in blocks(rollouts, layout.rows):
    length = next(x for x in layout.lengths if x >= block.length)
    by_length.setdefault(length, []).append(block)
  return [
    _batch(prompts, rollouts, advantage, part, layout, length, scale)
    for length in sorted(by_length)
    for part in _cut(by_length[length], layout.blocks_of(length))
  ]


def blocks(rollouts: Rollouts, rows: int) -> Iterator[Block]:
  """Each group's distinct rollouts in blocks of `rows`, the longest first."""
  for p in range(len(rollouts.tokens)):
    first, count = rollouts.distinct(p)
    length = rollouts.mask[p, first].sum(axis=1)
    # Sorted, 512 lengths spread evenly over 1 to 1,024 pad to 684 on average in
    # blocks of 32; unsorted, nearly every block has one of more than 512.
    order = np.argsort(-length, kind="stable")
    # A block that is not full stays so, as it reads one prompt alone: 32 rows
    # for 7 distinct rollouts of 16 made 93 % of the positions padding.
    for start in range(0, len(first), rows):
      at = order[start : start + rows]
      yield Block(p, first[at], count[at], int(length[at[0]]))


def _cut(blocks: list[Block], per_microbatch: int) -> Iterator[list[Block]]:
  most = per_microbatch * MICROBATCHES
  for start in range(0, len(blocks), most):
    yield blocks[start : start + most]


def _batch(
  prompts: Prompts,
  rollouts: Rollouts,
  advantage: Float[np.ndarray, "P N"],
  blocks: list[Block],
  layout: Layout,
  length: int,
  scale: Float[np.ndarray, "P N"] | None,
) -> Batch:
  M, B, S = layout.rows, layout.blocks_of(length), prompts.tokens.shape[1]
  rows = MICROBATCHES * B
  # 9 bytes per position of a response: 38 MB with 16 blocks of 32 rows of 1,024
  # tokens, and about as much at each shorter length.
  out = {
    "prompt": np.zeros((rows, S), np.int32),
    "prompt_mask": np.zeros((rows, S), bool),
    "response": np.zeros((rows, M, length), np.int32),
    "mask": np.zeros((rows, M, length), bool),
    "logp_sampled": np.zeros((rows, M, length), np.float32),
    "advantage": np.zeros((rows, M), np.float32),
    "weight": np.zeros((rows, M), np.float32),
  }
  if scale is not None:
    out["scale"] = np.zeros((rows, M), np.float32)
  # A block of padding still needs one real prompt token: attention over no key
  # is 0 / 0.
  out["prompt_mask"][:, -1] = True
  for i, block in enumerate(blocks):
    p, n, to = block.prompt, block.rollout, (i, slice(len(block.rollout)))
    out["prompt"][i] = prompts.tokens[p]
    out["prompt_mask"][i] = prompts.mask[p]
    out["response"][to] = rollouts.tokens[p, n, :length]
    out["mask"][to] = rollouts.mask[p, n, :length]
    out["logp_sampled"][to] = rollouts.logp[p, n, :length]
    out["advantage"][to] = advantage[p, n]
    out["weight"][to] = block.count
    if scale is not None:
      out["scale"][to] = scale[p, n]
  folded = {k: v.reshape(MICROBATCHES, B, *v.shape[1:]) for k, v in out.items()}
  used = -(-len(blocks) // B)
  return Batch(**folded, used=np.array(used, np.int32))


def padding_fraction(batches: Sequence[Batch]) -> float:
  """Share of the computed response positions that hold no token."""
  tokens = sum(int(b.mask.sum()) for b in batches)
  # Of `used` microbatches, as others are not computed. .78 in the quick start:
  # 32 rows for about 23 rollouts, six positions for 2.4 tokens, spare blocks.
  places = sum(int(b.used) * b.mask[0].size for b in batches)
  return 1.0 - tokens / places
