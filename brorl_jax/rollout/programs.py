"""The compiled programs of the sampler; each is compiled for a `ProgramSpec`.

All N first tokens of a prompt come from one distribution, so no slot and no
decode step is spent on them. Idle slots decode too, and their results are
dropped: a step has one shape. They count in rollout/slot_occupancy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax.rollout import slots
from brorl_jax.rollout.draw import draw
from brorl_jax.rollout.slots import SPLIT, WHOLE, ProgramSpec, Seed, pack
from brorl_jax.types import Prompts, Rollouts

# Prompt tokens of one prefill. More would only need more memory: one activation
# of the feed-forward of a 1.5B policy (8,960 wide, float32) takes .6 GB here.
PREFILL_TOKENS = 16384


class PrefillBatch(NamedTuple):
  """Prompts to read, and which of each prompt's rollouts to make."""

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
  begun: Int[Any, "P N T 2"] | None = None  # of `Prompts`


def read_prompts(
  spec: ProgramSpec, weights: PyTree, batch: PrefillBatch, key: Seed
) -> tuple[Any, slots.RolloutQueue, Int[Array, "P N 2"]]:
  """Prefix, queue and packed first tokens of prompts, inside a program."""
  prompts, offset, real = batch
  logits, prefix = prefill(spec.policy, weights, prompts.tokens, prompts.mask)
  row = jnp.arange(len(prompts.index), dtype=jnp.int32)
  chunks = Chunks(prompts.index, offset, real, row)
  return prefix, *queued(spec, logits, chunks, key)


def queued(
  spec: ProgramSpec, logits: Float[Array, "P V"], chunks: Chunks, key: Seed
) -> tuple[slots.RolloutQueue, Int[Array, "P N 2"]]:
  """The queue of these rollouts, and their first tokens, packed."""
  P, N = len(chunks.index), spec.chunk
  nothing = jnp.zeros((P, N), jnp.int32)
  keys = slots.fold_in(key, chunks.index)
  row, of = nothing[:, 0], (keys, chunks.offset, chunks.row)
  queue = slots.RolloutQueue(nothing, row, nothing, *of)
  uniform = queue.uniform(jnp.arange(P)[:, None], jnp.arange(N)[None], 0)
  packed = pack(*draw(spec.sampling.cut(logits), uniform))
  last, count = packed[..., 0], 1
  if (begun := chunks.begun) is not None:
    count = jnp.sum(begun[..., 0] >= 0, axis=2)
    packed = jnp.where(count[..., None] > 0, begun[:, :, 0], packed)
    at = jnp.maximum(count - 1, 0)[..., None, None]
    before = jnp.take_along_axis(begun, at, axis=2)[:, :, 0, 0]
    last = jnp.where(count > 0, before, last)
  # Rollouts that need no slot: these tokens were all.
  over = spec.ended(last) | (count >= spec.max_new_tokens)
  over |= ~chunks.real[:, None]
  queue = queue._replace(
    order=jnp.argsort(over, axis=1, stable=True).astype(jnp.int32),
    waiting=jnp.sum(~over, axis=1, dtype=jnp.int32),
    first=packed[..., 0],
  )
  return queue, packed


def with_none(queue: slots.RolloutQueue, key: Seed) -> slots.RolloutQueue:
  """The queue with prompt P, which has no rollouts: no index needs a branch."""
  extra = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
  order, waiting, first, offset = map(extra, (*queue[:3], queue.offset))
  key = jnp.append(queue.key, slots.fold_in(key, 0))
  row = jnp.append(queue.row, len(queue.row))
  return slots.RolloutQueue(order, waiting, first, key, offset, row)


