"""Prompts that enter the slots while others decode.

A finished prompt frees its place for another at once. The rollouts are those of
`sampler.rollouts`, whatever decodes at the same time. A place is room on a
device for one chunk of a prompt's rollouts: its queue and its N rollouts. What
reading the prompt gave lies on a shelf, in one of P rows of its device, from
which all of its chunks read. A row is given away when no place holds its prompt
and another prompt needs it; the first prompt is then read again if more is
asked for. As many rows as places suffice.

With `Crossing` rollouts may go on in the next step of the run. What has been
decoded when sampling ends must then not depend on when a verdict comes: clocks
count decode steps, and what is decoded after the end is dropped.
"""

import collections
import concurrent.futures as futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax import types
from brorl_jax.rollout import programs, sampler, slots
from brorl_jax.rollout.dynamic_sampling import Crossing, Feed
from brorl_jax.rollout.programs import DecodeInputs, PrefillBatch
from brorl_jax.rollout.sampler import OpenRollouts
from brorl_jax.rollout.slots import SPLIT, WHOLE, DecodeState, ProgramSpec
from brorl_jax.types import Chunk, Finished, Prompts, Rollouts, by_chunk

# Prompt tokens that a device reads at a time. A product of so many rows takes
# no longer than two of half as many, and padding costs little.
_TOKENS_TOGETHER = 2048
# `_admit` and `_taken` visit a quarter of the places at a time: a static shape,
# large enough that few calls are needed and small enough that one finished
# prompt does not copy the rollouts of all places (8 P N T bytes).
SHARE = 4


