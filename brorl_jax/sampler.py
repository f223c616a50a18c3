"""N rollouts per prompt from one prefill, streamed through slots.

A prompt is read once, and all N first tokens come from its one distribution.
Then lanes of slots decode in lock-step. A lane works on a prompt or two at a
time; a slot whose rollout ends takes the lane's next one in the same step, on
the device: of the same prompt, then of the next.

  rollouts          all of these prompts: the host's loop over `advance`
    start           prefill, first tokens, everything idle
    advance         pages turned, slots compacted, then a segment:
      _segment        steps until the newest page of the cache is full, or a
                      lane wants a prompt that it can only have between programs
      _resize         only the slots that still work, or all of them again
    finish          what the user gets

Prompts that come one after the other instead, each as soon as there is room:
stream.py, which adds two programs.

Keys and values lie in pages of C columns. In every step all slots write the
same column, and a slot sees its own newest columns, so slots of different age
share pages. A page that nobody needs any more is dropped: a step reads what
the longest rollout in a slot has written, not the limit.

Rollout n of prompt p draws token i from `fold_in(fold_in(fold_in(key, p), n),
i)` and nothing else, so neither N nor slots, lanes or devices change it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.types import Prompts, Rollouts

# Prompt tokens of one prefill. More would only need more memory.
PREFILL_TOKENS = 16384
# Columns of a page, at least. Fewer pages are fewer programs to compile; more
# let attention follow the length more closely.
_LEAST_COLUMNS = 64
_MOST_PAGES = 8
# A tail is compacted to this share of its lanes or rows.
SHRINK = 4
# This share of the lanes that work may wait for prompts that are not there yet.
_IDLE_SHARE = 8


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs of a policy. Pure, hashable.

  Leaves of a prefix have axes [P,...], those of a page [A R,...].
  """

  @property
  def vocab(self) -> int: ...
  def cast(self, params) -> PyTree: ...
  def unroll(self, params) -> PyTree: ...
  def prefill(self, params, tokens, mask) -> tuple[Array, Any]: ...
  def lanes(self, prefix, window) -> Any: ...
  def page(self, rows, columns) -> Any: ...
  def decode_step(
    self, weights, shared, pages, token, length, which, column
  ) -> tuple[Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class Behaviour:
  """How logits become the distribution that is sampled and recorded.

  In this order: temperature, top-k, top-p, min-p; each works on the
  renormalised outcome of the one before.
  """

  temperature: float = 1.0  # 0 is greedy: all mass on the likeliest token
  top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
  top_p: float = 1.0  # keep the likeliest tokens that reach this mass
  min_p: float = 0.0  # keep tokens at least this times as likely as the best

  def __post_init__(self):
    for name, good in {
      "temperature": self.temperature >= 0.0,
      "top_k": self.top_k >= 0,
      "top_p": 0.0 < self.top_p <= 1.0,
      "min_p": 0.0 <= self.min_p <= 1.0,
    }.items():
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)} is out of range")

  def cut(self, logits: Float[Array, "*axes V"]) -> Float[Array, "*axes V"]:
    """Logits of the behaviour distribution, not normalised; -inf where cut."""
    logits = logits.astype(jnp.float32)
    if self.temperature == 0.0:
      best = jnp.argmax(logits, axis=-1, keepdims=True)
      token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
      return jnp.where(token == best, 0.0, -jnp.inf)
    if self.temperature != 1.0:
      logits = logits / self.temperature
    if 0 < self.top_k < logits.shape[-1]:
      logits = _keep(logits, jnp.ones_like(logits), self.top_k)
    if self.top_p < 1.0:
      prob = jax.nn.softmax(logits)
      logits = _keep(logits, prob, self.top_p)
    if self.min_p > 0.0:
      least = jnp.max(logits, axis=-1, keepdims=True) + np.log(self.min_p)
      logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits

  def logp(self, logits: Float[Array, "*axes V"]) -> Float[Array, "*axes V"]:
    """Log-probabilities of the behaviour distribution; -inf where cut."""
    return jax.nn.log_softmax(self.cut(logits))


