"""Prompts that enter the slots while others decode.

Dynamic sampling learns how many prompts it needs only from their rewards. Here
a finished prompt frees its place for another one at once, so slots do not wait
for the last rollout of a round. The rollouts are those of `sampler.rollouts`,
whatever else decodes at the same time and in whatever order prompts finish.

A place is room on a device for one chunk of a prompt's rollouts: its queue and
its N rollouts. What reading the prompt gave, its keys and values and the
distribution of its first token, lies on a shelf: one of P rows of its device,
from which all of its chunks read. A row is given away when no place holds its
prompt and another prompt needs it; the first prompt is then read again if more
is asked for. As many rows as places suffice.

Four programs are added to those of programs.py: `open_shelf` and `read_more`
read prompts, `_admit` puts chunks into free places, `_taken` copies finished
rollouts out.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.rollout import programs, sampler
from brorl_jax.rollout.program_spec import (
  SPLIT,
  WHOLE,
  ProgramSpec,
  RolloutSpec,
  on_devices,
)
from brorl_jax.rollout.programs import (
  INPUT_SPECS,
  PROGRESS_SPECS,
  Chunks,
  DecodeInputs,
  PrefillBatch,
  idle,
)
from brorl_jax.rollout.sampler import OpenRollouts
from brorl_jax.rollout.slots import (
  DecodeProgress,
  DecodeState,
  RolloutQueue,
  fold_in,
  measure_progress,
  shift,
)
from brorl_jax.types import Prompts, Rollouts

# Prompt tokens that a device reads at a time. A product of so many rows takes
# no longer than two of half as many, and padding costs little.
_TOKENS_TOGETHER = 2048


def prompts_together(each: int, S: int) -> int:
  """How many prompts of S tokens a device reads at a time."""
  return min(max(_TOKENS_TOGETHER // S, 1), each)


class PromptPart(NamedTuple):
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
  ) -> tuple[Int[np.ndarray, " B"], list[PromptPart]]:
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
    size, parts = prompts_together(self._each, S), []
    for start in range(0, max(map(len, unread)), size):
      # Padding goes to row P, which is out of bounds, so that it is dropped.
      to = np.full((devices, size), self._each, np.int32)
      at = np.zeros((devices, size), np.int32)
      for d, own in enumerate(unread):
        for k, found in enumerate(own[start : start + size]):
          to[d, k], at[d, k] = found
      pick = lambda x, at=at: np.asarray(x)[at.ravel()]
      parts.append(
        PromptPart(
          pick(batch.prompts.tokens),
          pick(batch.prompts.mask),
          to.ravel(),
        )
      )
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
  key: Key[Array, ""],
  *,
  each: int,
) -> tuple[DecodeInputs, Float[Array, "P V"], DecodeState, DecodeProgress]:
  """Reads the first prompts into the first rows; no place has a prompt.

  The prompts' rows are 0, 1, 2, ...; `each` is P, rows and places of a device.
  Returns what decoding reads, the logits of first tokens, state and progress.
  """

  def begin(weights, part, key):
    P, N = each, spec.chunk
    more = lambda x: jnp.pad(x, [(0, P - len(x))] + [(0, 0)] * (x.ndim - 1))
    read = programs.prefill_logits(spec.policy, weights, part.tokens, part.mask)
    logits, prefix = jax.tree.map(more, read)
    none = jnp.zeros((P, N), jnp.int32)
    row = none[:, 0]
    queue = RolloutQueue(none, row, none, fold_in(key, row), row, row)
    queue = programs.with_none(queue, key)
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
def read_more(
  spec: ProgramSpec,
  weights: PyTree,
  logits: Float[Array, "P V"],
  prefix: Any,
  part: PromptPart,
) -> tuple[Float[Array, "P V"], Any]:
  """Reads more prompts into rows of their devices; logits and prefix of all
  rows are donated."""

  def read_rows(weights, logits, prefix, part):
    new = programs.prefill_logits(spec.policy, weights, part.tokens, part.mask)
    put = lambda x, new: x.at[part.to].set(new, mode="drop")
    return jax.tree.map(put, (logits, prefix), new)

  return on_devices(
    spec,
    read_rows,
    (WHOLE, SPLIT, SPLIT, SPLIT),
    (SPLIT, SPLIT),
  )(weights, logits, prefix, part)


# (free places, whether nothing is decoding) -> at most that many prompts; None
# if there is none now. None while nothing is decoding ends the stream.
Feed = Callable[[int, bool], Prompts | None]

# `_admit` and `_taken` visit a quarter of the places at a time: a static shape,
# large enough that few calls are needed and small enough that one finished
# prompt does not copy the rollouts of all places (8 P N T bytes).
SHARE = 4


def stream(
  spec: RolloutSpec,
  params: PyTree,
  feed: Feed,
  key: Key[Array, ""],
  *,
  places: int,
  watch: Callable[[DecodeProgress], None] = lambda progress: None,
) -> Iterator[tuple[Prompts, Rollouts]]:
  """N rollouts of each prompt that `feed` gives, in the order they finish.

  `feed` is called for prompts whenever one of
  the `places` is free, a multiple of the devices' rows; `params` must not be
  donated before the end. What is yielded is on the host.
  """
  devices = spec.devices
  each = places // devices
  program = spec.program(places, streams=True)
  visited = max(each // SHARE, 1)  # places of a device per program
  holds: dict[int, Prompts] = {}  # place -> the prompt in it
  read = Shelf(devices, each)
  decoding: OpenRollouts | None = None
  logits: Any = None  # of the first tokens of what is on the shelf
  spent = 0
  while True:
    free = _by_device(set(range(places)) - holds.keys(), devices, each)
    room = sum(min(len(own), visited) for own in free)
    more = feed(room, not holds) if room else None
    if more is not None:
      batch, at, taken = _assigned(more, free, visited, each)
      holds |= taken
      rows, parts = read.rows(batch, _held(holds, devices, each))
      for part in parts:
        if decoding is None:
          decoding, logits = _opened(program, params, part, key, each)
        else:
          decoding, logits = _read(decoding, logits, part)
      assert decoding is not None  # the first prompts are unread
      chunks = Chunks(batch.prompts.index, batch.offset, batch.real, rows)
      # With all lanes and slots, so that `_admit` is one program.
      decoding = _admitted(sampler.restored(decoding), logits, chunks, at, key)
      watch(decoding.progress)
      continue  # places may be left, and the feed may have more prompts
    if decoding is None or not holds:
      return
    if decoding.progress.busy + decoding.progress.waiting:
      decoding = sampler.advance(decoding)
      watch(decoding.progress)
    # If all rollouts ended with their first token, no program runs that would
    # give the prompts to lanes and take them away again: all are done.
    over = not decoding.progress.busy + decoding.progress.waiting
    done = {p for p in holds if over or decoding.progress.resting[p]}
    # Slot-steps are counted in total, not per prompt: those since the last
    # prompts finished are divided evenly among the prompts that finish now.
    share = (decoding.progress.slot_steps - spent) / max(len(done), 1)
    spent = decoding.progress.slot_steps if done else spent
    for part in _batches(_by_device(done, devices, each), visited):
      yield _handed_out(decoding, holds, part, share, each, visited)


def _handed_out(
  decoding: OpenRollouts,
  holds: dict[int, Prompts],
  places: list[list[int]],
  share: float,
  each: int,
  most: int,
) -> tuple[Prompts, Rollouts]:
  """Finished prompts and their rollouts, on the host; frees their places.

  `share` are the slot-steps of each prompt, `most` the places of a device that
  the program visits.
  """
  # Devices with fewer finished prompts read place 0 again; `rows` skips it.
  at = np.zeros((len(places), most), np.int32)
  for d, own in enumerate(places):
    at[d, : len(own)] = own
  out = jax.device_get(_taken(decoding.spec, decoding.state, at.ravel(), share))
  rows = [d * most + i for d, own in enumerate(places) for i in range(len(own))]
  prompts = [
    holds.pop(d * each + place) for d, own in enumerate(places) for place in own
  ]
  return (
    jax.tree.map(lambda *x: np.concatenate(x), *prompts),
    jax.tree.map(lambda x: x[rows], out),
  )


def _by_device(places: set[int], devices: int, each: int) -> list[list[int]]:
  """Places of each device in ascending order, numbered from 0 on each."""
  return [
    sorted(p - d * each for p in places if p // each == d)
    for d in range(devices)
  ]


def _batches(places: list[list[int]], most: int) -> Iterator[list[list[int]]]:
  """The places in parts of at most `most` places of each device."""
  for start in range(0, max(map(len, places), default=0), most):
    yield [own[start : start + most] for own in places]


def _assigned(
  prompts: Prompts, free: list[list[int]], most: int, each: int
) -> tuple[PrefillBatch, Int[np.ndarray, " rows"], dict[int, Prompts]]:
  """Spreads prompts over the devices, the one with most free places first.

  Returns the prompts that each device reads, at most `most`, the place of each,
  and the new entries of place -> prompt.
  """
  devices = len(free)
  row = np.zeros((devices, most), np.int32)
  at = np.zeros((devices, most), np.int32)
  real = np.zeros((devices, most), bool)
  taken, count = {}, [0] * devices
  for i in range(len(prompts.index)):
    left = [
      len(own) - n if n < most else -1
      for own, n in zip(free, count, strict=True)
    ]
    d = left.index(max(left))
    place = free[d][count[d]]
    row[d, count[d]], at[d, count[d]], real[d, count[d]] = i, place, True
    taken[d * each + place] = jax.tree.map(lambda x, i=i: x[i : i + 1], prompts)
    count[d] += 1
  read = jax.tree.map(lambda x: np.asarray(x)[row.ravel()], prompts)
  batch = programs.batch_of(read, real.ravel())
  return batch, at.ravel(), taken


def _held(holds: dict[int, Prompts], devices: int, each: int) -> list[set[int]]:
  """Prompts that have a place, of each device."""
  held: list[set[int]] = [set() for _ in range(devices)]
  for place, prompt in holds.items():
    held[place // each].add(int(prompt.index[0]))
  return held


def _opened(
  spec: ProgramSpec,
  params: PyTree,
  part: PromptPart,
  key: Key[Array, ""],
  each: int,
) -> tuple[OpenRollouts, Float[Array, "P V"]]:
  """These prompts on the shelf, and their first logits; nothing decodes."""
  inputs, logits, state, progress = open_shelf(
    spec, params, part, key, each=each
  )
  now = sampler.on_host(progress)
  return OpenRollouts(spec, spec, inputs, (), state, now), logits


def _read(
  decoding: OpenRollouts, logits: Float[Array, "P V"], part: PromptPart
) -> tuple[OpenRollouts, Float[Array, "P V"]]:
  """The same with more prompts on the shelf."""
  # Of the full size whatever is decoding: one program.
  spec = decoding.full
  weights, prefix, queue = decoding.inputs
  logits, prefix = read_more(spec, weights, logits, prefix, part)
  inputs = DecodeInputs(weights, prefix, queue)
  return decoding._replace(inputs=inputs), logits


def _admitted(
  decoding: OpenRollouts,
  logits: Float[Array, "P V"],
  chunks: Chunks,
  at: Int[np.ndarray, " B"],
  key: Key[Array, ""],
) -> OpenRollouts:
  """`decoding` with more rollouts, in these places of their devices."""
  weights, prefix, queue = decoding.inputs
  queue, state, progress = _admit(
    decoding.spec, logits, queue, decoding.state, chunks, at, key
  )
  return decoding._replace(
    inputs=DecodeInputs(weights, prefix, queue),
    state=state,
    progress=sampler.on_host(progress),
  )


@functools.partial(
  jax.jit, static_argnames="spec", donate_argnames=("queue", "state")
)
def _admit(spec: ProgramSpec, logits, queue, state, chunks, at, key):
  """Puts prompts into free places and appends them to the lanes' order."""
  N, T = spec.chunk, spec.max_new_tokens

  def admit(logits, queue, state, chunks, at, key):
    P = queue.sizes[0]
    # A lane that still names a finished prompt would take the new prompt's
    # rollouts for the old one's.
    state = shift(state, queue)
    fresh, first = programs.queued(spec, logits[chunks.row], chunks, key)
    # Row P is the prompt without rollouts, so P + 1 is the first index that is
    # out of bounds: padding is not written.
    to = jnp.where(chunks.real, at, P + 1)
    put = lambda x, new: x.at[to].set(new, mode="drop")
    packed = state.packed.reshape(P, N, T, 2)
    empty = jnp.full((len(to), N, T, 2), -1, jnp.int32).at[:, :, 0].set(first)
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
    return queue, state, measure_progress(state, queue, spec)

  return on_devices(
    spec,
    admit,
    (SPLIT, SPLIT, SPLIT, SPLIT, SPLIT, WHOLE),
    (SPLIT, SPLIT, PROGRESS_SPECS),
  )(logits, queue, state, chunks, at, key)


@functools.partial(jax.jit, static_argnames="spec")
def _taken(spec: ProgramSpec, state: DecodeState, at, share) -> Rollouts:
  """Copies out the rollouts of the prompts in these places."""

  def take(state, at, share):
    packed = state.packed.reshape(-1, spec.chunk, spec.max_new_tokens, 2)[at]
    return programs.to_rollouts(
      spec, packed, jnp.full(len(at), share, jnp.float32)
    )

  return on_devices(spec, take, (SPLIT, SPLIT, WHOLE), SPLIT)(state, at, share)
