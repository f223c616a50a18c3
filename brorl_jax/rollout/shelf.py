"""Prompts that were read stay, while more of their rollouts may be asked for.

A prompt in rounds gets its rollouts chunk by chunk, each in a place of its own.
What reading it gave, its keys and values and the distribution of its first
token, lies in one of P rows of its device, from which all of its chunks read.
The row is given away when no place holds the prompt and another one needs it:
then the prompt is read again if more is asked for. As many rows as places
suffice.
"""

import functools
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.rollout import prefill
from brorl_jax.rollout.prefill import PrefillBatch
from brorl_jax.rollout.program_spec import (
  SPLIT,
  WHOLE,
  ProgramSpec,
  on_devices,
)
from brorl_jax.rollout.programs import (
  INPUT_SPECS,
  PROGRESS_SPECS,
  DecodeInputs,
  idle,
)
from brorl_jax.rollout.slots import (
  DecodeProgress,
  DecodeState,
  RolloutQueue,
  fold_in,
  measure_progress,
)

# Prompt tokens that a device reads at a time. A product of so many rows takes
# no longer than two of half as many, and padding costs little.
_TOKENS = 2048


def together(each: int, S: int) -> int:
  """How many prompts of S tokens a device reads at a time."""
  return min(max(_TOKENS // S, 1), each)


class Part(NamedTuple):
  """Prompts to read together, as many for each device."""

  tokens: Int[Any, "rows S"]
  mask: Bool[Any, "rows S"]
  to: Int[Any, " rows"]  # row of each; P for padding


class Shelf:
  """Which prompt is in which row of each device."""

  def __init__(self, devices: int, each: int):
    self._each = each
    # p -> row, those that were used last at the end.
    self._rows: list[dict[int, int]] = [{} for _ in range(devices)]

  def rows(
    self, batch: PrefillBatch, held: Sequence[Set[int]]
  ) -> tuple[Int[np.ndarray, " B"], list[Part]]:
    """Rows for these prompts, and what must be read into them first.

    Args:
      batch: Prompts, as many for each device.
      held: Prompts of each device whose rows are in use, those of `batch`
        included.
    """
    devices, S = len(self._rows), batch.prompts.tokens.shape[1]
    most = len(batch.real) // devices
    rows = np.zeros(len(batch.real), np.int32)
    unread: list[list[tuple[int, int]]] = [[] for _ in self._rows]
    for i in np.flatnonzero(batch.real).tolist():
      d = i // most
      rows[i], new = self._row(d, int(batch.prompts.index[i]), held[d])
      if new:
        unread[d].append((rows[i], i))
    size, parts = together(self._each, S), []
    for start in range(0, max(map(len, unread)), size):
      to = np.full((devices, size), self._each, np.int32)
      at = np.zeros((devices, size), np.int32)
      for d, own in enumerate(unread):
        for k, found in enumerate(own[start : start + size]):
          to[d, k], at[d, k] = found
      read = lambda x, at=at: np.asarray(x)[at.ravel()]
      parts.append(
        Part(read(batch.prompts.tokens), read(batch.prompts.mask), to.ravel())
      )
    return rows, parts

  def _row(self, d: int, p: int, held: Set[int]) -> tuple[int, bool]:
    """The row of prompt p on device d, and whether it must be read into it."""
    own = self._rows[d]
    new = p not in own
    if not new:
      row = own.pop(p)
    elif len(own) < self._each:
      row = len(own)
    else:
      row = own.pop(next(q for q in own if q not in held))
    own[p] = row
    return row, new


@functools.partial(jax.jit, static_argnames=("spec", "each"))
def opened(
  spec: ProgramSpec,
  params: PyTree,
  part: Part,
  key: Key[Array, ""],
  *,
  each: int,
) -> tuple[DecodeInputs, Float[Array, "P V"], DecodeState, DecodeProgress]:
  """Reads the first prompts into the first rows; no place has a prompt.

  Args:
    part: The prompts; their rows are 0, 1, 2, ...
    each: P, rows and places of a device.

  Returns:
    What decoding reads, the logits of first tokens, the state and the progress.
  """

  def begin(weights, part, key):
    P, N = each, spec.n
    more = lambda x: jnp.pad(x, [(0, P - len(x))] + [(0, 0)] * (x.ndim - 1))
    read = prefill.logits_of(spec.policy, weights, part.tokens, part.mask)
    logits, prefix = jax.tree.map(more, read)
    none = jnp.zeros((P, N), jnp.int32)
    row = none[:, 0]
    queue = RolloutQueue(none, row, none, fold_in(key, row), row, row)
    queue = prefill.with_none(queue, key)
    first = jnp.full((P, N, 2), -1, jnp.int32)
    state = idle(spec, jnp.full(P + 1, P, jnp.int32), first)
    inputs = DecodeInputs(weights, prefix, queue)
    return inputs, logits, state, measure_progress(state, queue, spec)

  return on_devices(
    spec,
    begin,
    (WHOLE, SPLIT, WHOLE),
    (INPUT_SPECS, SPLIT, SPLIT, PROGRESS_SPECS),
  )(spec.policy.unroll(spec.policy.cast(params)), part, key)


@functools.partial(
  jax.jit, static_argnames="spec", donate_argnames=("logits", "prefix")
)
def read(
  spec: ProgramSpec,
  weights: PyTree,
  logits: Float[Array, "P V"],
  prefix: Any,
  part: Part,
) -> tuple[Float[Array, "P V"], Any]:
  """Reads more prompts, into these rows of their devices.

  Args:
    weights: Of the policy, as `opened` returned them.
    logits: Of all rows; donated.
    prefix: Of all rows; donated.
  """

  def read(weights, logits, prefix, part):
    new = prefill.logits_of(spec.policy, weights, part.tokens, part.mask)
    put = lambda x, new: x.at[part.to].set(new, mode="drop")
    return jax.tree.map(put, (logits, prefix), new)

  return on_devices(
    spec,
    read,
    (WHOLE, SPLIT, SPLIT, SPLIT),
    (SPLIT, SPLIT),
  )(weights, logits, prefix, part)
