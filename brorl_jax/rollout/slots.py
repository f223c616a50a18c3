"""The state of the decode slots, the queue that refills them, and their blocks.

A lane is R slots that decode together. It has a window of one or two prompts:
a slot whose rollout ends takes the next rollout of the first prompt in the same
step, and of the second one when the first has none left. The real prompts are 0
to P - 1. Prompt P has no rollouts and fills the window of lanes without work.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from brorl_jax.many import meshes
from brorl_jax.rollout.program_spec import ProgramSpec


class Blocks(NamedTuple):
  """The free blocks of a pool, and those of every row; see `model/pool.py`.

  A row takes a block when its next token begins one, and gives all back when
  its rollout ends. If the pool is smaller than all rows need at once,

    1. longer rows get blocks before shorter ones;
    2. a row without a block for its next token does not advance in that step;
    3. the shortest row that holds blocks gives them back and begins again;
    4. a row begins only while more blocks are free than others may want next.

  By 1 and 3 the longest row always advances, if the pool has room for one
  longest rollout: so every rollout ends. By 4 few rows begin again soon.
  """

  free: Int[Array, " blocks"]  # a stack; the first `count` are free
  count: Int[Array, " one"]
  table: Int[Array, "B longest"]  # the first `held` of each row are valid
  held: Int[Array, " B"]
  stalled: Int[Array, " one"]  # how often a row had to wait for a next block
  restarted: Int[Array, " one"]  # how often a row gave its blocks back


def none_held(blocks: int, rows: int, longest: int) -> Blocks:
  """No row has a block."""
  zero = jnp.zeros((1,), jnp.int32)
  return Blocks(
    free=jnp.arange(blocks, dtype=jnp.int32),
    count=zero + blocks,
    table=jnp.zeros((rows, longest), jnp.int32),
    held=jnp.zeros((rows,), jnp.int32),
    stalled=zero,
    restarted=zero,
  )


def give_blocks(
  blocks: Blocks,
  length: Int[Array, " B"],
  busy: Bool[Array, " B"],
  columns: int,
) -> tuple[Blocks, Bool[Array, " B"], Bool[Array, " B"]]:
  """A block of C columns for each busy row whose next token needs one.

  Of the tokens in `length` the last is not in the cache yet; a row that holds
  no block has 1. Returns the blocks, the rows that advance, and of the others
  those that hold blocks.
  """
  B, longest = blocks.table.shape
  row = jnp.arange(B, dtype=jnp.int32)
  need = busy & (blocks.held * columns < length)
  begins = need & (blocks.held == 0)
  grows = need & ~begins
  # Rows of length 1 are last, so the rows that begin come after all others.
  order = _order(length)
  before = jnp.sum(need[None] & (order[None] > order[:, None]), axis=1)
  left = blocks.count - before
  # Each row that has begun may want another block in the next step.
  after = blocks.held + grows
  wanted = jnp.sum((after > 0) & (after < longest))
  if longest > 1:
    wanted += before - jnp.sum(grows)  # by those that begin in this step
  given = need & (left > jnp.where(begins, wanted, 0))
  top = blocks.free.at[left - 1].get(mode="clip")
  at = jnp.where(given, blocks.held, longest)
  held = blocks.held + given
  blocks = blocks._replace(
    count=blocks.count - jnp.sum(given, dtype=jnp.int32),
    table=blocks.table.at[row, at].set(top, mode="drop"),
    held=held,
    stalled=blocks.stalled + jnp.sum(grows & ~given, dtype=jnp.int32),
  )
  return blocks, busy & (held * columns >= length), grows & ~given


def shortest_row(blocks: Blocks, length: Int[Array, " B"]) -> Bool[Array, " B"]:
  """Of the rows that hold blocks the last one in the order of `give_blocks`."""
  none = jnp.iinfo(jnp.int32).max
  order = jnp.where(blocks.held > 0, _order(length), none)
  last = jnp.arange(len(order)) == jnp.argmin(order)
  return last & (blocks.held > 0)


def return_blocks(blocks: Blocks, rows: Bool[Array, " B"]) -> Blocks:
  """All blocks of these rows are free again."""
  returned = jnp.where(rows, blocks.held, 0)
  end = blocks.count + jnp.cumsum(returned, dtype=jnp.int32)
  index = jnp.arange(blocks.table.shape[1], dtype=jnp.int32)[None]
  at = jnp.where(
    index < returned[:, None],
    (end - returned)[:, None] + index,
    len(blocks.free),  # out of bounds
  )
  return blocks._replace(
    free=blocks.free.at[at].set(blocks.table, mode="drop"),
    count=end[-1:],
    held=blocks.held - returned,
  )


def _order(length: Int[Array, " B"]) -> Int[Array, " B"]:
  """Numbers that differ, larger for a longer row, then for an earlier one."""
  B = len(length)
  return length * B - jnp.arange(B, dtype=jnp.int32)


# The decode loop of a stream pauses when an eighth of the working lanes waits
# for a prompt. With N = 16, an exit to the host for each of them took 2.0 s for
# a step's rollouts instead of 1.3: it costs more than the idle lanes.
_IDLE_SHARE = 8

fold_in = jnp.vectorize(jax.random.fold_in)


class RolloutQueue(NamedTuple):
  """Rollouts that need a slot: those whose first token did not end them."""

  order: Int[Array, "P+1 N"]  # n of the rollouts that need a slot, then others
  waiting: Int[Array, " P+1"]  # how many need a slot, counted at the prefill
  first: Int[Array, "P+1 N"]  # first token of rollout n
  key: Key[Array, " P+1"]  # fold_in(key of the step, p)
  offset: Int[Array, " P+1"]  # n of the prompt's first rollout on this device
  row: Int[Array, " P+1"]  # of its keys and values in the prefix; P of prompt P

  @property
  def sizes(self) -> tuple[int, int]:
    """P and N."""
    return self.order.shape[0] - 1, self.order.shape[1]

  def uniform(
    self, prompt: Int[Array, "A #R"], n: Int[Array, "#A R"], i: Any
  ) -> Float[Array, "A R"]:
    """The uniform number that decides token i of rollout n of each prompt."""
    # Keys depend on (p, n, i) alone: N, slots and devices change no rollout.
    key = fold_in(self.key[prompt], n + self.offset[prompt])
    return jnp.vectorize(jax.random.uniform)(fold_in(key, i))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """All that a decode step changes, except for the cache.

  Scalars have an axis of size 1, so that each device of a mesh has its own.
  """

  column: Int[Array, " one"]  # that the next step writes; counts steps too
  slot_steps: Int[Array, " one"]  # slots times steps so far
  todo: Int[Array, " places"]  # prompts in the order they get a lane, then P
  next: Int[Array, " one"]  # index in `todo` of the first prompt without a lane
  window: Int[Array, "A W"]  # prompts that each lane works on; P is none
  started: Int[Array, " A"]  # rollouts of the window that have had a slot
  rollout: Int[Array, "A R"]  # p N + n of the slot's rollout; P N if idle
  token: Int[Array, "A R"]  # its last token, not yet in the cache
  length: Int[Array, "A R"]  # its tokens so far
  packed: Int[Array, "B T 2"]  # `pack` of rollout p N + n; -1 without a token
  blocks: Blocks | None  # of the pool; None over pages


class DecodeProgress(NamedTuple):
  """How far the rollouts are, over all devices; on the host as integers."""

  slots: Any  # busy slots of the busiest lane
  lanes: Any  # lanes with a busy slot, on the device that has most of them
  longest: Any  # tokens of the longest rollout that has a slot
  busy: Any  # busy slots, summed over devices
  waiting: Any  # rollouts that have had no slot yet, summed over devices
  room: Any  # devices that have work and free columns in the newest page
  slot_steps: Any  # slots times steps so far, summed over devices
  stalled: Any  # of these, that waited for a block, see `blocks.Blocks`
  restarted: Any  # rollouts that gave their blocks back and began again
  resting: Any  # [P]: whether no lane has this prompt or will get it


def pack(
  token: Int[Array, "*axes"], logp: Float[Array, "*axes"]
) -> Int[Array, "*axes 2"]:
  """Tokens and the bits of their float32 log-probabilities, in one array.

  A decode step scatters one position per slot. Two arrays need two scatters.
  """
  bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
  return jnp.stack([token, bits], axis=-1)


def unpack(
  packed: Int[Array, "*axes 2"],
) -> tuple[Int[Array, "*axes"], Float[Array, "*axes"]]:
  """Tokens and log-probabilities that `pack` joined."""
  logp = jax.lax.bitcast_convert_type(packed[..., 1], jnp.float32)
  return packed[..., 0], logp


def _take(
  queue: RolloutQueue, window: Int[Array, "A W"], place: Int[Array, "A R"]
) -> tuple[Int[Array, "A R"], Int[Array, "A R"]]:
  """Rollouts p N + n at these places of each lane's queue, and first tokens."""
  P, N = queue.sizes
  count = queue.waiting[window]  # A W
  end = jnp.cumsum(count, axis=1)
  w = jnp.sum(place[..., None] >= end[:, None], axis=-1)  # W behind the end
  inside = w < window.shape[1]
  w = jnp.where(inside, w, 0)
  p = jnp.take_along_axis(window, w, axis=1)
  i = place - jnp.take_along_axis(end - count, w, axis=1)
  n = queue.order[p, jnp.where(inside, i, 0)]
  # P N is out of bounds of `packed`, so an idle slot's writes are dropped.
  return jnp.where(inside, p * N + n, P * N), queue.first[p, n]


