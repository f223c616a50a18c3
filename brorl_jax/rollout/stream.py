"""Prompts that enter the slots while others decode.

Dynamic sampling learns how many prompts it needs only from their rewards. Here
a finished prompt frees its place for another one at once, so slots do not wait
for the last rollout of a round.

The rollouts are those of `sampler.rollouts`, whatever else decodes at the same
time and in whatever order prompts finish.

A place is room on a device for one prompt, or a chunk of its rollouts: its
queue and its N rollouts. What was read of a prompt lies on a shelf, for all of
its chunks. Two programs are added to those of the sampler and of shelf.py:
`_admit` puts prompts into free places, `_taken` copies finished rollouts out.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

from brorl_jax.many import meshes
from brorl_jax.rollout import prefill, program_spec, programs, sampler, shelf
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.prefill import Chunks, PrefillBatch
from brorl_jax.rollout.program_spec import (
  SPLIT,
  WHOLE,
  Decoder,
  ProgramSpec,
  on_devices,
)
from brorl_jax.rollout.programs import PROGRESS_SPECS, DecodeInputs
from brorl_jax.rollout.sampler import Decoding
from brorl_jax.rollout.shelf import Part
from brorl_jax.rollout.slots import (
  DecodeProgress,
  DecodeState,
  measure_progress,
  shift,
)
from brorl_jax.types import Prompts, Rollouts

# (free places, whether nothing is decoding) -> at most that many prompts; None
# if there is none now. None while nothing is decoding ends the stream.
Feed = Callable[[int, bool], Prompts | None]

# `_admit` and `_taken` visit a quarter of the places at a time: a static shape,
# large enough that few calls are needed and small enough that one finished
# prompt does not copy the rollouts of all places (8 P N T bytes).
SHARE = 4


def stream(
  policy: Decoder,
  params: PyTree,
  feed: Feed,
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  sampling: SamplingParams,
  stop_ids: tuple[int, ...],
  slots: int,
  lanes: int,
  places: int,
  blocks: int | None = None,
  mesh: Mesh | None = None,
  watch: Callable[[DecodeProgress], None] = lambda progress: None,
) -> Iterator[tuple[Prompts, Rollouts]]:
  """N rollouts of each prompt that `feed` gives, in the order they finish.

  Args are those of `sampler.rollouts`, and

    params: They must not be donated before the end.
    feed: Called for prompts whenever a place is free.
    places: Prompts on the devices at a time, a multiple of its rows.

  Yields:
    Finished prompts and their rollouts, on the host.
  """
  devices = meshes.of(mesh).rows
  each = places // devices
  spec = program_spec.of_places(
    policy,
    sampling,
    stop_ids,
    n=n,
    max_new_tokens=max_new_tokens,
    places=places,
    lanes=lanes,
    slots=slots,
    blocks=blocks,
    mesh=mesh,
    streams=True,
  )
  visited = max(each // SHARE, 1)  # places of a device per program
  holds: dict[int, Prompts] = {}  # place -> the prompt in it
  read = shelf.Shelf(devices, each)
  decoding: Decoding | None = None
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
          decoding, logits = _opened(spec, params, part, key, each)
        else:
          decoding, logits = _read(decoding, logits, part)
      assert decoding is not None  # the first prompts are unread
      chunks = Chunks(batch.prompts.index, batch.offset, batch.real, rows)
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
  decoding: Decoding,
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
  batch = prefill.batch_of(read, real.ravel())
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
  part: Part,
  key: Key[Array, ""],
  each: int,
) -> tuple[Decoding, Float[Array, "P V"]]:
  """These prompts on the shelf, and their first logits; nothing decodes."""
  inputs, logits, state, progress = shelf.opened(
    spec, params, part, key, each=each
  )
  now = sampler.on_host(progress)
  return Decoding(spec, spec, inputs, (), state, now), logits


def _read(
  decoding: Decoding, logits: Float[Array, "P V"], part: Part
) -> tuple[Decoding, Float[Array, "P V"]]:
  """The same with more prompts on the shelf."""
  # Of the full size whatever is decoding: one program.
  spec = decoding.full
  weights, prefix, queue = decoding.inputs
  logits, prefix = shelf.read(spec, weights, logits, prefix, part)
  inputs = DecodeInputs(weights, prefix, queue)
  return decoding._replace(inputs=inputs), logits


def _admitted(
  decoding: Decoding,
  logits: Float[Array, "P V"],
  chunks: Chunks,
  at: Int[np.ndarray, " B"],
  key: Key[Array, ""],
) -> Decoding:
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
  N, T = spec.n, spec.max_new_tokens

  def admit(logits, queue, state, chunks, at, key):
    P = queue.sizes[0]
    # A lane that still names a finished prompt would take the new prompt's
    # rollouts for the old one's.
    state = shift(state, queue)
    fresh, first = prefill.queued(spec, logits[chunks.row], chunks, key)
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
    packed = state.packed.reshape(-1, spec.n, spec.max_new_tokens, 2)[at]
    return programs.to_rollouts(
      spec, packed, jnp.full(len(at), share, jnp.float32)
    )

  return on_devices(spec, take, (SPLIT, SPLIT, WHOLE), SPLIT)(state, at, share)
