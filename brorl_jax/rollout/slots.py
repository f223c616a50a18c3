"""What sampler programs are compiled for, and the state of their decode slots.

Keys and values of responses have one of two forms. On a CPU they lie in pages,
whose column all slots write in lock-step; on accelerators in blocks of a pool,
which a slot takes as its rollout grows. The decoder says which.

A lane is R slots that decode together. It has a window of one or two prompts:
a slot whose rollout ends takes the next rollout of the first prompt in the same
step, and of the second one when the first has none left. The real prompts are 0
to P - 1. Prompt P has no rollouts and fills the window of lanes without work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.many import meshes
from brorl_jax.rollout.draw import SamplingParams

Seed = Key[Array, ""]  # of a step, or of a call
# A page has at least 64 columns, and a rollout at most 8 pages. Each number of
# pages is one more program to compile (1.5 CPU-s for 6 layers of width 256).
# With 8 pages attention reads at most 1/8 of the limit more than it must.
_LEAST_COLUMNS = 64
_MOST_PAGES = 8
# K, steps between two looks at whether the loop over a pool should end. A GPU's
# host reads that condition in every turn and launches nothing meanwhile. Rows
# that end in between idle for 8 steps on average, of thousands.
_UNCHECKED = 16


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs from a policy: pure functions of a hashable object.

  `prefill` and the steps read what `unroll` made of the cast parameters. Leaves
  of a prefix have axes [P,...]. Leaves of a page have axes [A R,...], and of a
  pool [blocks,...]. `pool_columns` is 0 if it decodes over pages.
  """

  @property
  def vocab(self) -> int: ...
  @property
  def pool_columns(self) -> int: ...
  def cast(self, params) -> PyTree: ...
  def unroll(self, params) -> PyTree: ...
  def prefill(self, params, tokens, mask) -> tuple[Array, Any]: ...
  def lane_prompts(self, prefix, window) -> Any: ...
  def page(self, rows, columns) -> Any: ...
  def decode_step(
    self, weights, shared, pages, token, length, which, column, used
  ) -> tuple[Array, Any]: ...
  def pool(self, blocks, columns) -> Any: ...
  def pool_step(
    self, weights, shared, pools, token, length, which, table, goes
  ) -> tuple[Array, Any]: ...


