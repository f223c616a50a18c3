"""Prompts are read and first tokens drawn, inside a program.

All N first tokens of a prompt come from one distribution, so no slot and no
decode step is spent on them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.rollout.draw import draw
from brorl_jax.rollout.program_spec import Decoder, ProgramSpec
from brorl_jax.rollout.slots import RolloutQueue, fold_in, pack
from brorl_jax.types import Prompts

# Prompt tokens of one prefill. More would only need more memory: one activation
# of the feed-forward of a 1.5B policy (8,960 wide, float32) takes .6 GB here.
PREFILL_TOKENS = 16384


class PrefillBatch(NamedTuple):
  """Prompts to read, and which of each prompt's rollouts to make.

  On a mesh a prompt may occur on several devices, each with an equal part of
  its rollouts.
  """

  prompts: Prompts
  offset: Int[Any, " P"]  # n of the first rollout
  real: Bool[Any, " P"]  # False for padding, which makes no rollouts


def batch_of(prompts: Prompts, real: Bool[Any, " P"]) -> PrefillBatch:
  """Prompts to read, with the rollouts that each of them names."""
  first = prompts.first
  offset = np.zeros(len(real), np.int32) if first is None else first
  return PrefillBatch(dataclasses.replace(prompts, first=None), offset, real)


class Chunks(NamedTuple):
  """Rollouts offset to offset + N - 1 of prompts that have been read."""

  index: Int[Any, " P"]  # p
  offset: Int[Any, " P"]  # n of the first rollout
  real: Bool[Any, " P"]  # False for padding, which makes no rollouts
  row: Int[Any, " P"]  # of the prompt's keys and values


def read(
  spec: ProgramSpec, weights: PyTree, batch: PrefillBatch, key: Key[Array, ""]
) -> tuple[Any, RolloutQueue, Int[Array, "P N 2"]]:
  """Prefix, queue and packed first tokens of prompts, inside a program."""
  prompts, offset, real = batch
  logits, prefix = logits_of(spec.policy, weights, prompts.tokens, prompts.mask)
  row = jnp.arange(len(prompts.index), dtype=jnp.int32)
  chunks = Chunks(prompts.index, offset, real, row)
  return prefix, *queued(spec, logits, chunks, key)


def queued(
  spec: ProgramSpec,
  logits: Float[Array, "P V"],
  chunks: Chunks,
  key: Key[Array, ""],
) -> tuple[RolloutQueue, Int[Array, "P N 2"]]:
  """The queue of these rollouts, and their first tokens, packed.

  Args:
    logits: Of the first token of each chunk's prompt.
  """
  P, N = len(chunks.index), spec.n
  nothing = jnp.zeros((P, N), jnp.int32)
  keys = fold_in(key, chunks.index)
  queue = RolloutQueue(
    nothing, nothing[:, 0], nothing, keys, chunks.offset, chunks.row
  )
  uniform = queue.uniform(jnp.arange(P)[:, None], jnp.arange(N)[None], 0)
  first, logp = draw(spec.sampling.cut(logits), uniform)
  # Rollouts that need no slot: one token was all.
  over = spec.ended(first) | (spec.max_new_tokens == 1) | ~chunks.real[:, None]
  queue = queue._replace(
    order=jnp.argsort(over, axis=1, stable=True).astype(jnp.int32),
    waiting=jnp.sum(~over, axis=1, dtype=jnp.int32),
    first=first,
  )
  return queue, pack(first, logp)


def with_none(queue: RolloutQueue, key: Key[Array, ""]) -> RolloutQueue:
  """The queue of P prompts, and of prompt P, which has no rollouts.

  An index needs no branch then.
  """
  extra = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
  P = len(queue.offset)
  return RolloutQueue(
    order=extra(queue.order),
    waiting=extra(queue.waiting),
    first=extra(queue.first),
    key=jnp.append(queue.key, fold_in(key, 0)),
    offset=extra(queue.offset),
    row=jnp.append(queue.row, P),
  )


def logits_of(
  policy: Decoder,
  weights: PyTree,
  tokens: Int[Array, "P S"],
  mask: Bool[Array, "P S"],
) -> tuple[Float[Array, "P V"], Any]:
  """`Decoder.prefill`, for a few prompts at a time if there are many."""
  P, S = tokens.shape
  group = read_together(P, S)
  if group == P:
    return policy.prefill(weights, tokens, mask)
  apart = lambda x: x.reshape(P // group, group, *x.shape[1:])
  read = lambda x: policy.prefill(weights, *x)
  out = jax.lax.map(read, (apart(tokens), apart(mask)))
  return jax.tree.map(lambda x: x.reshape(P, *x.shape[2:]), out)


def read_together(P: int, S: int) -> int:
  """How many of P prompts of S tokens are read at a time: a divisor of P."""
  fits = max(PREFILL_TOKENS // S, 1)
  return max(g for g in range(1, min(P, fits) + 1) if P % g == 0)
