"""Static shapes of batches, and the arrays that every form of batch has."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from brorl_jax.types import Batch, Prompts, Rollouts

# Lengths are halved from T down to 32, at most 5 times, with three quarters of
# each from 128 on. Each is a program of some seconds to compile. Lengths that
# are spread evenly fill .75 of a half and .86 of what lies closer.
_LEAST_LENGTH = 32
_MOST_HALVES = 5
_LEAST_QUARTERS = 128
# Microbatches of a batch. The last batch of a shape is filled up with zeros,
# which are copied to the devices but not computed (`Batch.used`).
MICROBATCHES = 8
# Few rows make fuller blocks and read the prompt more often.
_FEWER = 4
# Of a row of trees: every token attends to all of the row. At a width of 256 a
# token of 512 costs 1.4 times what one of a block does.
_LEAST_TREES, _MOST_TREES = 128, 512


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static shapes of batches.

  A microbatch of shorter rollouts, or of fewer rows, has more blocks: as many
  as have no more positions than one of the longest.
  """

  rows: int  # M, rollouts per block, all of one prompt, at most
  blocks: int  # P, blocks per microbatch of the longest length, on all devices
  length: int  # T, of the longest rollout
  prompt: int  # S, of the longest prompt
  devices: int = 1  # rows of devices, over which P is spread

  @property
  def lengths(self) -> list[int]:
    """The lengths to which responses are padded, ascending."""
    lengths = [self.length]
    for _ in range(_MOST_HALVES):
      longest = lengths[0]
      if longest < 2 * _LEAST_LENGTH:
        break
      if longest >= _LEAST_QUARTERS:
        lengths.insert(0, -(-3 * longest // 4))
      lengths.insert(0, -(-longest // 2))
    return lengths

  @property
  def fewer(self) -> int:
    """Rows of a block where that makes less padding."""
    return self.rows // _FEWER if self.rows >= 4 * _FEWER else self.rows

  @property
  def shapes(self) -> int:
    """How many shapes of batches there may be."""
    rows = len({self.rows, self.fewer})
    return len(self.lengths) * rows + len(self.trees)

  def blocks_of(self, length: int, rows: int) -> int:
    """Blocks per microbatch of this length with so many rows."""
    return self._fitting(self.prompt + rows * length)

  @property
  def trees(self) -> list[tuple[int, int]]:
    """Rows of a microbatch and tokens of a row, for each size of trees.

    The least row has room for a prompt with its longest response. Others have
    twice as much, and again, up to what a microbatch of blocks has: where
    responses have little in common but their prompt, few rows read it seldom.
    """
    size = _LEAST_TREES
    while size < self.prompt + self.length:
      size *= 2
    room = self.blocks * (self.prompt + self.rows * self.length) // self.devices
    sizes = []
    while size <= _MOST_TREES and (not sizes or size <= room):
      # A quarter of what blocks have: the last microbatch is then fuller.
      sizes.append((self._fitting(4 * size), size))
      size *= 2
    return sizes

  def _fitting(self, positions: int) -> int:
    """How many of these fit into a microbatch, spread over the devices."""
    most = self.blocks * (self.prompt + self.rows * self.length)
    return max(most // (positions * self.devices), 1) * self.devices


@dataclasses.dataclass(frozen=True)
class Source:
  """What is packed: groups on the host, and what the loss needs of each."""

  prompts: Prompts
  rollouts: Rollouts
  advantage: Float[np.ndarray, "P N"]
  scale: Float[np.ndarray, "P N"] | None  # see `packing.loss_scale`

  def empty(self, rows: int, M: int, length: int) -> dict[str, np.ndarray]:
    """Zeros: so many rows, each with M rollouts of this length."""
    # 9 bytes per position of a response: 38 MB with 16 blocks of 32 rows of
    # 1,024 tokens, and about as much at each shorter length.
    out = {
      "response": np.zeros((rows, M, length), np.int32),
      "mask": np.zeros((rows, M, length), bool),
      "logp_sampled": np.zeros((rows, M, length), np.float32),
      "advantage": np.zeros((rows, M), np.float32),
      "weight": np.zeros((rows, M), np.float32),
    }
    if self.scale is not None:
      out["scale"] = np.zeros((rows, M), np.float32)
    return out

  def put(
    self,
    out: dict[str, np.ndarray],
    row: int,
    start: int,
    prompt: int,
    rollout: np.ndarray,
    count: np.ndarray,
  ) -> None:
    """Writes rollouts of a prompt into a row, from place `start` on."""
    to, length = (row, slice(start, start + len(rollout))), out["mask"].shape[2]
    out["response"][to] = self.rollouts.tokens[prompt, rollout, :length]
    out["mask"][to] = self.rollouts.mask[prompt, rollout, :length]
    out["logp_sampled"][to] = self.rollouts.logp[prompt, rollout, :length]
    out["advantage"][to] = self.advantage[prompt, rollout]
    out["weight"][to] = count
    if self.scale is not None:
      out["scale"][to] = self.scale[prompt, rollout]


def folded(out: dict[str, Any], rows: int, used: int) -> Batch:
  """Arrays of rows as microbatches of `rows`, of which `used` rows count."""
  fold = lambda x: x.reshape(len(x) // rows, rows, *x.shape[1:])
  fields = {name: _each(fold, x) for name, x in out.items()}
  return Batch(**fields, used=np.array(-(-used // rows), np.int32))


def _each(f, x):
  return f(x) if isinstance(x, np.ndarray) else type(x)(*map(f, x))
