"""One more token of every slot, inside a program: over pages, or over a pool.

Idle slots decode too, and their results are dropped: a step has one shape. They
count in slot_steps, hence in rollout/slot_occupancy.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from brorl_jax.rollout import blocks
from brorl_jax.rollout.draw import draw
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.slots import DecodeState, RolloutQueue, pack, refill


def over_pages(
  spec: ProgramSpec,
  weights: PyTree,
  queue: RolloutQueue,
  shared: Any,
  older: tuple[Any, ...],
  used: Int[Array, ""],
  page: Any,
  state: DecodeState,
) -> tuple[Any, DecodeState]:
  """One more token, written to `page` and to the state.

  Args:
    weights: From `Decoder.unroll`.
    queue: Rollouts that need a slot.
    shared: Keys and values of the lanes' prompts.
    older: Pages that are only read, oldest first.
    used: How many of them, the last ones, hold anything.
    page: The newest page.
  """
  logits, page = spec.policy.decode_step(
    weights,
    shared,
    (*older, page),
    state.token,
    state.length,
    _which(spec, state),
    state.column[0] % spec.columns,
    used,
  )
  new = _drawn(spec, queue, state, logits)
  token = new[..., 0]
  at = (state.rollout, state.length)  # out of bounds for idle slots
  over = spec.ended(token) | (state.length + 1 == spec.max_new_tokens)
  state = dataclasses.replace(
    state,
    column=state.column + 1,
    slot_steps=state.slot_steps + state.rollout.size,
    token=token,
    length=state.length + 1,
    packed=state.packed.at[at].set(new, mode="drop"),
  )
  return page, refill(state, queue, over)


def over_pool(
  spec: ProgramSpec,
  weights: PyTree,
  queue: RolloutQueue,
  shared: Any,
  pool: Any,
  state: DecodeState,
) -> tuple[Any, DecodeState]:
  """One more token of the rows that have a block for it; see `blocks`.

  The pool is written in place; other arguments are those of `over_pages`.

  A rollout that began again makes the tokens that it made before: those that
  are recorded are taken, not drawn, so rounding cannot part the two, and what
  is recorded is one rollout from its first token to its last.
  """
  assert state.blocks is not None
  PN, shape = len(state.packed), state.rollout.shape
  held, goes, stalled = blocks.give(
    state.blocks, state.length.ravel(), state.rollout.ravel() < PN, spec.columns
  )
  goes = goes.reshape(shape)
  logits, pool = spec.policy.pool_step(
    weights,
    shared,
    pool,
    state.token,
    state.length,
    _which(spec, state),
    held.table,
    goes,
  )
  new = _drawn(spec, queue, state, logits)
  at = (state.rollout, state.length)
  before = state.packed.at[at].get(mode="fill", fill_value=-1)
  new = jnp.where(before[..., :1] >= 0, before, new)
  token = new[..., 0]
  length = state.length + goes
  over = goes & (spec.ended(token) | (length == spec.max_new_tokens))
  # A row that ends frees blocks too; then none has to begin again.
  short = jnp.any(stalled) & ~jnp.any(over)
  again = short & blocks.shortest(held, length.ravel())
  held = held._replace(
    restarted=held.restarted + jnp.sum(again, dtype=jnp.int32)
  )
  held = blocks.take_back(held, over.ravel() | again)
  again = again.reshape(shape)
  # Not read from `packed`, which would then be copied before it is written.
  first = queue.first[state.rollout // spec.n, state.rollout % spec.n]
  state = dataclasses.replace(
    state,
    column=state.column + 1,
    slot_steps=state.slot_steps + state.rollout.size,
    token=jnp.where(again, first, jnp.where(goes, token, state.token)),
    length=jnp.where(again, 1, length),
    packed=state.packed.at[jnp.where(goes, state.rollout, PN), state.length]
    .set(new, mode="drop"),
    blocks=held,
  )  # fmt: skip
  return pool, refill(state, queue, over)


def _which(spec: ProgramSpec, state: DecodeState) -> Int[Array, "A R"]:
  """Index of each slot's prompt in its lane's window; 0 of idle slots.

  So nobody sees a second prompt whose rollouts have not begun.
  """
  W = state.window.shape[1]
  busy = state.rollout < len(state.packed)
  of_last = busy & (state.rollout // spec.n == state.window[:, -1:])
  return jnp.where(of_last, W - 1, 0)


def _drawn(
  spec: ProgramSpec,
  queue: RolloutQueue,
  state: DecodeState,
  logits: Float[Array, "A R V"],
) -> Int[Array, "A R 2"]:
  """The next token of every slot with its log-probability, packed."""
  prompt, n = state.rollout // spec.n, state.rollout % spec.n
  uniform = queue.uniform(prompt, n, state.length)
  token, logp = draw(spec.sampling.cut(logits), uniform[..., None])
  return pack(token[..., 0], logp[..., 0])