def _keep(
  logits: Float[Array, "*axes V"],
  weight: Float[Array, "*axes V"],
  limit: float | int,
) -> Float[Array, "*axes V"]:
  """Keeps v if the weights of all likelier tokens add up to less than `limit`.

  Equals sorting and adding up, ties kept together, without a sort: the least
  logit that is kept is found by bisection over the 2^32 floats.
  """
  bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
  # Integers in the order of the floats.
  rank = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
  above = lambda at: jnp.sum(
    jnp.where(rank > at, weight, 0.0), -1, keepdims=True
  )

  def halve(_, bounds):
    low, high = bounds  # the answer lies in (low, high]
    middle = (low & high) + ((low ^ high) >> 1)  # their mean; the sum overflows
    enough = above(middle) < limit
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  top = jnp.max(rank, axis=-1, keepdims=True)
  low = jnp.full_like(top, jnp.iinfo(jnp.int32).min)
  _, least = jax.lax.fori_loop(0, 32, halve, (low, top))
  return jnp.where(rank >= least, logits, -jnp.inf)


def block_of(V: int) -> int:
  """Tokens whose probabilities are added up before any is looked at.

  V is cut into a power of two of them, near its root, so that a vocabulary
  spread over devices stays there. If V has no such divisor it is padded.
  """
  blocks = min(V & -V, 2 ** (V.bit_length() // 2))
  return V // blocks if V // blocks <= 4096 else 128


def draw(
  logits: Float[Array, "*axes V"], uniform: Float[Array, "*axes M"]
) -> tuple[Int[Array, "*axes M"], Float[Array, "*axes M"]]:
  """M tokens of softmax(logits), and their log-probabilities.

  One uniform per token instead of V: token = min{v : cdf[v] > uniform}. The
  cdf is that of blocks of tokens first, then that of one block. A token of
  probability 0 cannot be drawn, whatever the rounding of the sums.
  """
  V = logits.shape[-1]
  size = block_of(V)
  top = jnp.max(logits, axis=-1, keepdims=True)
  prob = jnp.exp(logits - top)
  prob = jnp.pad(prob, [(0, 0)] * (prob.ndim - 1) + [(0, -V % size)])
  prob = prob.reshape(*prob.shape[:-1], -1, size)

  mass = jnp.sum(prob, axis=-1)
  cdf = jnp.cumsum(mass, axis=-1)
  total = jnp.max(jnp.where(mass > 0.0, cdf, 0.0), axis=-1, keepdims=True)
  at = uniform * total
  block = _first_above(mass[..., None, :], cdf[..., None, :], at)
  inside = jnp.take_along_axis(prob, block[..., None], axis=-2)
  before = jnp.take_along_axis(cdf - mass, block, axis=-1)
  token = _first_above(inside, jnp.cumsum(inside, axis=-1), at - before)
  token = block * size + token
  logp = jnp.take_along_axis(logits - top, token, axis=-1) - jnp.log(total)
  return token.astype(jnp.int32), logp


def _first_above(
  mass: Float[Array, "*axes #M n"],
  cdf: Float[Array, "*axes #M n"],
  at: Float[Array, "*axes M"],
) -> Int[Array, "*axes M"]:
  """The first place with a mass whose sum is above `at`, or the last sum."""
  # Sums of a parallel scan need not increase, so the largest is the total.
  cdf = jnp.where(mass > 0.0, cdf, 0.0)
  total = jnp.max(cdf, axis=-1, keepdims=True)
  return jnp.argmax((cdf > at[..., None]) | (cdf == total), axis=-1)


def page_columns(max_new_tokens: int) -> int:
  """C, columns of a page: a multiple of 64, or all there are if fewer."""
  least = -(-max_new_tokens // _MOST_PAGES)
  return min(-(-least // _LEAST_COLUMNS) * _LEAST_COLUMNS, max_new_tokens)


@dataclasses.dataclass(frozen=True)
class Job:
  """All that is known before the first number: what programs are made for."""

  policy: Decoder
  behaviour: Behaviour
  stop_ids: tuple[int, ...]
  n: int  # N, rollouts per prompt
  max_new_tokens: int  # T
  lanes: int  # A, of one device
  rows: int  # R, slots of a lane
  columns: int  # C, of a page
  mesh: Mesh | None
  # Whether more prompts may follow: then a segment ends with any prompt.
  streams: bool = False

  @property
  def pages(self) -> int:
    """Pages that hold the longest rollout."""
    return -(-self.max_new_tokens // self.columns)

  def ended(self, token: Int[Array, "*axes"]) -> Bool[Array, "*axes"]:
    return jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32))


_fold = jnp.vectorize(jax.random.fold_in)


class Queue(NamedTuple):
  """Rollouts whose first token did not end them, waiting for a slot.

  Of P prompts, and of one more that has none: lanes without work are on it.
  """

  order: Int[Array, "P+1 N"]  # n of the waiting ones first, ascending
  waiting: Int[Array, " P+1"]  # how many there were at the start
  first: Int[Array, "P+1 N"]  # first token of rollout n
  key: Key[Array, " P+1"]  # folded with p
  offset: Int[Array, " P+1"]  # n of a prompt's first rollout here

  @property
  def sizes(self) -> tuple[int, int]:
    """P and N."""
    return self.order.shape[0] - 1, self.order.shape[1]

  def uniform(
    self, prompt: Int[Array, "A #R"], n: Int[Array, "#A R"], i: Any
  ) -> Float[Array, "A R"]:
    """What decides about token i of rollout n here of each prompt here."""
    key = _fold(self.key[prompt], n + self.offset[prompt])
    return jnp.vectorize(jax.random.uniform)(_fold(key, i))


class Fixed(NamedTuple):
  """What no step changes."""

  weights: PyTree  # as the decoder reads them
  prefix: Any  # of P prompts
  queue: Queue


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Everything that a step changes; nothing is hidden in an object.

  Scalars have an axis of 1, so that each device of a mesh has its own.
  """

  column: Int[Array, " one"]  # of the newest page, written next
  slot_steps: Int[Array, " one"]  # slots times steps so far
  todo: Int[Array, " places"]  # prompts in the order of their lanes; then P
  next: Int[Array, " one"]  # place in it of the first that no lane has had
  window: Int[Array, "A W"]  # prompts that each lane works on; P is none
  started: Int[Array, " A"]  # rollouts of the window that have had a slot
  rollout: Int[Array, "A R"]  # p N + n of each slot's rollout; P N if idle
  token: Int[Array, "A R"]  # its last token, not yet in the cache
  length: Int[Array, "A R"]  # its tokens so far
  record: Int[Array, "B T 2"]  # of rollout p N + n: tokens and logp; -1 if none


class Progress(NamedTuple):
  """How far the rollouts are, over all devices.

  Scalars but for the last: arrays within a program, integers on the host.
  """

  rows: Any  # busy slots of the busiest lane
  lanes: Any  # lanes of a device with a busy slot, at most
  longest: Any  # tokens of the longest rollout in a slot
  busy: Any  # busy slots, of all devices together
  waiting: Any  # rollouts that have not had a slot, of all devices together
  room: Any  # devices with work and columns left in the newest page
  slot_steps: Any  # slots times steps so far, of all devices together
  resting: Any  # [P]: prompts that no lane has or will have


def _take(
  queue: Queue, window: Int[Array, "A W"], place: Int[Array, "A R"]
) -> tuple[Int[Array, "A R"], Int[Array, "A R"]]:
  """Rollout p N + n and first token at places of the lanes' queues.

  A lane's queue is that of its first prompt, then that of its second. Beyond
  its end the rollout is P N: out of bounds, so nothing is written for it.
  """
  P, N = queue.sizes
  mine = queue.waiting[window]  # A W
  end = jnp.cumsum(mine, axis=1)
  w = jnp.sum(place[..., None] >= end[:, None], axis=-1)  # W beyond the end
  inside = w < window.shape[1]
  w = jnp.where(inside, w, 0)
  p = jnp.take_along_axis(window, w, axis=1)
  i = place - jnp.take_along_axis(end - mine, w, axis=1)
  n = queue.order[p, jnp.where(inside, i, 0)]
  return jnp.where(inside, p * N + n, P * N), queue.first[p, n]


def _fill(
  s: DecodeState, queue: Queue, over: Bool[Array, "A R"]
) -> DecodeState:
  """Slots that are idle or `over` take the next rollouts of their lane."""
  P, N = queue.sizes
  free = over | (s.rollout == P * N)
  place = s.started[:, None] + jnp.cumsum(free, axis=1) - 1
  rollout, token = _take(queue, s.window, place)
  total = jnp.sum(queue.waiting[s.window], axis=1)
  taken = s.started + jnp.sum(free, axis=1, dtype=jnp.int32)
  return dataclasses.replace(
    s,
    started=jnp.minimum(taken, total),
    rollout=jnp.where(free, rollout, s.rollout),
    token=jnp.where(free, token, s.token),
    length=jnp.where(free, 1, s.length),
  )


def _first_done(s: DecodeState, queue: Queue) -> Bool[Array, " A"]:
  """Lanes whose first prompt neither waits nor has a busy slot, or is none."""
  P, N = queue.sizes
  first = s.window[:, :1]
  mine = (s.rollout // N == first) & (s.rollout < P * N)
  busy = jnp.any(mine, axis=1)
  return ~busy & (s.started >= queue.waiting[first[:, 0]])


def shift(s: DecodeState, queue: Queue) -> DecodeState:
  """Lanes whose first prompt is done go on to the next one, if there is one."""
  P, _ = queue.sizes

  def moves(s):
    more = (s.window[:, 0] < P) | (_upcoming(s) < P)
    return jnp.any(_first_done(s, queue) & more)

  def move(s):
    done = _first_done(s, queue)
    gone = queue.waiting[s.window[:, 0]]
    # The next prompts, lane by lane; P beyond the last.
    fresh = s.todo[jnp.minimum(s.next + jnp.cumsum(done) - 1, P)]
    last = jnp.where(done, fresh, s.window[:, -1])
    rest = jnp.where(done[:, None], s.window[:, 1:], s.window[:, :-1])
    return dataclasses.replace(
      s,
      next=jnp.minimum(s.next + jnp.sum(done, dtype=jnp.int32), P),
      window=jnp.concatenate([rest, last[:, None]], axis=1),
      started=jnp.where(done, s.started - gone, s.started),
    )

  return jax.lax.while_loop(moves, move, s)


def _upcoming(s: DecodeState) -> Int[Array, ""]:
  """The first prompt that no lane has had; P if there is none."""
  return s.todo[s.next[0]]


def _wants(s: DecodeState, queue: Queue, job: Job) -> Bool[Array, ""]:
  """Whether lanes are done with a prompt and there is, or may be, another."""
  P, _ = queue.sizes
  has_one = s.window[:, 0] < P
  done = jnp.sum(_first_done(s, queue) & has_one)
  enough = done > 0
  if job.streams:
    # The host is asked for more. With many short prompts that would cost more
    # than lanes that idle.
    return enough & (done * _IDLE_SHARE >= jnp.sum(has_one))
  return enough & (_upcoming(s) < P)


def progress(s: DecodeState, queue: Queue, job: Job) -> Progress:
  P, N = queue.sizes
  busy = s.rollout < P * N
  total = jnp.sum(queue.waiting[s.window], axis=1)
  untouched = jnp.where(jnp.arange(P + 1) >= s.next, s.todo, P)
  waiting = jnp.sum(total - s.started) + jnp.sum(queue.waiting[untouched])
  held = jnp.zeros(P + 1, bool).at[s.window].set(True).at[untouched].set(True)
  room = (s.column[0] < job.columns) & (jnp.any(busy) | (waiting > 0))
  over_devices = lambda reduce, x: x if job.mesh is None else reduce(x, "data")
  most = functools.partial(over_devices, jax.lax.pmax)
  add = functools.partial(over_devices, jax.lax.psum)
  return Progress(
    rows=most(jnp.max(jnp.sum(busy, axis=1))),
    lanes=most(jnp.sum(jnp.any(busy, axis=1))),
    longest=most(jnp.max(jnp.where(busy, s.length, 0))),
    busy=add(jnp.sum(busy)),
    waiting=add(waiting),
    room=add(room.astype(jnp.int32)),
    slot_steps=add(s.slot_steps[0]),
    resting=~held[:P],
  )


def on_devices(job: Job, f: Callable, inputs: Any, outputs: Any) -> Callable:
  """`f` on every device of the mesh for itself, over axis "data".

  No device waits for another within a program. Heads and vocabulary may still
  be spread over axis "model", which the compiler sees to.
  """
  if job.mesh is None:
    return f
  return jax.shard_map(
    f,
    mesh=job.mesh,
    in_specs=inputs,
    out_specs=outputs,
    axis_names={"data"},
    check_vma=False,  # the loop's state starts equal on every device
  )


ALL, OWN = PartitionSpec(), PartitionSpec("data")
FIXED = Fixed._make((ALL, OWN, OWN))
PROGRESS = Progress._make([ALL] * (len(Progress._fields) - 1) + [OWN])


class Unit(NamedTuple):
  """What a device prefills: a prompt, and which of its rollouts."""

  prompts: Prompts
  offset: Int[Any, " P"]  # n of the first rollout
  real: Bool[Any, " P"]  # False: fills up the shape, nothing is decoded


def read(
  job: Job, params: PyTree, units: Unit, key: Key[Array, ""]
) -> tuple[Any, Queue, Int[Array, "P N 2"]]:
  """Prefix, queue and all first tokens of prompts, within a program."""
  prompts, offset, real = units
  P, N = len(prompts.index), job.n
  logits, prefix = _prefill(job.policy, params, prompts)
  nothing = jnp.zeros((P, N), jnp.int32)
  keys = _fold(key, prompts.index)
  queue = Queue(nothing, nothing[:, 0], nothing, keys, offset)
  uniform = queue.uniform(jnp.arange(P)[:, None], jnp.arange(N)[None], 0)
  # All first tokens from one cumulative distribution per prompt.
  first, logp = draw(job.behaviour.cut(logits), uniform)
  over = job.ended(first) | (job.max_new_tokens == 1) | ~real[:, None]
  queue = queue._replace(
    order=jnp.argsort(over, axis=1, stable=True).astype(jnp.int32),
    waiting=jnp.sum(~over, axis=1, dtype=jnp.int32),
    first=first,
  )
  return prefix, queue, _pack(first, logp)


@functools.partial(jax.jit, static_argnames="job")
def start(
  job: Job, params: PyTree, units: Unit, key: Key[Array, ""]
) -> tuple[Fixed, DecodeState, Progress]:
  """Prefill, all first tokens, and every slot idle."""
  N, T, A, R = job.n, job.max_new_tokens, job.lanes, job.rows

  def begin(params, units, key):
    P = len(units.real)
    prefix, queue, first = read(job, params, units, key)
    # One more, for the prompt that is none.
    extra = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    queue = Queue(
      order=extra(queue.order),
      waiting=extra(queue.waiting),
      first=extra(queue.first),
      key=_fold(key, extra(units.prompts.index)),
      offset=extra(queue.offset),
    )
    order = jnp.argsort(~units.real, stable=True).astype(jnp.int32)
    one = jnp.zeros((1,), jnp.int32)
    s = DecodeState(
      column=one,
      slot_steps=one,
      todo=jnp.append(jnp.where(units.real[order], order, P), P),
      next=one,
      window=jnp.full((A, 1 if A == P else 2), P, jnp.int32),
      started=jnp.zeros((A,), jnp.int32),
      rollout=jnp.full((A, R), P * N, jnp.int32),
      token=jnp.zeros((A, R), jnp.int32),
      length=jnp.ones((A, R), jnp.int32),
      record=jnp.full((P * N, T, 2), -1, jnp.int32)
      .at[:, 0]
      .set(first.reshape(P * N, 2)),
    )
    fixed = Fixed(job.policy.unroll(params), prefix, queue)
    return fixed, s, progress(s, queue, job)

  return on_devices(job, begin, (ALL, OWN, ALL), (FIXED, OWN, PROGRESS))(
    job.policy.cast(params), units, key
  )


def _prefill(policy: Decoder, params: PyTree, prompts: Prompts):
  """The policy's, over as many prompts at a time as are worth it."""
  P, S = prompts.tokens.shape
  group = read_together(P, S)
  if group == P:
    return policy.prefill(params, prompts.tokens, prompts.mask)
  apart = lambda x: x.reshape(P // group, group, *x.shape[1:])
  read = lambda x: policy.prefill(params, *x)
  out = jax.lax.map(read, (apart(prompts.tokens), apart(prompts.mask)))
  return jax.tree.map(lambda x: x.reshape(P, *x.shape[2:]), out)


def read_together(P: int, S: int) -> int:
  """How many of P prompts of S tokens are read together, a divisor of P."""
  fits = max(PREFILL_TOKENS // S, 1)
  return max(g for g in range(1, min(P, fits) + 1) if P % g == 0)


def _pack(
  token: Int[Array, "*axes"], logp: Float[Array, "*axes"]
) -> Int[Array, "*axes 2"]:
  """Side by side, so that a step writes to one place per slot, not to two."""
  bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
  return jnp.stack([token, bits], axis=-1)


@functools.partial(
  jax.jit, static_argnames="job", donate_argnames=("newest", "s")
)
def _segment(
  job: Job,
  fixed: Fixed,
  older: tuple[Any, ...],
  newest: Any,
  s: DecodeState,
  turned: Bool[Array, ""],
) -> tuple[Any, DecodeState, Progress]:
  """Decodes until the newest page is full or there is nothing left to do.

  The loop is also left when a lane wants a prompt that it cannot have within
  the program. A single page is never full: its columns are used in a circle.

  Args:
    job: Static.
    fixed: What no step changes.
    older: Pages, oldest first; read only.
    newest: The page to write; None for an empty one.
    s: The state.
    turned: Whether nothing is in the newest page yet that anybody needs.
  """
  policy, N, T = job.policy, job.n, job.max_new_tokens

  def segment(fixed, older, newest, s, turned):
    queue = fixed.queue
    (P, _), W = queue.sizes, s.window.shape[1]
    s = shift(s, queue)
    s = _fill(s, queue, jnp.zeros_like(s.rollout, bool))
    shared = policy.lanes(fixed.prefix, s.window)
    if newest is None:
      newest = policy.page(s.rollout.size, job.columns)
    s = dataclasses.replace(s, column=jnp.where(turned, 0, s.column))

    def goes_on(carry):
      s = carry[1]
      room = job.pages == 1 or s.column[0] < job.columns
      return jnp.any(s.rollout < P * N) & room & ~_wants(s, queue, job)

    def step(carry):
      page, s = carry
      prompt, n = s.rollout // N, s.rollout % N
      which = jnp.where(prompt == s.window[:, :1], 0, W - 1)
      column = s.column[0] % job.columns
      logits, page = policy.decode_step(
        fixed.weights, shared, (*older, page), s.token, s.length, which, column
      )
      uniform = queue.uniform(prompt, n, s.length)
      token, logp = draw(job.behaviour.cut(logits), uniform[..., None])
      token, logp = token[..., 0], logp[..., 0]
      at = (s.rollout, s.length)  # an idle slot's is out of bounds
      over = job.ended(token) | (s.length + 1 == T)
      s = dataclasses.replace(
        s,
        column=s.column + 1,
        slot_steps=s.slot_steps + s.rollout.size,
        token=token,
        length=s.length + 1,
        record=s.record.at[at].set(_pack(token, logp), mode="drop"),
      )
      return page, _fill(s, queue, over)

    newest, s = jax.lax.while_loop(goes_on, step, (newest, s))
    s = shift(s, queue)  # so that no lane holds on to what is done
    return newest, s, progress(s, queue, job)

  return on_devices(
    job, segment, (FIXED, OWN, OWN, OWN, ALL), (OWN, OWN, PROGRESS)
  )(fixed, older, newest, s, turned)


@functools.partial(jax.jit, static_argnames="job")
def _resize(job: Job, pages: list[Any], s: DecodeState):
  """As many lanes and slots as `job` says: the busy ones, then idle ones."""

  def resize(pages, s):
    P = s.todo.shape[0] - 1
    none = s.record.shape[0]  # the rollout of an idle slot
    busy = s.rollout < none

    def chosen(keep, count):  # an index out of bounds is a new one
      order = jnp.argsort(~keep, axis=-1, stable=True)[..., :count]
      spare = [(0, 0)] * (keep.ndim - 1) + [(0, count - order.shape[-1])]
      return jnp.pad(order, spare, constant_values=max(keep.shape))

    def at(x, *index, fill=0):
      return x.at[index].get(mode="fill", fill_value=fill)

    lane = chosen(jnp.any(busy, axis=1), job.lanes)
    slot = chosen(at(busy, lane, fill=False), job.rows)
    slots = lambda x, fill: at(x, lane[:, None], slot, fill=fill)
    s = dataclasses.replace(
      s,
      window=at(s.window, lane, fill=P),
      started=at(s.started, lane),
      rollout=slots(s.rollout, none),
      token=slots(s.token, 0),
      length=slots(s.length, 1),
    )
    row = slots(jnp.arange(busy.size).reshape(busy.shape), 0).ravel()
    return jax.tree.map(lambda x: x[row], pages), s

  return on_devices(job, resize, (OWN, OWN), (OWN, OWN))(pages, s)


@functools.partial(jax.jit, static_argnames="job")
def finish(job: Job, s: DecodeState) -> Rollouts:
  """Tokens, masks and log-probabilities of every rollout."""

  def own(s):
    share = s.slot_steps.astype(jnp.float32) * job.n / len(s.record)
    slot_steps = jnp.broadcast_to(share, len(s.record) // job.n)
    record = s.record.reshape(-1, job.n, job.max_new_tokens, 2)
    return unpacked(job, record, slot_steps)

  return on_devices(job, own, (OWN,), OWN)(s)


def unpacked(
  job: Job, record: Int[Array, "P N T 2"], slot_steps: Float[Array, " P"]
) -> Rollouts:
  """What a step wrote side by side, apart."""
  tokens = record[..., 0]
  mask = tokens >= 0
  last = jnp.sum(mask, axis=2, keepdims=True) - 1
  last = jnp.take_along_axis(tokens, last, axis=2)[..., 0]
  logp = jax.lax.bitcast_convert_type(record[..., 1], jnp.float32)
  return Rollouts(
    tokens=jnp.where(mask, tokens, 0),
    logp=jnp.where(mask, logp, 0.0),
    mask=mask,
    truncated=~job.ended(last),
    slot_steps=slot_steps,
  )


class Run(NamedTuple):
  """Rollouts that are being made, between two programs."""

  job: Job  # as it is now; fewer lanes or slots where the rest is idle
  fixed: Fixed
  pages: tuple[Any, ...]  # the newest last; None if there is none yet
  s: DecodeState
  progress: Progress


def begun(job: Job, params: PyTree, units: Unit, key: Key[Array, ""]) -> Run:
  """All prompts are read and every slot is idle."""
  fixed, s, progress = start(job, params, units, key)
  return Run(job, fixed, (None,), s, on_host(progress))


def advance(run: Run) -> Run:
  """Decodes until there is something to do or to know for the host."""
  job, fixed, pages, s, progress = run
  if (smaller := _shrunk(job, progress)) != job:
    job, (pages, s) = smaller, _resize(smaller, list(pages), s)
  turned = job.pages > 1 and not progress.room
  if turned:
    pages = _turned(job, list(pages), progress.longest)
  *older, newest = pages
  newest, s, progress = _segment(job, fixed, tuple(older), newest, s, turned)
  return Run(job, fixed, (*older, newest), s, on_host(progress))


def restored(run: Run, job: Job) -> Run:
  """With the lanes and slots of `job` again."""
  if run.job == job:
    return run
  pages, s = _resize(job, list(run.pages), run.s)
  return run._replace(job=job, pages=tuple(pages), s=s)


def on_host(progress: Progress) -> Progress:
  *numbers, resting = jax.device_get(progress)
  return Progress(*map(int, numbers), resting=resting)


def rollouts(
  policy: Decoder,
  params: PyTree,
  prompts: Prompts,
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  behaviour: Behaviour,
  stop_ids: tuple[int, ...],
  slots: int,
  lanes: int | None = None,
  mesh: Mesh | None = None,
  watch: Callable[[Progress], None] = lambda progress: None,
) -> Rollouts:
  """N rollouts of each prompt, prompts and slots spread over axis "data".

  Args:
    policy: Prefill and one decode step.
    params: Its parameters.
    prompts: P prompts and their indices p.
    key: Of this training step. Not consumed: only folded.
    n: N, rollouts per prompt.
    max_new_tokens: T.
    behaviour: The distribution that is sampled.
    stop_ids: A rollout ends with the first of them.
    slots: R, rollouts of a prompt that decode at the same time, at most N.
    lanes: Prompts that are decoded at the same time; all if None.
    mesh: Devices with axes "data" and "model"; one device if None.
    watch: Called after the prefill and whenever the loop was left.
  """
  P = len(prompts.index)
  devices = 1 if mesh is None else mesh.shape["data"]
  units, parts = _spread(prompts, n, devices)
  each = len(units.index) // devices
  job = Job(
    policy,
    behaviour,
    stop_ids,
    n=n // parts,
    max_new_tokens=max_new_tokens,
    lanes=min(-(-(lanes or P) * parts // devices), each),
    rows=-(-slots // parts),
    columns=page_columns(max_new_tokens),
    mesh=mesh,
  )
  offset = np.arange(len(units.index), dtype=np.int32) % parts * job.n
  real = np.ones(len(units.index), bool)
  run = begun(job, params, Unit(units, offset, real), key)
  watch(run.progress)
  while run.progress.busy + run.progress.waiting:
    run = advance(run)
    watch(run.progress)
  out = finish(run.job, run.s)
  together = lambda x: x.reshape(-1, n, *x.shape[2:])[:P]
  return Rollouts(
    tokens=together(out.tokens),
    logp=together(out.logp),
    mask=together(out.mask),
    truncated=together(out.truncated),
    slot_steps=jnp.sum(out.slot_steps.reshape(-1, parts), axis=1)[:P],
  )


def parts_of(P: int, N: int, devices: int) -> int:
  """Into how many parts a prompt's rollouts are cut, so that they spread."""
  parts = devices // math.gcd(P, devices)
  return parts if N % parts == 0 else 1


def _spread(prompts: Prompts, n: int, devices: int) -> tuple[Prompts, int]:
  """As many units for each device: prompts, or equal parts of their rollouts.

  Where neither divides, spare prompts repeat the first ones.

  Returns:
    The units and into how many parts a prompt is cut.
  """
  P = len(prompts.index)
  parts = parts_of(P, n, devices)
  if P * parts % devices == 0:
    return jax.tree.map(lambda x: np.repeat(x, parts, axis=0), prompts), parts
  more = np.arange(P + -P % devices) % P
  return jax.tree.map(lambda x: np.asarray(x)[more], prompts), 1


def _shrunk(job: Job, progress: Progress) -> Job:
  """Fewer lanes or slots, if none waits and so many are idle."""
  lanes, rows = job.lanes, job.rows
  if progress.waiting or job.pages == 1:
    return job
  while lanes > progress.lanes and -(-lanes // SHRINK) >= progress.lanes:
    lanes = -(-lanes // SHRINK)
  while rows > progress.rows and -(-rows // SHRINK) >= progress.rows:
    rows = -(-rows // SHRINK)
  return dataclasses.replace(job, lanes=lanes, rows=rows)


def _turned(job: Job, pages: list[Any], longest: int) -> list[Any]:
  """The pages that the next steps need, the one to write last."""
  needed = -(-(longest - 1) // job.columns)
  if needed == job.pages:  # the columns to write are those nobody sees any more
    return [*pages[-needed + 1 :], pages[-needed]]
  kept = pages[-needed:] if needed else []
  return [*kept, _empty(pages[-1]) if kept else None]


@jax.jit
def _empty(page: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, page)


def sample(
  policy: Decoder,
  params: PyTree,
  prompts: Sequence[Sequence[int]],
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  stop_ids: tuple[int, ...] = (),
  slots: int | None = None,
  lanes: int | None = None,
  mesh: Mesh | None = None,
) -> Rollouts:
  """N rollouts of each prompt.

  Args:
    policy: Prefill and one decode step.
    params: Its parameters.
    prompts: Token ids; any lengths from 1.
    key: Of this call. Rollout n of prompt p draws from (key, p, n) alone.
    n: N, rollouts per prompt.
    max_new_tokens: T.
    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    top_p: 1 keeps all tokens.
    min_p: 0 keeps all tokens.
    stop_ids: A rollout ends with the first of them, which is part of it.
    slots: Rollouts of a prompt that decode at the same time; N if None.
    lanes: Prompts that are decoded at the same time; all if None.
    mesh: Devices with axes "data" and "model"; one device if None.

  Returns:
    Tokens, log-probabilities under the distribution that was sampled, and
    masks, each [P,N,T].

  Raises:
    ValueError: An argument is out of range; named with its value.
  """
  slots = n if slots is None else slots
  lanes = len(prompts) if lanes is None else lanes
  behaviour = Behaviour(temperature, top_k, top_p, min_p)
  for name, value, low, high in (
    ("prompts", len(prompts), 1, None),
    ("n", n, 1, None),
    ("max_new_tokens", max_new_tokens, 1, None),
    ("slots", slots, 1, n),
    ("lanes", lanes, 1, len(prompts)),
  ):
    if value < low or (high is not None and value > high):
      most = "" if high is None else f" and at most {high}"
      raise ValueError(f"{name} = {value} must be at least {low}{most}")
  if empty := [p for p, ids in enumerate(prompts) if not len(ids)]:
    raise ValueError(f"prompt {empty[0]} is empty")
  named = [(f"prompt {p}", ids) for p, ids in enumerate(prompts)]
  for name, ids in (*named, ("stop_ids", stop_ids)):
    if wrong := [int(v) for v in ids if not 0 <= v < policy.vocab]:
      raise ValueError(
        f"token {wrong[0]} of {name} is not in the vocabulary, 0 to "
        f"{policy.vocab - 1}"
      )

  width = max(map(len, prompts))
  tokens = np.zeros((len(prompts), width), np.int32)
  mask = np.zeros((len(prompts), width), bool)
  for row, ids in enumerate(prompts):
    tokens[row, width - len(ids) :] = ids
    mask[row, width - len(ids) :] = True
  return rollouts(
    policy,
    params,
    Prompts(tokens, mask, np.arange(len(prompts), dtype=np.int32)),
    key,
    n=n,
    max_new_tokens=max_new_tokens,
    behaviour=behaviour,
    stop_ids=tuple(stop_ids),
    slots=slots,
    lanes=lanes,
    mesh=mesh,
  )