def refill(
  state: DecodeState, queue: RolloutQueue, over: Bool[Array, "A R"]
) -> DecodeState:
  """Slots that are idle or `over` take the next rollouts of their lane."""
  P, N = queue.sizes
  free = over | (state.rollout == P * N)
  # The k-th free slot of a lane takes the k-th rollout that is left.
  place = state.started[:, None] + jnp.cumsum(free, axis=1) - 1
  rollout, token = _take(queue, state.window, place)
  total = jnp.sum(queue.waiting[state.window], axis=1)
  taken = state.started + jnp.sum(free, axis=1, dtype=jnp.int32)
  return dataclasses.replace(
    state,
    started=jnp.minimum(taken, total),
    rollout=jnp.where(free, rollout, state.rollout),
    token=jnp.where(free, token, state.token),
    # 1, not 0: the prefill drew the first token.
    length=jnp.where(free, 1, state.length),
  )


def _first_done(state: DecodeState, queue: RolloutQueue) -> Bool[Array, " A"]:
  """Lanes whose first prompt has no rollout left to start or in a slot."""
  P, N = queue.sizes
  first = state.window[:, :1]
  of_first = (state.rollout // N == first) & (state.rollout < P * N)
  busy = jnp.any(of_first, axis=1)
  return ~busy & (state.started >= queue.waiting[first[:, 0]])


def shift(state: DecodeState, queue: RolloutQueue) -> DecodeState:
  """Lanes whose first prompt is done move on to their next prompts."""
  P, _ = queue.sizes

  def moves(state):
    more = (state.window[:, 0] < P) | (upcoming(state) < P)
    return jnp.any(_first_done(state, queue) & more)

  def move(state):
    done = _first_done(state, queue)
    started = queue.waiting[state.window[:, 0]]
    # The next prompts, lane by lane; P when there are none.
    new = state.todo[jnp.minimum(state.next + jnp.cumsum(done) - 1, P)]
    last = jnp.where(done, new, state.window[:, -1])
    rest = jnp.where(done[:, None], state.window[:, 1:], state.window[:, :-1])
    return dataclasses.replace(
      state,
      next=jnp.minimum(state.next + jnp.sum(done, dtype=jnp.int32), P),
      window=jnp.concatenate([rest, last[:, None]], axis=1),
      started=jnp.where(done, state.started - started, state.started),
    )

  # A loop, since the next prompt may be done too: all of its rollouts may have
  # ended with their first token.
  return jax.lax.while_loop(moves, move, state)


def upcoming(state: DecodeState, ahead: int = 0) -> Int[Array, ""]:
  """The first prompt without a lane, or one behind it; P if there is none."""
  return state.todo.at[state.next[0] + ahead].get(mode="clip")


def wants_prompts(
  state: DecodeState, queue: RolloutQueue, spec: ProgramSpec
) -> Bool[Array, ""]:
  """Whether decoding should pause so that lanes get other prompts."""
  P, _ = queue.sizes
  has_one = state.window[:, 0] < P
  done = jnp.sum(_first_done(state, queue) & has_one)
  enough = done > 0
  if spec.streams:
    # If none waits, the host is asked, which is worth it only for some lanes.
    return enough & (done * _IDLE_SHARE >= jnp.sum(has_one))
  return enough & (upcoming(state) < P)


def measure_progress(
  state: DecodeState, queue: RolloutQueue, spec: ProgramSpec
) -> DecodeProgress:
  """How far the rollouts are; all that the host reads between programs."""
  P, N = queue.sizes
  busy = state.rollout < P * N
  total = jnp.sum(queue.waiting[state.window], axis=1)
  untouched = jnp.where(jnp.arange(P + 1) >= state.next, state.todo, P)
  waiting = jnp.sum(total - state.started) + jnp.sum(queue.waiting[untouched])
  held = jnp.zeros(P + 1, bool).at[state.window].set(True)
  held = held.at[untouched].set(True)
  room = (state.column[0] < spec.columns) & (jnp.any(busy) | (waiting > 0))
  stalled = restarted = jnp.zeros((1,), jnp.int32)
  if state.blocks is not None:
    stalled, restarted = state.blocks.stalled, state.blocks.restarted
  largest = add = lambda x: x
  if spec.mesh is not None:
    largest = functools.partial(jax.lax.pmax, axis_name=meshes.ROWS)
    add = functools.partial(jax.lax.psum, axis_name=meshes.ROWS)
  return DecodeProgress(
    slots=largest(jnp.max(jnp.sum(busy, axis=1))),
    lanes=largest(jnp.sum(jnp.any(busy, axis=1))),
    longest=largest(jnp.max(jnp.where(busy, state.length, 0))),
    busy=add(jnp.sum(busy)),
    waiting=add(waiting),
    room=add(room.astype(jnp.int32)),
    slot_steps=add(state.slot_steps[0]),
    stalled=add(stalled[0]),
    restarted=add(restarted[0]),
    resting=~held[:P],
  )