def prefill(
  policy: slots.Decoder,
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


def _over_pages(
  spec: ProgramSpec,
  weights: PyTree,
  queue: slots.RolloutQueue,
  shared: Any,
  older: tuple[Any, ...],
  used: Int[Array, ""],
  page: Any,
  state: slots.DecodeState,
) -> tuple[Any, slots.DecodeState]:
  """One more token of every slot, written to `page` and to the state."""
  at = state.token, state.length, _which(spec, state)
  column, pages = state.column[0] % spec.columns, (*older, page)
  step = spec.policy.decode_step
  logits, page = step(weights, shared, pages, *at, column, used)
  new, at = _drawn(spec, queue, state, logits), (state.rollout, state.length)
  goes_on = jnp.zeros_like(state.length, bool)
  if spec.replays:
    new, goes_on = _recorded(state, new)
  token = new[..., 0]
  over = spec.ended(token) & ~goes_on
  over |= state.length + 1 == spec.max_new_tokens
  state = dataclasses.replace(
    state,
    column=state.column + 1,
    slot_steps=state.slot_steps + state.rollout.size,
    token=token,
    length=state.length + 1,
    packed=state.packed.at[at].set(new, mode="drop"),  # none of idle slots
  )
  return page, slots.refill(state, queue, over)


def _over_pool(
  spec: ProgramSpec,
  weights: PyTree,
  queue: slots.RolloutQueue,
  shared: Any,
  pool: Any,
  state: slots.DecodeState,
) -> tuple[Any, slots.DecodeState]:
  """One more token of the rows that have a block for it, see `Blocks`."""
  assert state.blocks is not None
  PN, shape = len(state.packed), state.rollout.shape
  held, goes, stalled = slots.give_blocks(
    state.blocks, state.length.ravel(), state.rollout.ravel() < PN, spec.columns
  )
  goes = goes.reshape(shape)
  at = state.token, state.length, _which(spec, state)
  step = spec.policy.pool_step
  logits, pool = step(weights, shared, pool, *at, held.table, goes)
  new, goes_on = _recorded(state, _drawn(spec, queue, state, logits))
  token = new[..., 0]
  length = state.length + goes
  ended = spec.ended(token) & ~goes_on
  over = goes & (ended | (length == spec.max_new_tokens))
  # A row that ends frees blocks too; then none has to begin again.
  short = jnp.any(stalled) & ~jnp.any(over)
  again = short & slots.shortest_row(held, length.ravel())
  count = held.restarted + jnp.sum(again, dtype=jnp.int32)
  held = held._replace(restarted=count)
  held = slots.return_blocks(held, over.ravel() | again)
  again = again.reshape(shape)
  # Not read from `packed`, which would then be copied before it is written.
  first = queue.first[state.rollout // spec.chunk, state.rollout % spec.chunk]
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
  return pool, slots.refill(state, queue, over)


def _recorded(
  state: slots.DecodeState, new: Int[Array, "A R 2"]
) -> tuple[Int[Array, "A R 2"], Bool[Array, "A R"]]:
  """The tokens that are recorded there, and new ones where none is; whether a
  recorded one follows. A rollout that begins again makes those that it made
  before: rounding, or an update since then, cannot part the two.
  """
  two = jnp.stack([state.length, state.length + 1], axis=-1)
  found = state.packed.at[state.rollout[..., None], two]
  found = found.get(mode="fill", fill_value=-1)
  before, after = found[..., 0, :], found[..., 1, 0]
  return jnp.where(before[..., :1] >= 0, before, new), after >= 0


def _which(spec: ProgramSpec, state: slots.DecodeState) -> Int[Array, "A R"]:
  """Index of each slot's prompt in its lane's window; 0 of idle slots."""
  W = state.window.shape[1]
  busy = state.rollout < len(state.packed)
  of_last = busy & (state.rollout // spec.chunk == state.window[:, -1:])
  return jnp.where(of_last, W - 1, 0)


def _drawn(
  spec: ProgramSpec,
  queue: slots.RolloutQueue,
  state: slots.DecodeState,
  logits: Float[Array, "A R V"],
) -> Int[Array, "A R 2"]:
  """The next token of every slot with its log-probability, packed."""
  prompt, n = state.rollout // spec.chunk, state.rollout % spec.chunk
  uniform = queue.uniform(prompt, n, state.length)
  token, logp = draw(spec.sampling.cut(logits), uniform[..., None])
  return pack(token[..., 0], logp[..., 0])


class DecodeInputs(NamedTuple):
  """The arrays that a decode step reads and never changes."""

  weights: PyTree  # from `Decoder.unroll`; later prompts are read with them
  prefix: Any  # keys and values of P prompts
  queue: slots.RolloutQueue


# Where each array lies on a mesh: weights in full, the others by their prompts.
INPUT_SPECS = DecodeInputs._make((WHOLE, SPLIT, SPLIT))
PROGRESS_SPECS = slots.DecodeProgress._make(
  [WHOLE] * (len(slots.DecodeProgress._fields) - 2) + [SPLIT, SPLIT]
)


def idle(
  spec: ProgramSpec, todo: Int[Array, " places"], first: Int[Array, "P N 2"]
) -> slots.DecodeState:
  """Before the first step, with packed first tokens: every slot is idle."""
  P, N = first.shape[:2]
  T, A, R = spec.max_new_tokens, spec.lanes, spec.slots
  zero = jnp.zeros((1,), jnp.int32)
  packed = jnp.full((P * N, T, 2), -1, jnp.int32)
  held = slots.none_held(spec.blocks, A * R, spec.pages)
  return slots.DecodeState(
    column=zero,
    slot_steps=zero,
    todo=todo,
    next=zero,
    window=jnp.full((A, 1 if A == P else 2), P, jnp.int32),
    home=jnp.arange(A, dtype=jnp.int32),
    started=jnp.zeros((A,), jnp.int32),
    rollout=jnp.full((A, R), P * N, jnp.int32),
    token=jnp.zeros((A, R), jnp.int32),
    length=jnp.ones((A, R), jnp.int32),
    packed=packed.at[:, 0].set(first.reshape(P * N, 2)),
    blocks=held if spec.blocks else None,
  )


@functools.partial(jax.jit, static_argnames="spec")
def start(
  spec: ProgramSpec, params: PyTree, batch: PrefillBatch, key: Seed
) -> tuple[DecodeInputs, slots.DecodeState, slots.DecodeProgress]:
  """Reads the prompts and draws all first tokens; every slot is idle."""

  def begin(weights, batch, key):
    P = len(batch.real)
    prefix, queue, first = read_prompts(spec, weights, batch, key)
    queue = with_none(queue, key)
    order = jnp.argsort(~batch.real, stable=True).astype(jnp.int32)
    todo = jnp.append(jnp.where(batch.real[order], order, P), P)
    state = idle(spec, todo, first)
    inputs = DecodeInputs(weights, prefix, queue)
    return inputs, state, slots.measure_progress(state, queue, spec)

  return slots.on_devices(
    spec,
    begin,
    (WHOLE, SPLIT, WHOLE),
    (INPUT_SPECS, SPLIT, PROGRESS_SPECS),
    # Cast and unrolled before they are gathered, so that they are not stacked
    # and whole too: 12 layers of 1.5B on 8 H100 take .6 GiB instead of 2.5
    # beside the results.
  )(spec.policy.unroll(spec.policy.cast(params)), batch, key)


@slots.compiled((), SPLIT)
def cache(spec: ProgramSpec) -> Any:
  """An empty page of all slots, or an empty pool on every device."""
  # Not made by `start`, which needs its memory to read the prompts, nor by the
  # first `segment`, which would be compiled twice.
  if spec.blocks:
    return spec.policy.pool(spec.blocks, spec.columns)
  return spec.policy.page(spec.lanes * spec.slots, spec.columns)


@slots.compiled(
  (INPUT_SPECS, SPLIT, WHOLE, SPLIT, SPLIT, WHOLE, WHOLE),
  (SPLIT, SPLIT, PROGRESS_SPECS),
  donate_argnames=("newest", "state"),
)
def segment(
  spec: ProgramSpec,
  inputs: DecodeInputs,
  older: tuple[Any, ...],
  used: Int[Array, ""],
  newest: Any,
  state: slots.DecodeState,
  turned: Bool[Array, ""],
  limit: Int[Array, ""],
) -> tuple[Any, slots.DecodeState, slots.DecodeProgress]:
  """Decodes until the newest page is full or lanes have no prompt left.

  The loop also ends when lanes want prompts and none waits, in a stream when
  fewer than one for each lane do: the host may have more. A single page is
  never full, because its columns are reused in a circle, and neither is a pool.

  `older` are as many pages as there can be before the newest, of which the last
  `used` hold anything. `newest`, or the pool, is donated, as is the state. If
  it has nothing that is still needed, it has `turned` and is written from
  column 0. `limit` is the most steps, rounded up to `spec.unchecked`.
  """
  policy, N, queue = spec.policy, spec.chunk, inputs.queue
  P, _ = queue.sizes
  column = jnp.where(turned, 0, state.column)
  state = slots.shift(dataclasses.replace(state, column=column), queue)
  end = column[0] + limit

  def room(state):
    free = not spec.turns or state.column[0] < spec.columns
    return free & (state.column[0] < end)

  def continues(carry):
    state = carry[1]
    busy = jnp.any(state.rollout < P * N)
    return busy & room(state) & ~slots.wants_prompts(state, queue, spec)

  def with_windows(carry):
    """Decodes until lanes need other prompts, and gives them those."""
    newest, state, _ = carry
    state = slots.refill(state, queue, jnp.zeros_like(state.rollout, bool))
    # Not per step: with W = 2 and A lanes this copies 2 L G K x A W S
    # numbers, which a step would otherwise gather again.
    shared = policy.lane_prompts(inputs.prefix, queue.row[state.window])
    read = spec, inputs.weights, queue, shared

    def step(_, carry):
      if spec.blocks:
        return _over_pool(*read, *carry)
      return _over_pages(*read, older, used, *carry)

    turn = functools.partial(step, None)
    if (count := spec.unchecked) > 1:
      turn = lambda carry: jax.lax.fori_loop(0, count, step, carry)
    newest, state = jax.lax.while_loop(continues, turn, (newest, state))
    # The host learns of finished prompts before lanes run out of others.
    ahead = spec.lanes - 1 if spec.streams else 0
    again = (slots.upcoming(state, ahead) < P) & room(state)
    # The host may give the place of every finished prompt to another.
    return newest, slots.shift(state, queue), again

  first, more = (newest, state, room(state)), lambda carry: carry[2]
  newest, state, _ = jax.lax.while_loop(more, with_windows, first)
  return newest, state, slots.measure_progress(state, queue, spec)


def turn_pages(spec: ProgramSpec, pages: list[Any], longest: int) -> list[Any]:
  """The pages that the next steps need; the last one is written."""
  # The newest token of a rollout is not in the cache yet, hence the - 1.
  needed = -(-(longest - 1) // spec.columns)
  if needed == spec.pages:
    # The oldest page is written again, column by column. A column is then T or
    # more steps old, which no rollout sees.
    return [*pages[-needed + 1 :], pages[-needed]]
  return [*(pages[-needed:] if needed else []), cache(spec)]


@slots.compiled((SPLIT,), (SPLIT, SPLIT))
def resize(
  spec: ProgramSpec, state: slots.DecodeState
) -> tuple[Int[Array, " rows"], slots.DecodeState]:
  """The busy slots in the lanes of `spec`, one behind another. Those of a lane
  fill as many new ones as they need, which its prompts come with.

  Returns the row that each slot had, for `moved`, and the state, where blocks
  of a pool follow their slots.
  """
  A, R, H = spec.lanes, spec.slots, spec.full[0]
  P = state.todo.shape[0] - 1
  none = state.packed.shape[0]  # P N, the rollout of an idle slot
  busy = state.rollout < none
  home = jnp.where(busy, state.home[:, None], H).ravel()
  # Stable, so that results do not depend on the sizes before.
  order = jnp.argsort(home, stable=True).astype(jnp.int32)
  home = home[order]
  count = jnp.zeros(H, jnp.int32).at[home].add(1, mode="drop")
  end = jnp.cumsum(-(-count // R))  # of the new lanes of each home
  before = (jnp.cumsum(count) - count).at[home].get(mode="clip")
  rank = jnp.arange(busy.size) - before
  at = (end - -(-count // R)).at[home].get(mode="clip") * R + rank
  at = jnp.where(home < H, at, A * R)  # out of bounds: idle
  row = jnp.full(A * R, busy.size, jnp.int32).at[at].set(order, mode="drop")

  def each(x, fill):
    return x.ravel().at[row].get(mode="fill", fill_value=fill).reshape(A, R)

  of = jnp.searchsorted(end, jnp.arange(A), side="right")  # H: of none
  # Of parts of a lane some may be done with its first prompt: the one that has
  # counted most rollouts is not, and its window holds all that is needed.
  own = state.home[None] == jnp.arange(H)[:, None]
  lane = jnp.argmax(jnp.where(own, state.started[None], -1), axis=1)
  lane = lane.at[of].get(mode="fill", fill_value=len(state.home))
  held = state.blocks
  if held is not None:  # idle slots hold no blocks
    kept = each(held.held, 0).ravel()
    held = held._replace(table=held.table.at[row].get(mode="clip"), held=kept)
  whole = (A, R) == spec.full
  state = dataclasses.replace(
    state,
    window=state.window.at[lane].get(mode="fill", fill_value=P),
    started=state.started.at[lane].get(mode="fill", fill_value=0),
    home=jnp.arange(A, dtype=jnp.int32) if whole else of.astype(jnp.int32),
    rollout=each(state.rollout, none),
    token=each(state.token, 0),
    length=each(state.length, 1),
    blocks=held,
  )
  return row, state


@slots.compiled((SPLIT, SPLIT), SPLIT)
def moved(spec: ProgramSpec, page: Any, row: Int[Array, " rows"]) -> Any:
  """A page for the slots of `spec`, which had these rows."""
  return jax.tree.map(lambda x: x.at[row].get(mode="clip"), page)


@slots.compiled((SPLIT,), SPLIT)
def finish(spec: ProgramSpec, state: slots.DecodeState) -> Rollouts:
  """Tokens, masks and log-probabilities of every rollout of `state`."""
  N, PN = spec.chunk, len(state.packed)
  share = state.slot_steps.astype(jnp.float32) * N / PN
  slot_steps = jnp.broadcast_to(share, PN // N)
  packed = state.packed.reshape(-1, N, spec.max_new_tokens, 2)
  return to_rollouts(spec, packed, slot_steps)


def to_rollouts(
  spec: ProgramSpec,
  packed: Int[Array, "P N T 2"],
  slot_steps: Float[Array, " P"],
) -> Rollouts:
  """`Rollouts` of packed tokens and log-probabilities."""
  tokens, logp = slots.unpack(packed)
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