def prompts_together(each: int, S: int) -> int:
  """How many prompts of S tokens a device reads at a time."""
  return min(max(_TOKENS_TOGETHER // S, 1), each)


class PromptPart(NamedTuple):
  """Prompts to read together, equally many on each device."""

  tokens: Int[Any, "rows S"]
  mask: Bool[Any, "rows S"]
  to: Int[Any, " rows"]  # row of each; P for padding


class Places:
  """Which chunk is in which place of each device."""

  def __init__(self, devices: int, each: int):
    self._each = each
    self.visited = max(each // SHARE, 1)  # places of a device per program
    # place -> its chunk, of each device
    self.chunks: list[dict[int, Prompts]] = [{} for _ in range(devices)]

  @property
  def room(self) -> int:
    """Chunks that can be put at a time."""
    # More at once would be another shape, and so another program.
    return sum(min(self._each - len(x), self.visited) for x in self.chunks)

  @property
  def prompts(self) -> list[set[int]]:
    """Prompts that have a place, of each device."""
    return [{int(x.index[0]) for x in own.values()} for own in self.chunks]

  def among(self, chosen: Bool[np.ndarray, "devices each"]) -> list[list[int]]:
    """The chosen places that hold a chunk, of each device in order."""
    both = zip(self.chunks, chosen, strict=True)
    return [sorted(place for place in own if x[place]) for own, x in both]

  def put(
    self, prompts: Prompts
  ) -> tuple[PrefillBatch, Int[np.ndarray, " rows"]]:
    """Spreads chunks over the devices, the one with most free places first.

    Returns the chunks of each device, padded to `visited`, and their places.
    """
    shape = len(self.chunks), self.visited
    row, at = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    real = np.zeros(shape, bool)
    for i, one in enumerate(types.each(prompts)):
      count = real.sum(axis=1)
      left = [self._each - len(own) for own in self.chunks]
      d = int(np.argmax(np.where(count < self.visited, left, -1)))
      place = min({*range(self._each)} - self.chunks[d].keys())
      row[d, count[d]], at[d, count[d]], real[d, count[d]] = i, place, True
      self.chunks[d][place] = dataclasses.replace(one, begun=None)
    read = jax.tree.map(lambda x: np.asarray(x)[row.ravel()], prompts)
    return programs.batch_of(read, real.ravel()), at.ravel()


class Shelf:
  """Which prompt is in which row of each device."""

  def __init__(self, devices: int, each: int):
    self._each = each
    # p -> row, those that were used last at the end.
    self._rows: list[dict[int, int]] = [{} for _ in range(devices)]

  def rows(
    self, batch: PrefillBatch, held: Sequence[Set[int]]
  ) -> tuple[Int[np.ndarray, " B"], list[PromptPart]]:
    """Rows for these prompts, and what must be read into them first.

    `batch` has equally many prompts for each device; `held` are the prompts of
    each device whose rows are in use, the new ones included.
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
    size, parts = prompts_together(self._each, S), []
    for start in range(0, max(map(len, unread)), size):
      # Padding goes to row P, which is out of bounds, so that it is dropped.
      to = np.full((devices, size), self._each, np.int32)
      at = np.zeros((devices, size), np.int32)
      for d, own in enumerate(unread):
        for k, found in enumerate(own[start : start + size]):
          to[d, k], at[d, k] = found
      read = lambda x, at=at: np.asarray(x)[at.ravel()]
      tokens, mask = read(batch.prompts.tokens), read(batch.prompts.mask)
      parts.append(PromptPart(tokens, mask, to.ravel()))
    return rows, parts

  def _row(self, d: int, p: int, held: Set[int]) -> tuple[int, bool]:
    """The row of prompt p on device d, and whether p must be read into it."""
    own = self._rows[d]
    new = p not in own
    # Taken out and put back, also if it is there: the first prompt of the
    # dict is the one that was used longest ago.
    if not new:
      row = own.pop(p)
    elif len(own) < self._each:
      row = len(own)
    else:
      row = own.pop(next(q for q in own if q not in held))
    own[p] = row
    return row, new


@functools.partial(jax.jit, static_argnames=("spec", "each"))
def open_shelf(
  spec: ProgramSpec,
  params: PyTree,
  part: PromptPart,
  key: slots.Seed,
  *,
  each: int,
) -> tuple[
  DecodeInputs, Float[Array, "P V"], DecodeState, slots.DecodeProgress
]:
  """Reads the first prompts into the first rows of `each`; no place has one.

  Returns what decoding reads, logits of first tokens, state, progress.
  """

  def begin(weights, part, key):
    P, N = each, spec.chunk
    more = lambda x: jnp.pad(x, [(0, P - len(x))] + [(0, 0)] * (x.ndim - 1))
    read = programs.prefill(spec.policy, weights, part.tokens, part.mask)
    logits, prefix = jax.tree.map(more, read)
    none = jnp.zeros((P, N), jnp.int32)
    row = none[:, 0]
    keys = slots.fold_in(key, row)
    queue = slots.RolloutQueue(none, row, none, keys, row, row)
    queue = programs.with_none(queue, key)
    first = jnp.full((P, N, 2), -1, jnp.int32)
    state = programs.idle(spec, jnp.full(P + 1, P, jnp.int32), first)
    inputs = DecodeInputs(weights, prefix, queue)
    return inputs, logits, state, slots.measure_progress(state, queue, spec)

  outs = programs.INPUT_SPECS, SPLIT, SPLIT, programs.PROGRESS_SPECS
  made = slots.on_devices(spec, begin, (WHOLE, SPLIT, WHOLE), outs)
  return made(spec.policy.unroll(spec.policy.cast(params)), part, key)


@slots.compiled(
  (WHOLE, SPLIT, SPLIT, SPLIT),
  (SPLIT, SPLIT),
  donate_argnames=("logits", "prefix"),
)
def read_more(
  spec: ProgramSpec,
  weights: PyTree,
  logits: Float[Array, "P V"],
  prefix: Any,
  part: PromptPart,
) -> tuple[Float[Array, "P V"], Any]:
  """Reads more prompts into rows of their devices."""
  new = programs.prefill(spec.policy, weights, part.tokens, part.mask)
  put = lambda x, new: x.at[part.to].set(new, mode="drop")
  return jax.tree.map(put, (logits, prefix), new)


def stream(
  spec: slots.RolloutSpec,
  params: PyTree,
  feed: Feed,
  key: slots.Seed,
  *,
  places: int,
  crossing: Crossing | None = None,
  turns: bool = False,
  watch: Callable[[slots.DecodeProgress], None] = lambda progress: None,
) -> Iterator[tuple[Prompts, Rollouts]]:
  """Yields N rollouts of each prompt, on the host, as prompts finish.

  `feed` is called for prompts when a place is free. The number of `places` is a
  multiple of the devices' rows; `params` must not be donated before the end.
  `crossing` says when sampling ends, and gets all that was sampled until then.
  With `turns` a prompt may come again with the tokens that rollouts go on from.
  """
  # With turns in one group: what decodes together then depends on no clock.
  count = 1 if turns else min(spec.groups, places)
  spec = dataclasses.replace(spec, groups=count).share(places)
  make = functools.partial(_Group, spec, params, key, watch, crossing, turns)
  groups = [make(places // count + (g < places % count)) for g in range(count)]
  dealt = _Dealt(feed, count)
  running: dict[futures.Future[None], _Group] = {}
  end: float | None = None
  with futures.ThreadPoolExecutor(count) as pool:
    while True:
      feed(0, False)  # raises Enough, also if there is no room
      if crossing is not None and end is None:
        end = crossing.ends()
      for g, group in enumerate(groups):
        if group in running.values() or group.over(end):
          continue
        # Places may be left, and the feed may have more prompts.
        while room := group.held.room:
          idle = not any(any(other.held.chunks) for other in groups)
          if (more := dealt(g, room, idle)) is None:
            break
          group.admit(more)
        if any(group.held.chunks):
          running[pool.submit(group.advance)] = group
      if not running:
        break
      done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
      for future in done:
        future.result()
        yield from running.pop(future).finished()
  if crossing is not None and (end := crossing.ends()) is not None:
    for group in groups:
      crossing.left |= group.left(end)


class _Dealt:
  """What the feed gives, one after another to each group: in whose programs a
  prompt decodes depends on no clock.
  """

  def __init__(self, feed: Feed, groups: int):
    self._feed, self._given = feed, 0
    self._own = [collections.deque[Prompts]() for _ in range(groups)]

  def __call__(self, g: int, room: int, idle: bool) -> Prompts | None:
    """At most so many for this group; None if there is none now."""
    own = self._own[g]
    while len(own) < room:
      left = any(self._own)
      if (more := self._feed(room - len(own), idle and not left)) is None:
        break
      for one in types.each(more):
        self._own[self._given % len(self._own)].append(one)
        self._given += 1
    some: list[Prompts] = []
    # Those that go on have one array more than those that begin.
    alike = lambda: (own[0].begun is None) == (some[0].begun is None)
    while own and len(some) < room and (not some or alike()):
      some.append(own.popleft())
    return types.behind(some) if some else None


class _Group:
  """Prompts that decode together, in lanes and places of their own."""

  def __init__(
    self,
    spec: slots.RolloutSpec,
    params: PyTree,
    key: slots.Seed,
    watch: Callable[[slots.DecodeProgress], None],
    crossing: Crossing | None,
    turns: bool,
    places: int,
  ):
    self._params, self._key, self._watch = params, key, watch
    self._devices, self._each = spec.devices, places // spec.devices
    program = spec.program(places, streams=True)
    replays = turns or crossing is not None  # over a pool always
    replays &= not program.blocks
    self._program = dataclasses.replace(program, replays=replays)
    self.held = Places(self._devices, self._each)
    self._shelf = Shelf(self._devices, self._each)
    self._decoding: OpenRollouts | None = None
    self._spent = 0
    self._crossing, self._time = crossing, 0.0  # decode steps
    # Tokens of the rollouts in all places, at each time that the host looked.
    self._seen: list[tuple[float, dict[Chunk, np.ndarray]]] = []
    self._made: Finished = {}

  def admit(self, more: Prompts) -> None:
    """Puts prompts into free places; those that are unread are read."""
    batch, at = self.held.put(more)
    rows, parts = self._shelf.rows(batch, self.held.prompts)
    for part in parts:
      self._decoding = self._read(part)
    assert self._decoding is not None  # the first prompts are unread
    begun = batch.prompts.begun
    chunks = programs.Chunks(batch.prompts.index, *batch[1:], rows, begun)
    # With all lanes and slots, so that `_admit` is one program.
    decoding = sampler.resized(self._decoding, self._decoding.full)
    spec, inputs, logits = decoding.spec, decoding.inputs, decoding.logits
    of = logits, inputs.queue, decoding.state, chunks, at, self._key
    queue, state, progress = _admit(spec, *of)
    inputs, now = inputs._replace(queue=queue), sampler.on_host(progress)
    self._decoding = decoding._replace(inputs=inputs, state=state, progress=now)
    self._watch(now)

  def _read(self, part: PromptPart) -> OpenRollouts:
    if (decoding := self._decoding) is not None:
      inputs = decoding.inputs
      # Of the full size whatever is decoding: one program.
      of = inputs.weights, decoding.logits, inputs.prefix
      logits, prefix = read_more(decoding.full, *of, part)
      inputs = inputs._replace(prefix=prefix)
      return decoding._replace(inputs=inputs, logits=logits)
    spec = self._program
    opened = open_shelf(spec, self._params, part, self._key, each=self._each)
    inputs, logits, state, progress = opened
    now, prompt = sampler.on_host(progress), part.tokens.shape[1]
    return OpenRollouts(spec, spec, inputs, (), state, now, prompt, logits)

  def advance(self) -> None:
    """Decodes until the host must act."""
    decoding = self._decoding
    assert decoding is not None
    if decoding.progress.busy + decoding.progress.waiting:
      self._decoding = sampler.advance(decoding)
    if self._crossing is not None:
      self._look(decoding.progress.slot_steps)

  def _look(self, before: int) -> None:
    """Counts the steps since then, and the tokens that there are."""
    now = self._decoding
    assert now is not None
    slot_steps = now.spec.lanes * now.spec.slots * self._devices
    self._time += (now.progress.slot_steps - before) / slot_steps
    count = np.asarray(_lengths(now.spec, now.state))
    count = count.reshape(self._devices, self._each, -1)
    each = enumerate(self.held.chunks)
    places = [(x, count[d, i]) for d, own in each for i, x in own.items()]
    self._seen.append((self._time, {x.chunk: n for x, n in places}))

  def over(self, end: float | None) -> bool:
    """Whether all is decoded that this step may have, and it was looked at."""
    return end is not None and bool(self._seen) and self._time >= end

  def left(self, end: float) -> Finished:
    """All chunks as they were at the first look from `end` on."""
    if not self._seen:
      return {}
    assert self._crossing is not None and self._decoding is not None
    time, counts = next((x for x in self._seen if x[0] >= end), self._seen[-1])
    whole = {c for c in self._made if self._crossing.times[c] <= time}
    every = np.ones((self._devices, self._each), bool)
    for prompts, rollouts in self._out(self.held.among(every), 0.0):
      self._made |= by_chunk(prompts, rollouts)
    found = {c: _cut(self._made[c], n) for c, n in counts.items()}
    return found | {c: self._made[c] for c in whole}

  def finished(self) -> Iterator[tuple[Prompts, Rollouts]]:
    """Prompts of which all rollouts have ended; frees their places."""
    decoding, held = self._decoding, self.held
    assert decoding is not None
    self._watch(decoding.progress)
    # If all rollouts ended with their first token, no program runs that would
    # give the prompts to lanes and take them away again: all are done.
    over = not decoding.progress.busy + decoding.progress.waiting
    resting = decoding.progress.resting.reshape(self._devices, self._each)
    done = held.among(over | resting)
    # Slot-steps are counted in total, not per prompt: those since the last
    # prompts finished are divided evenly among the prompts that finish now.
    count = sum(map(len, done))
    share = (decoding.progress.slot_steps - self._spent) / max(count, 1)
    self._spent = decoding.progress.slot_steps if count else self._spent
    for prompts, rollouts in self._out(done, share):
      if self._crossing is not None:
        self._made |= (found := by_chunk(prompts, rollouts))
        self._crossing.times |= dict.fromkeys(found, self._time)
      yield prompts, rollouts

  def _out(
    self, places: list[list[int]], share: float
  ) -> Iterator[tuple[Prompts, Rollouts]]:
    """What these places of each device hold, on the host; frees them."""
    decoding, count = self._decoding, self.held.visited
    assert decoding is not None
    for start in range(0, max(map(len, places)), count):
      some = [own[start : start + count] for own in places]
      # Devices with fewer finished prompts read place 0 again, for nothing.
      at = np.zeros((len(some), count), np.int32)
      for d, own in enumerate(some):
        at[d, : len(own)] = own
      out = _taken(decoding.spec, decoding.state, at.ravel(), share)
      real = [k < len(own) for own in some for k in range(count)]
      rows = np.flatnonzero(real)
      held = zip(self.held.chunks, some, strict=True)
      prompts = [chunks.pop(i) for chunks, own in held for i in own]
      made = jax.tree.map(lambda x, rows=rows: x[rows], jax.device_get(out))
      yield types.behind(prompts), made


def _cut(made: Rollouts, count: Int[np.ndarray, " N"]) -> Rollouts:
  """The first tokens of each rollout, so many."""
  mask = made.mask & (np.arange(made.mask.shape[2]) < count[:, None])
  fewer = mask.sum(axis=2) < made.mask.sum(axis=2)
  return dataclasses.replace(
    made,
    tokens=np.where(mask, made.tokens, 0),
    logp=np.where(mask, made.logp, 0),
    mask=mask,
    truncated=made.truncated | fewer,
    slot_steps=np.zeros_like(made.slot_steps),
  )


@slots.compiled(
  (SPLIT, SPLIT, SPLIT, SPLIT, SPLIT, WHOLE),
  (SPLIT, SPLIT, programs.PROGRESS_SPECS),
  donate_argnames=("queue", "state"),
)
def _admit(spec: ProgramSpec, logits, queue, state, chunks, at, key):
  """Puts prompts into free places and appends them to the lanes' order."""
  P, N, T = queue.sizes[0], spec.chunk, spec.max_new_tokens
  # A lane still naming a finished prompt would take the new one's rollouts.
  state = slots.shift(state, queue)
  fresh, first = programs.queued(spec, logits[chunks.row], chunks, key)
  # Row P is the prompt without rollouts, so P + 1 is the first index that is
  # out of bounds: padding is not written.
  to = jnp.where(chunks.real, at, P + 1)
  put = lambda x, new: x.at[to].set(new, mode="drop")
  packed = state.packed.reshape(P, N, T, 2)
  empty = jnp.full((len(to), N, T, 2), -1, jnp.int32)
  empty = empty if chunks.begun is None else chunks.begun
  empty = empty.at[:, :, 0].set(first)
  # The order of prompts without a lane: the earlier ones, then the new ones.
  left = jnp.arange(P + 1) + state.next
  todo = state.todo.at[left].get(mode="fill", fill_value=P)
  last = jnp.sum(todo < P) + jnp.cumsum(chunks.real) - 1
  todo = todo.at[jnp.where(chunks.real, last, P + 1)].set(at, mode="drop")
  state = dataclasses.replace(
    state,
    todo=todo,
    next=jnp.zeros_like(state.next),
    packed=put(packed, empty).reshape(P * N, T, 2),
  )
  queue = jax.tree.map(put, queue, fresh)
  return queue, state, slots.measure_progress(state, queue, spec)


@slots.compiled((SPLIT,), SPLIT)
def _lengths(spec: ProgramSpec, state: DecodeState) -> Int[Array, "P N"]:
  """Tokens of all rollouts."""
  return jnp.sum(state.packed[..., 0] >= 0, axis=1).reshape(-1, spec.chunk)


@slots.compiled((SPLIT, SPLIT, WHOLE), SPLIT)
def _taken(spec: ProgramSpec, state: DecodeState, at, share) -> Rollouts:
  """Copies out the rollouts of the prompts in these places."""
  packed = state.packed.reshape(-1, spec.chunk, spec.max_new_tokens, 2)[at]
  share = jnp.full(len(at), share, jnp.float32)
  return programs.to_rollouts(spec, packed, share)
