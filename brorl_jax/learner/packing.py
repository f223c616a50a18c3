"""Groups of rollouts as batches of a few static shapes, on the host: blocks of
rollouts side by side, or trees that hold what they have in common once,
whichever computes fewer positions.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from brorl_jax.types import Batch, Prompts, Rollouts, Trees, own_tokens

# How a minibatch averages its policy loss; see `loss_scale`.
Average = Literal["token", "sequence", "prompt", "constant"]
# Groups, and `Rollouts.distinct` of each.
Distinct = list[tuple[int, tuple[np.ndarray, np.ndarray]]]

# Lengths are halved from T down to 32, at most 5 times, with three quarters of
# each from 128 on; from T = 2,048 on T / 8 and more are T / 8 apart, from 4,096
# on T / 16. Each is a program of some seconds to compile. Lengths that are
# spread evenly fill .75 of a half and .86 of what lies closer.
_LEAST_LENGTH = 32
_MOST_HALVES = 5
_LEAST_QUARTERS = 128
_LEAST_EIGHTH = 512
# Positions that keep a device busy for longer than it waits for weights: those
# of 8B take .3 s at 50 GB/s, thrice, and a position .16 ms at 400 TFLOP/s (an
# estimate). Microbatches of shorter responses have no more.
_ENOUGH = 2**14
# Microbatches of a batch. The last batch of a shape is filled up with zeros,
# which are copied to the devices but not computed (`Batch.used`).
MICROBATCHES = 8
# Of a row of trees: every token attends to all of the row. At a width of 256 a
# token of 512 costs 1.4 times what one of a block does.
_LEAST_TREES, _MOST_TREES = 128, 512
_TERMS = 16  # of the loss, per token of a row of trees; see `room_of`
# Share of the positions that another form must stay below: it is compiled
# beside the first if they change places, and trees attend to the whole row. A
# token of a row of 512 costs 1.2 times one of 256, at a width of 256.
_WORTH = 0.8


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static shapes of batches. A microbatch of shorter rollouts has more
  blocks: as many as have no more positions than one of the longest.
  """

  rows: int  # M, rollouts per block, all of one prompt, at most
  blocks: int  # P, blocks per microbatch of the longest length, on all devices
  length: int  # T, of the longest rollout
  prompt: int  # S, of the longest prompt
  devices: int = 1  # rows of devices, over which P is spread

  @property
  def lengths(self) -> list[int]:
    """The lengths to which responses are padded, ascending."""
    lengths, eighths = [self.length], min(self.length // _LEAST_EIGHTH, 8)
    for halves in range(_MOST_HALVES):
      longest = lengths[0]
      if longest < 2 * _LEAST_LENGTH:
        break
      steps = max(eighths >> halves, 1 + (longest >= _LEAST_QUARTERS))
      parts = range(steps, 2 * steps)
      lengths[:0] = [-(-i * longest // (2 * steps)) for i in parts]
    return lengths

  def blocks_of(self, length: int) -> int:
    """Blocks per microbatch of this length."""
    return self._fitting(self.prompt + self.rows * length)

  @property
  def trees(self) -> list[tuple[int, int]]:
    """Rows of a microbatch and tokens of a row, for each size of trees.

    The least row has room for a prompt with its longest response. Others have
    twice as much, and again, up to what a microbatch of blocks has: where only
    the prompt is in common, few rows read it seldom.
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
    if self.blocks == self.devices:  # no larger ones are asked for
      most = min(most, self.devices * _ENOUGH)
    return max(most // (positions * self.devices), 1) * self.devices


@dataclasses.dataclass(frozen=True)
class Source:
  """What is packed: groups on the host, and what the loss needs of each."""

  prompts: Prompts
  rollouts: Rollouts
  advantage: Float[np.ndarray, "P N"]
  scale: Float[np.ndarray, "P N"] | None = None  # see `packing.loss_scale`

  def empty(self, rows: int, M: int, length: int) -> dict[str, np.ndarray]:
    """Zeros for `rows` rows, each with M rollouts of this length."""
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
    if self.rollouts.age is not None:
      out["old"] = np.zeros((rows, M, length), bool)
    return out

  def put(
    self, out: dict[str, np.ndarray], row: int, start: int, part: "Block | Tree"
  ) -> None:
    """Writes the rollouts of a part into a row, from place `start` on."""
    p, n, length = part.prompt, part.rollout, out["mask"].shape[2]
    to = row, slice(start, start + len(n))
    out["response"][to] = self.rollouts.tokens[p, n, :length]
    logp = self.rollouts.logp[p, n, :length]
    out["mask"][to] = own_tokens(self.rollouts.mask[p, n, :length], logp)
    out["logp_sampled"][to] = logp
    out["advantage"][to] = self.advantage[p, n]
    out["weight"][to] = part.count
    if self.scale is not None:
      out["scale"][to] = self.scale[p, n]
    if self.rollouts.age is not None:
      out["old"][to] = self.rollouts.age[p, n, :length] > 0


class Later(NamedTuple):
  """A batch that is made when it is needed: 128 x 512 rollouts of 15,360 tokens
  are 15 GB, of which a host needs the blocks of its own devices.
  """

  blocks: int  # P, or rows of trees
  make: Callable[[slice], Batch]  # with these blocks of every microbatch


class Plan(NamedTuple):
  """One way to lay rollouts out."""

  positions: int  # with the prompts and all padding
  tokens: int  # of them, prompts' too
  rollouts: int  # distinct ones
  later: list[Later]

  def batches(self) -> list[Batch]:
    """All that the plan has."""
    return [later.make(slice(None)) for later in self.later]


def _later(items: list, each: int, fill: Callable[..., Any]) -> Iterator[Later]:
  """Batches of up to `MICROBATCHES` microbatches of `each` items, of which
  `fill` makes the arrays; None is an empty one.
  """
  most = MICROBATCHES * each

  def make(these: list, own: slice) -> Batch:
    every = these + [None] * (most - len(these))
    parts = [every[start : start + each][own] for start in range(0, most, each)]
    used, rows = -(-len(these) // each), len(parts[0])
    fold = lambda x: x.reshape(len(x) // rows, rows, *x.shape[1:])
    made = jax.tree.map(fold, fill([*itertools.chain(*parts)]))
    return Batch(**made, used=np.array(used, np.int32))

  for start in range(0, len(items), most):
    these = items[start : start + most]
    yield Later(each, functools.partial(make, these))


class Block(NamedTuple):
  """Distinct rollouts of one prompt that are read side by side."""

  prompt: int
  rollout: np.ndarray  # n of each row
  count: np.ndarray  # identical rollouts that each row stands for
  length: int  # of the longest row
  tokens: int  # of all rows


def _fill_blocks(
  source: Source, layout: Layout, length: int, blocks: list[Block | None]
) -> dict[str, Any]:
  rows, S = len(blocks), source.prompts.tokens.shape[1]
  out = source.empty(rows, layout.rows, length)
  out["prompt"] = np.zeros((rows, S), np.int32)
  out["prompt_mask"] = np.zeros((rows, S), bool)
  # Padding still needs one real prompt token: attention over no key is 0 / 0.
  out["prompt_mask"][:, -1] = True
  for i, block in enumerate(blocks):
    if block is not None:
      out["prompt"][i] = source.prompts.tokens[block.prompt]
      out["prompt_mask"][i] = source.prompts.mask[block.prompt]
      source.put(out, i, 0, block)
  return out


def blocks(
  distinct: Distinct, lengths: Iterable[np.ndarray], rows: int
) -> Iterator[Block]:
  """Each group's distinct rollouts in blocks of `rows`, the longest first."""
  for (p, (first, count)), length in zip(distinct, lengths, strict=True):
    # Sorted, 512 lengths spread evenly over 1 to 1,024 pad to 684 on average in
    # blocks of 32; unsorted, nearly every block has one of more than 512.
    order = np.argsort(-length, kind="stable")
    # A block that is not full stays so, as it reads one prompt alone: 32 rows
    # for 7 distinct rollouts of 16 made 93 % of the positions padding.
    for start in range(0, len(first), rows):
      at = order[start : start + rows]
      own = length[at]
      yield Block(p, first[at], count[at], int(own[0]), int(own.sum()))


def most_rows(rollouts: int, prompt: int, length: int) -> int:
  """Rows of a block with which `rollouts` of a device compute least: a power of
  two near sqrt(prompt * rollouts / length), but at least `_ENOUGH` / 2 tokens.

  With R rows prompts are read once more for each R rollouts, and about one of
  rollouts / R blocks is padding.
  """
  best = math.sqrt(max(prompt, 1) * rollouts / length)
  return max(2 ** round(math.log2(best)), _ENOUGH // 2 // length, 1)


def plan_blocks(source: Source, distinct: Distinct, layout: Layout) -> Plan:
  """Blocks of all groups, see `assigned`."""
  mask = source.rollouts.mask
  lengths = [mask[p, first].sum(axis=1) for p, (first, _) in distinct]
  every = list(blocks(distinct, lengths, layout.rows))
  S = source.prompts.tokens.shape[1]
  by_length, positions = assigned(every, S, layout)
  fill = functools.partial(_fill_blocks, source, layout)
  later = (
    _later(these, layout.blocks_of(length), functools.partial(fill, length))
    for length, these in by_length.items()
  )
  read = source.prompts.mask.sum(axis=1)
  tokens = sum(int(read[block.prompt]) + block.tokens for block in every)
  rollouts = sum(len(block.rollout) for block in every)
  return Plan(positions, tokens, rollouts, [*itertools.chain(*later)])


def assigned(
  every: list[Block], S: int, layout: Layout
) -> tuple[dict[int, list[Block]], int]:
  """Blocks by the length to which they are padded, and positions computed. All
  devices compute a microbatch together, which costs as much as its longest
  block: so each has the longest of those that are left, of all groups. Only the
  last one may have empty blocks.
  """
  by_length = {length: [] for length in layout.lengths}
  positions, start = 0, 0
  every = sorted(every, key=lambda block: -block.length)
  cost = lambda length: layout.blocks_of(length) * (S + layout.rows * length)
  while start < len(every):
    fitting = [x for x in layout.lengths if x >= every[start].length]
    whole = [x for x in fitting if layout.blocks_of(x) >= len(every) - start]
    length = min(whole, key=cost, default=fitting[0])
    end = start + layout.blocks_of(length)
    by_length[length] += every[start:end]
    start, positions = end, positions + cost(length)
  return by_length, positions


class Tree(NamedTuple):
  """A prompt with some of its distinct responses; `grow` makes its arrays.

  Every common prefix is there once. 512 answers of three tokens are some 45
  distinct ones with 104 distinct prefixes, of which 63 are read: the last token
  of a response is only predicted. Tokens lie in the order of a walk that visits
  a token before those that follow it. A token's descendants are then its
  neighbours up to `end`, and token i sees token j if j <= i < end[j].
  """

  prompt: int
  rollout: np.ndarray  # n of each response, in lexicographic order
  count: np.ndarray  # identical rollouts that each stands for
  size: tuple[int, int, int]  # tokens, targets and responses


def grow(
  prompt: Int[np.ndarray, " S"], text: Int[np.ndarray, "M T"]
) -> dict[str, np.ndarray]:
  """The arrays of a tree.

  Tokens that are read have numbers from 0. A target is a token that is
  predicted, the same for all responses that begin alike. `text` has distinct
  responses in lexicographic order, -1 behind each; there `at` is 0.
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
  """Of each response: tokens, those shared with the response before it, those
  that are read, and those that are read of the response before it.
  """
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
  """The trees of all groups, of each as few as fit into `room_of` a row. Halves
  of what is too large would fill three quarters of a row on average.
  """
  for p, (first, count) in distinct:
    prompt, text = _texts(source, p, first)
    order = np.lexsort(text.T[::-1])
    order = order[text[order, 0] >= 0]  # rollouts left out have no token
    length, shared, read, read_before = _lengths(text[order])
    # What each response adds to a tree that holds the one before it.
    more = np.maximum(read - np.minimum(shared, read_before), 0)
    added = np.stack([more, length - shared, np.ones_like(length)])
    total, start = np.cumsum(added, axis=1), 0
    while start < len(order):
      alone = np.array([len(prompt) + read[start], length[start], 1])
      # The sizes of the tree that ends with each of the responses.
      size = alone[:, None] + total[:, start:] - total[:, start, None]
      fitting = np.all(size <= np.array(room)[:, None], axis=0)
      end = start + max(int(np.sum(fitting)), 1)
      part = order[start:end]
      tokens, targets, responses = size[:, len(part) - 1].tolist()
      yield Tree(p, first[part], count[part], (tokens, targets, responses))
      start = end


def _texts(
  source: Source, p: int, rollout: np.ndarray
) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, "M T"]]:
  """A prompt without padding, and these rollouts with -1 behind each."""
  mask = source.rollouts.mask[p, rollout]
  text = np.where(mask, source.rollouts.tokens[p, rollout], -1)
  return source.prompts.tokens[p, source.prompts.mask[p]], text


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


def plan_trees(
  source: Source, distinct: Distinct, shape: tuple[int, int]
) -> Plan:
  """Puts trees into rows of `Layout.trees`, largest first, where they fit."""
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
  read, _, rollouts = sizes.sum(axis=0).tolist()
  later = _later(rows, each, functools.partial(_fill_trees, source, room))
  positions = -(-len(rows) // each) * each * tokens
  return Plan(positions, read, rollouts, [*later])


def _fill_trees(
  source: Source, room: tuple[int, int, int], rows: list[list[Tree] | None]
) -> dict[str, Any]:
  count, (tokens, targets, M) = len(rows), room
  T = source.rollouts.tokens.shape[2]
  out = source.empty(count, M, T)
  none = lambda *size: np.zeros((count, *size), np.int32)
  packed = Trees(
    none(tokens), none(tokens), none(targets), none(targets), none(M, T)
  )
  for i, row in enumerate(rows):
    q = e = m = 0
    for tree in row or ():
      Q, E, M = tree.size
      arrays = grow(*_texts(source, tree.prompt, tree.rollout))
      packed.token[i, q : q + Q] = arrays["token"]
      packed.end[i, q : q + Q] = arrays["end"] + q
      packed.parent[i, e : e + E] = arrays["parent"] + q
      packed.target[i, e : e + E] = arrays["target"]
      packed.at[i, m : m + M] = arrays["at"] + e
      source.put(out, i, m, tree)
      q, e, m = q + Q, e + E, m + M
  empty = np.zeros((count, 0), np.int32)
  return {**out, "prompt": empty, "prompt_mask": empty > 0, "trees": packed}


def split(groups: int, minibatches: int, seed: Sequence[int]) -> np.ndarray:
  """The groups of each minibatch: [minibatches, groups / minibatches].

  Groups are shuffled by the seed and stay whole: their advantages sum to 0.
  """
  order = np.random.default_rng(list(seed)).permutation(groups)
  # With one minibatch this is 0, 1, ...: sums keep their order and rounding.
  return np.sort(order.reshape(minibatches, -1), axis=1)


def loss_scale(
  length: Int[np.ndarray, "P N"],
  *,
  unit: Literal["token", "sequence"],
  mean: Average,
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
  counted: their factor is 0. Returns None for the mean over all tokens.

  Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3; Shao et al. 2024 (GRPO),
  arXiv:2402.03300, eq. 3; Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, 3.2.
  """
  if unit == "token" and mean == "token":
    return None
  # In float64: 65,536 rollouts of 1,024 are 6.7e7, and float32 counts to 1.7e7.
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
  source: Source, layout: Layout, groups: Sequence[int] | None = None
) -> Plan:
  """Merges identical rollouts of these groups, or all; lays out what is left.

  Identical rollouts have the same advantage and, up to rounding, the same
  log-probability, so one row with the count as its weight has the gradient of
  all. With short answers a group of 512 has 10 to 45 distinct rollouts.
  """
  every = range(len(source.advantage)) if groups is None else groups
  distinct: Distinct = [(p, source.rollouts.distinct(p)) for p in every]
  best = plan_blocks(source, distinct, layout)
  for shape in layout.trees:
    plan = plan_trees(source, distinct, shape)
    if plan.positions < _WORTH * best.positions:
      best = plan
  return best


def padding_fraction(plans: Sequence[Plan]) -> float:
  """Share of the computed positions, prompts' too, that hold no token."""
  places = sum(plan.positions for plan in plans)
  return 1.0 - sum(plan.tokens for plan in plans) / max(places, 1)
