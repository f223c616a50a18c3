"""Groups of rollouts as batches of a few static shapes, on the host.

Rollouts lie side by side in blocks of rows (row_packing.py), or in trees that
hold what they have in common once (tree_packing.py): whichever computes fewer
positions.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from brorl_jax.learner import row_packing, tree_packing
from brorl_jax.learner.layout import Layout, Source
from brorl_jax.types import Batch, Prompts, Rollouts

# How a minibatch averages its policy loss; see `loss_scale`.
Mean = Literal["token", "sequence", "prompt", "constant"]

# Share of the positions that another form must stay below: it is compiled
# beside the first if they change places, and trees attend to the whole row. A
# token of a row of 512 costs 1.2 times one of 256, at a width of 256.
_WORTH = 0.8


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
  """Merges identical rollouts and lays out what is left.

  Identical rollouts have the same advantage and, up to rounding, the same
  log-probability, so one row with the count as its weight has the gradient of
  all. With short answers a group of 512 has 10 to 45 distinct rollouts.

  Args:
    scale: From `loss_scale`.

  Returns:
    Batches; blocks of rows in ascending order of length, and lengths without a
    block are left out.
  """
  source = Source(prompts, rollouts, advantage, scale)
  distinct = [rollouts.distinct(p) for p in range(len(rollouts.tokens))]
  best = row_packing.plan(source, distinct, layout, layout.rows)
  others = []
  if layout.fewer < layout.rows:
    others.append(row_packing.plan(source, distinct, layout, layout.fewer))
  for shape in layout.trees:
    others.append(tree_packing.plan(source, distinct, shape))
  for other in others:
    if other.positions < _WORTH * best.positions:
      best = other
  if isinstance(best, tree_packing.Plan):
    return tree_packing.batches(source, best)
  return row_packing.batches(source, best, layout)


def padding_fraction(batches: Sequence[Batch]) -> float:
  """Share of the computed positions, prompts' too, that hold no token."""
  tokens = places = 0
  for b in batches:
    used = int(b.used)  # other microbatches are not computed
    if b.trees is not None:
      masks = [b.trees.end[:used] > 0]
    else:
      real = (b.weight[:used] > 0).any(axis=-1, keepdims=True)
      masks = [b.prompt_mask[:used] & real, b.mask[:used]]
    tokens += sum(int(mask.sum()) for mask in masks)
    places += sum(mask.size for mask in masks)
  return 1.0 - tokens / max(places, 1)
