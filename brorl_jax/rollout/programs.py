"""The compiled programs of the sampler: prefill, decode, resize, finish.

  start     reads the prompts, draws all first tokens; every slot is idle
  page      an empty page
  pool      an empty pool, if the decoder wants one instead of pages
  segment   decodes until a page is full or the host must act
  turned    the pages of the next segment
  resize    keeps the slots that work, or adds idle ones
  moved     a page for these slots
  finish    the rollouts, unpacked

The static argument of each is a `ProgramSpec`. On a mesh every device runs
them on its own prompts.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.rollout import prefill, steps
from brorl_jax.rollout.blocks import all_free
from brorl_jax.rollout.prefill import PrefillBatch
from brorl_jax.rollout.program_spec import (
  SPLIT,
  WHOLE,
  ProgramSpec,
  on_devices,
)
from brorl_jax.rollout.slots import (
  DecodeProgress,
  DecodeState,
  RolloutQueue,
  measure_progress,
  refill,
  shift,
  unpack,
  upcoming,
  wants_prompts,
)
from brorl_jax.types import Rollouts


class DecodeInputs(NamedTuple):
  """The arrays that a decode step reads and never changes."""

  weights: PyTree  # from `Decoder.unroll`; later prompts are read with them
  prefix: Any  # keys and values of P prompts, from `Decoder.prefill`
  queue: RolloutQueue


# Where each array lies on a mesh: weights in full, the others by their prompts.
INPUT_SPECS = DecodeInputs._make((WHOLE, SPLIT, SPLIT))
PROGRESS_SPECS = DecodeProgress._make(
  [WHOLE] * (len(DecodeProgress._fields) - 1) + [SPLIT]
)


def idle(
  spec: ProgramSpec,
  todo: Int[Array, " places"],
  first: Int[Array, "P N 2"],
) -> DecodeState:
  """Before the first step, with every slot idle.

  Args:
    todo: Prompts in the order in which they get a lane, then P.
    first: First tokens of all rollouts, packed.
  """
  P, N = first.shape[:2]
  T, A, R = spec.max_new_tokens, spec.lanes, spec.slots
  zero = jnp.zeros((1,), jnp.int32)
  return DecodeState(
    column=zero,
    slot_steps=zero,
    todo=todo,
    next=zero,
    window=jnp.full((A, 1 if A == P else 2), P, jnp.int32),
    started=jnp.zeros((A,), jnp.int32),
    rollout=jnp.full((A, R), P * N, jnp.int32),
    token=jnp.zeros((A, R), jnp.int32),
    length=jnp.ones((A, R), jnp.int32),
    packed=jnp.full((P * N, T, 2), -1, jnp.int32)
    .at[:, 0]
    .set(first.reshape(P * N, 2)),
    blocks=all_free(spec.blocks, A * R, spec.pages) if spec.blocks else None,
  )


@functools.partial(jax.jit, static_argnames="spec")
def start(
  spec: ProgramSpec, params: PyTree, batch: PrefillBatch, key: Key[Array, ""]
) -> tuple[DecodeInputs, DecodeState, DecodeProgress]:
  """Reads the prompts and draws all first tokens; every slot is idle."""

  def begin(weights, batch, key):
    P = len(batch.real)
    prefix, queue, first = prefill.read(spec, weights, batch, key)
    queue = prefill.with_none(queue, key)
    order = jnp.argsort(~batch.real, stable=True).astype(jnp.int32)
    todo = jnp.append(jnp.where(batch.real[order], order, P), P)
    state = idle(spec, todo, first)
    inputs = DecodeInputs(weights, prefix, queue)
    return inputs, state, measure_progress(state, queue, spec)

  return on_devices(
    spec,
    begin,
    (WHOLE, SPLIT, WHOLE),
    (INPUT_SPECS, SPLIT, PROGRESS_SPECS),
    # Cast and unrolled before they are gathered, so that they are not stacked
    # and whole too: 12 layers of 1.5B on 8 H100 take .6 GiB instead of 2.5
    # beside the results.
  )(spec.policy.unroll(spec.policy.cast(params)), batch, key)


@functools.partial(jax.jit, static_argnames="spec")
def page(spec: ProgramSpec) -> Any:
  """An empty page of all slots."""
  make = lambda: spec.policy.page(spec.lanes * spec.slots, spec.columns)
  return on_devices(spec, make, (), SPLIT)()


@functools.partial(jax.jit, static_argnames="spec")
def pool(spec: ProgramSpec) -> Any:
  """An empty pool on every device.

  Not made by `start`, which needs its memory to read the prompts, nor by the
  first `segment`, which would be compiled twice.
  """
  make = lambda: spec.policy.pool(spec.blocks, spec.columns)
  return on_devices(spec, make, (), SPLIT)()


@functools.partial(
  jax.jit, static_argnames="spec", donate_argnames=("newest", "state")
)
def segment(
  spec: ProgramSpec,
  inputs: DecodeInputs,
  older: tuple[Any, ...],
  used: Int[Array, ""],
  newest: Any,
  state: DecodeState,
  turned: Bool[Array, ""],
  most: Int[Array, ""],
) -> tuple[Any, DecodeState, DecodeProgress]:
  """Decodes until the newest page is full or lanes have no prompt left.

  Keys and values of the lanes' windows are gathered when lanes get other
  prompts. The loop also ends when lanes want some and none waits, in a stream
  when fewer than one for each lane do: the host may have more. A single page is
  never full, because its columns are reused in a circle, and neither is a pool.
  Over a pool the loop looks only every `spec.unchecked` steps whether it ends.

  Args:
    inputs: The arrays that no step changes.
    older: As many pages as there can be before the newest; only read.
    used: How many of them, the last ones, hold anything.
    newest: The page to write, or the pool.
    state: Before the first step; donated.
    turned: Whether the newest page holds nothing that is still needed, so that
      writing begins at column 0.
    most: Maximum number of steps, rounded up to `spec.unchecked`.

  Returns:
    The newest page or the pool, the state and the progress after the last step.
  """
  policy, N = spec.policy, spec.n

  def segment(inputs, older, used, newest, state, turned, most):
    queue = inputs.queue
    P, _ = queue.sizes
    column = jnp.where(turned, 0, state.column)
    state = shift(dataclasses.replace(state, column=column), queue)
    end = column[0] + most

    def room(state):
      own = not spec.turns or state.column[0] < spec.columns
      return own & (state.column[0] < end)

    def goes_on(carry):
      state = carry[1]
      busy = jnp.any(state.rollout < P * N)
      return busy & room(state) & ~wants_prompts(state, queue, spec)

    def with_windows(carry):
      """Decodes until lanes need other prompts, and gives them those."""
      newest, state, _ = carry
      state = refill(state, queue, jnp.zeros_like(state.rollout, bool))
      # Not per step: with W = 2 and A lanes this copies 2 L G K x A W S
      # numbers, which a step would otherwise gather again.
      shared = policy.lane_prompts(inputs.prefix, queue.row[state.window])
      read = spec, inputs.weights, queue, shared

      def step(_, carry):
        if spec.blocks:
          return steps.over_pool(*read, *carry)
        return steps.over_pages(*read, older, used, *carry)

      def some(carry):
        return jax.lax.fori_loop(0, spec.unchecked, step, carry)

      newest, state = jax.lax.while_loop(
        goes_on,
        some if spec.unchecked > 1 else functools.partial(step, None),
        (newest, state),
      )
      # The host learns of finished prompts before lanes run out of others.
      ahead = spec.lanes - 1 if spec.streams else 0
      again = (upcoming(state, ahead) < P) & room(state)
      # The host may give the place of every finished prompt to another.
      return newest, shift(state, queue), again

    newest, state, _ = jax.lax.while_loop(
      lambda carry: carry[2], with_windows, (newest, state, room(state))
    )
    return newest, state, measure_progress(state, queue, spec)

  return on_devices(
    spec,
    segment,
    (INPUT_SPECS, SPLIT, WHOLE, SPLIT, SPLIT, WHOLE, WHOLE),
    (SPLIT, SPLIT, PROGRESS_SPECS),
  )(inputs, older, used, newest, state, turned, most)


def turned(spec: ProgramSpec, pages: list[Any], longest: int) -> list[Any]:
  """The pages that the next steps need; the last one is written."""
  # The newest token of a rollout is not in the cache yet, hence the - 1.
  needed = -(-(longest - 1) // spec.columns)
  if needed == spec.pages:
    # The oldest page is written again, column by column. A column is then T or
    # more steps old, which no rollout sees.
    return [*pages[-needed + 1 :], pages[-needed]]
  return [*(pages[-needed:] if needed else []), page(spec)]


@functools.partial(jax.jit, static_argnames="spec")
def resize(
  spec: ProgramSpec, state: DecodeState
) -> tuple[Int[Array, " rows"], DecodeState]:
  """Keeps the busy lanes and slots and adds idle ones, to the sizes of `spec`.

  Args:
    spec: Static; the new sizes, at least as large as what is busy.

  Returns:
    The row that each slot had, for `moved`, and the state. Blocks of a pool
    follow their slots in it.
  """

  def resize(state):
    P = state.todo.shape[0] - 1
    none = state.packed.shape[0]  # P N, the rollout of an idle slot
    busy = state.rollout < none

    def chosen(keep, count):  # an index out of bounds is a new, idle one
      # Stable, so that the kept ones stay in order and results do not depend
      # on the sizes before.
      order = jnp.argsort(~keep, axis=-1, stable=True)[..., :count]
      spare = [(0, 0)] * (keep.ndim - 1) + [(0, count - order.shape[-1])]
      return jnp.pad(order, spare, constant_values=max(keep.shape))

    def at(x, *index, fill=0):
      return x.at[index].get(mode="fill", fill_value=fill)

    lane = chosen(jnp.any(busy, axis=1), spec.lanes)
    slot = chosen(at(busy, lane, fill=False), spec.slots)
    slots = lambda x, fill: at(x, lane[:, None], slot, fill=fill)
    row = slots(jnp.arange(busy.size).reshape(busy.shape), 0).ravel()
    held = state.blocks
    if held is not None:  # idle slots hold no blocks
      kept = slots(held.held.reshape(busy.shape), 0).ravel()
      held = held._replace(table=held.table[row], held=kept)
    state = dataclasses.replace(
      state,
      window=at(state.window, lane, fill=P),
      started=at(state.started, lane),
      rollout=slots(state.rollout, none),
      token=slots(state.token, 0),
      length=slots(state.length, 1),
      blocks=held,
    )
    return row.astype(jnp.int32), state

  return on_devices(spec, resize, (SPLIT,), (SPLIT, SPLIT))(state)


@functools.partial(jax.jit, static_argnames="spec")
def moved(spec: ProgramSpec, page: Any, row: Int[Array, " rows"]) -> Any:
  """A page for the slots of `spec`, which had these rows."""
  move = lambda page, row: jax.tree.map(lambda x: x[row], page)
  return on_devices(spec, move, (SPLIT, SPLIT), SPLIT)(page, row)


@functools.partial(jax.jit, static_argnames="spec")
def finish(spec: ProgramSpec, state: DecodeState) -> Rollouts:
  """Tokens, masks and log-probabilities of every rollout of `state`."""

  def own(state):
    share = state.slot_steps.astype(jnp.float32) * spec.n / len(state.packed)
    slot_steps = jnp.broadcast_to(share, len(state.packed) // spec.n)
    packed = state.packed.reshape(-1, spec.n, spec.max_new_tokens, 2)
    return to_rollouts(spec, packed, slot_steps)

  return on_devices(spec, own, (SPLIT,), SPLIT)(state)


def to_rollouts(
  spec: ProgramSpec,
  packed: Int[Array, "P N T 2"],
  slot_steps: Float[Array, " P"],
) -> Rollouts:
  """`Rollouts` of packed tokens and log-probabilities."""
  tokens, logp = unpack(packed)
  mask = tokens >= 0  # `start` filled the array with -1
  last = jnp.sum(mask, axis=2, keepdims=True) - 1
  last = jnp.take_along_axis(tokens, last, axis=2)[..., 0]
  return Rollouts(
    tokens=jnp.where(mask, tokens, 0),
    logp=jnp.where(mask, logp, 0.0),
    mask=mask,
    truncated=~spec.ended(last),
    slot_steps=slot_steps,
  )