def page_columns(max_new_tokens: int) -> int:
  """C, columns of a page: a multiple of 64, or T if that is smaller."""
  least = -(-max_new_tokens // _MOST_PAGES)
  return min(-(-least // _LEAST_COLUMNS) * _LEAST_COLUMNS, max_new_tokens)


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
  """The static arguments of every program of one sampling call.

  Dimensions: A lanes of R slots on each device, N rollouts of at most T tokens
  per place, pages or blocks of C columns. Raises ValueError if the pool has no
  room for one longest rollout.
  """

  policy: Decoder
  sampling: SamplingParams
  stop_ids: tuple[int, ...]
  # N, rollouts of a prompt that are made in one place: all n of it, or fewer if
  # it gets them in rounds or on several devices.
  chunk: int
  max_new_tokens: int  # T
  lanes: int  # A, lanes of one device
  slots: int  # R, slots of one lane
  full: tuple[int, int]  # A and R before idle slots were dropped
  columns: int  # C, columns of a page, or tokens of a block
  mesh: Mesh | None
  # Whether more prompts may arrive. The decode loop then also ends when enough
  # lanes have no prompt left.
  streams: bool = False
  blocks: int = 0  # of a device's pool; 0: pages
  unchecked: int = 1  # K, steps between two looks at the loop's condition
  replays: bool = False  # over pages too, tokens that are recorded are taken

  def __post_init__(self):
    if 0 < self.blocks < self.pages:
      raise ValueError(
        f"blocks = {self.blocks} must be at least {self.pages}, which one "
        f"rollout of {self.max_new_tokens} tokens needs"
      )

  @property
  def pages(self) -> int:
    """Pages, or blocks, of the longest rollout."""
    return -(-self.max_new_tokens // self.columns)

  @property
  def turns(self) -> bool:
    """Whether a page may be full. A single one is reused in a circle."""
    return self.pages > 1 and not self.blocks

  def ended(self, token: Int[Array, "*axes"]) -> Bool[Array, "*axes"]:
    """Whether each token is a stop id."""
    return jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
  """What is sampled, and how much of it decodes together."""

  policy: Decoder
  sampling: SamplingParams
  stop_ids: tuple[int, ...]  # a rollout ends with the first of these tokens
  n: int  # N, rollouts of a prompt, or of a chunk of it
  max_new_tokens: int  # T
  slots: int  # R, rollouts of a prompt that decode together, at most N
  lanes: int | None = None  # prompts that decode together; all if None
  # Of each device's pool; None: enough for the longest rollouts in all slots.
  blocks: int | None = None
  mesh: Mesh | None = None  # from `meshes`; one device if None
  # Programs of a CPU that decode beside each other, each its share of prompts
  # or rollouts: operations of 24 us in one chain keep one core busy.
  groups: int = 1

  @property
  def devices(self) -> int:
    """Rows of devices, each of which has its own prompts."""
    return meshes.of(self.mesh).rows

  def share(self, places: int) -> "RolloutSpec":
    """What one of `groups` decodes, of prompts in so many places."""
    lanes, slots = self.lanes or places, self.slots
    if lanes < self.groups:
      slots = -(-slots // self.groups)
    lanes = -(-lanes // self.groups)
    return dataclasses.replace(self, lanes=lanes, slots=slots, groups=1)

  def program(
    self, places: int, *, parts: int = 1, streams: bool = False
  ) -> ProgramSpec:
    """The programs of a device, for places of prompts on all devices. The
    rollouts of a prompt are cut into `parts`, each with a place.
    """
    lanes = places if self.lanes is None else self.lanes * parts
    lanes = min(-(-lanes // self.devices), places // self.devices)
    slots = -(-self.slots // parts)
    pool = self.policy.pool_columns
    spec = ProgramSpec(
      self.policy,
      self.sampling,
      self.stop_ids,
      chunk=self.n // parts,
      max_new_tokens=self.max_new_tokens,
      lanes=lanes,
      slots=slots,
      full=(lanes, slots),
      columns=pool or page_columns(self.max_new_tokens),
      mesh=self.mesh,
      streams=streams,
      unchecked=_UNCHECKED if pool else 1,
    )
    if not pool:
      return spec
    all_rows = spec.lanes * spec.slots * spec.pages
    blocks = all_rows if self.blocks is None else self.blocks
    return dataclasses.replace(spec, blocks=blocks)


# On every row of devices in full, or cut along the first axis over all rows.
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(meshes.ROWS)


def compiled(
  in_specs: Any, out_specs: Any, **options: Any
) -> Callable[[Callable], Any]:
  """Compiles a function of a spec and of what `on_devices` gives each row."""

  def decorate(f: Callable) -> Any:
    @functools.partial(jax.jit, static_argnames="spec", **options)
    @functools.wraps(f)
    def program(spec, *args):
      here = functools.partial(f, spec)
      return on_devices(spec, here, in_specs, out_specs)(*args)

    return program

  return decorate


def on_devices(
  spec: ProgramSpec, f: Callable, in_specs: Any, out_specs: Any
) -> Callable:
  """`f`, run by each row of devices; inside, no row waits for another.

  The compiler may still shard heads and vocabulary within a row.
  """
  if spec.mesh is None:
    return f
  here = PartitionSpec(meshes.rows(spec.mesh))
  put = lambda place: here if place == SPLIT else place
  leaf = lambda x: isinstance(x, PartitionSpec)
  in_specs, out_specs = jax.tree.map(put, (in_specs, out_specs), is_leaf=leaf)
  return jax.shard_map(
    f,
    mesh=spec.mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={*meshes.ROWS},
    # The check refuses a loop whose state is equal at first and then differs.
    check_vma=False,
  )


class Blocks(NamedTuple):
  """The free blocks of a pool, and those of every row; see `cache.BlockPool`.

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
  table = jnp.zeros((rows, longest), jnp.int32)
  free, held = jnp.arange(blocks, dtype=jnp.int32), jnp.zeros(rows, jnp.int32)
  return Blocks(free, zero + blocks, table, held, zero, zero)


def give_blocks(
  blocks: Blocks,
  length: Int[Array, " B"],
  busy: Bool[Array, " B"],
  columns: int,
) -> tuple[Blocks, Bool[Array, " B"], Bool[Array, " B"]]:
  """A block of C columns for each busy row whose next token needs one. The last
  token of `length` is not cached yet; a row without blocks has 1. Returns the
  blocks, the rows that advance, and of the others those that hold blocks.
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
  order = jnp.where(blocks.held > 0, _order(length), jnp.iinfo(jnp.int32).max)
  last = jnp.arange(len(order)) == jnp.argmin(order)
  return last & (blocks.held > 0)


def return_blocks(blocks: Blocks, rows: Bool[Array, " B"]) -> Blocks:
  """All blocks of these rows are free again."""
  returned = jnp.where(rows, blocks.held, 0)
  end = blocks.count + jnp.cumsum(returned, dtype=jnp.int32)
  index = jnp.arange(blocks.table.shape[1], dtype=jnp.int32)[None]
  mine, at = index < returned[:, None], (end - returned)[:, None] + index
  at = jnp.where(mine, at, len(blocks.free))  # out of bounds
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
IDLE_SHARE = 8

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
  """All that a decode step changes, except for the cache. Scalars have an axis
  of size 1, so that each device of a mesh has its own.
  """

  column: Int[Array, " one"]  # that the next step writes; counts steps too
  slot_steps: Int[Array, " one"]  # slots times steps so far
  todo: Int[Array, " places"]  # prompts in the order they get a lane, then P
  next: Int[Array, " one"]  # index in `todo` of the first prompt without a lane
  window: Int[Array, "A W"]  # prompts that each lane works on; P is none
  home: Int[Array, " A"]  # lane of which it was a part with all slots
  started: Int[Array, " A"]  # rollouts of the window that have had a slot
  rollout: Int[Array, "A R"]  # p N + n of the slot's rollout; P N if idle
  token: Int[Array, "A R"]  # its last token, not yet in the cache
  length: Int[Array, "A R"]  # its tokens so far
  packed: Int[Array, "B T 2"]  # `pack` of rollout p N + n; -1 without a token
  blocks: Blocks | None  # of the pool; None over pages


class DecodeProgress(NamedTuple):
  """How far the rollouts are, over all devices; on the host as integers."""

  longest: Any  # tokens of the longest rollout that has a slot
  busy: Any  # busy slots, summed over devices
  waiting: Any  # rollouts that have had no slot yet, summed over devices
  room: Any  # devices that have work and free columns in the newest page
  slot_steps: Any  # slots times steps so far, summed over devices
  stalled: Any  # the slot steps that waited for a block, see `Blocks`
  restarted: Any  # rollouts that gave their blocks back and began again
  resting: Any  # [P]: whether no lane has this prompt or will get it
  rows: Any  # [homes]: busy slots of the lane and its parts; of all devices


def pack(
  token: Int[Array, "*axes"], logp: Float[Array, "*axes"]
) -> Int[Array, "*axes 2"]:
  """Tokens and the bits of their float32 log-probabilities, in one array. A
  decode step scatters one position per slot. Two arrays need two scatters.
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
  """Lanes whose first prompt is done move on, and free places are filled."""
  P, _ = queue.sizes

  def lanes(state):
    """Which move on to their next prompt, and which get another one."""
    more, free = upcoming(state) < P, state.window == P
    moves = _first_done(state, queue) & (~jnp.all(free, axis=1) | more)
    return moves, moves | (free[:, -1] & more)

  def move(state):
    moves, gains = lanes(state)
    started = queue.waiting[state.window[:, 0]]
    # The next prompts, first to lanes that move; P when there are none.
    each = jnp.cumsum(moves), jnp.sum(moves) + jnp.cumsum(gains & ~moves)
    new = state.next + jnp.where(moves, *each) - 1
    new = state.todo[jnp.minimum(new, P)]
    last = jnp.where(gains, new, state.window[:, -1])
    rest = jnp.where(moves[:, None], state.window[:, 1:], state.window[:, :-1])
    return dataclasses.replace(
      state,
      next=jnp.minimum(state.next + jnp.sum(gains, dtype=jnp.int32), P),
      window=jnp.concatenate([rest, last[:, None]], axis=1),
      started=jnp.where(moves, state.started - started, state.started),
    )

  # A loop: all rollouts of the next prompt may have ended at their first token.
  more = lambda state: jnp.any(lanes(state)[1])
  return jax.lax.while_loop(more, move, state)


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
    return enough & (done * IDLE_SHARE >= jnp.sum(has_one))
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
  rows = jnp.zeros(spec.full[0], jnp.int32)
  largest = add = lambda x: x
  if spec.mesh is not None:
    largest = functools.partial(jax.lax.pmax, axis_name=meshes.ROWS)
    add = functools.partial(jax.lax.psum, axis_name=meshes.ROWS)
  return DecodeProgress(
    longest=largest(jnp.max(jnp.where(busy, state.length, 0))),
    busy=add(jnp.sum(busy)),
    waiting=add(waiting),
    room=add(room.astype(jnp.int32)),
    slot_steps=add(state.slot_steps[0]),
    stalled=add(stalled[0]),
    restarted=add(restarted[0]),
    resting=~held[:P],
    rows=rows.at[state.home].add(jnp.sum(busy, axis=1, dtype=jnp.int32)),
  )
