"""Prompts one after the other through the same slots, each as there is room.

Dynamic sampling does not know how many prompts it needs before it has seen
rewards. Here a prompt whose rollouts are done makes room for another one while
the rest goes on, so that slots never wait for the last rollout of a round.

A rollout is what `sampler.rollouts` makes of it, whatever else is decoded at
the same time and in whatever order prompts are done.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, PyTree

from brorl_jax import sampler
from brorl_jax.sampler import ALL, OWN, PROGRESS, Fixed, Job, Run, Unit
from brorl_jax.types import Prompts, Rollouts

# (places that are free, whether nothing is left to do) -> at most so many
# prompts, or None for now; None for good where nothing is left to do.
Feed = Callable[[int, bool], Prompts | None]

# A program reads or hands out this share of the places at a time.
_SHARE = 4


def stream(
  policy: sampler.Decoder,
  params: PyTree,
  feed: Feed,
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  behaviour: sampler.Behaviour,
  stop_ids: tuple[int, ...],
  slots: int,
  lanes: int,
  places: int,
  mesh: Mesh | None = None,
  watch: Callable[[sampler.Progress], None] = lambda progress: None,
) -> Iterator[tuple[Prompts, Rollouts]]:
  """N rollouts of each prompt that `feed` gives, as prompts are done.

  Args:
    policy: Prefill and one decode step.
    params: Its parameters; alive until the end.
    feed: Where prompts come from. Asked whenever there is room.
    key: Of this training step. Not consumed: only folded.
    n: N, rollouts per prompt.
    max_new_tokens: T.
    behaviour: The distribution that is sampled.
    stop_ids: A rollout ends with the first of them.
    slots: Rollouts of a prompt that decode at the same time, at most N.
    lanes: Prompts that are decoded at the same time.
    places: Prompts that are on the devices, a multiple of axis "data".
    mesh: Devices with axes "data" and "model"; one device if None.
    watch: Called after the prefill and whenever the loop was left.

  Yields:
    Prompts that are done, and their rollouts, on the host.
  """
  devices = 1 if mesh is None else mesh.shape["data"]
  each = places // devices
  job = Job(
    policy,
    behaviour,
    stop_ids,
    n=n,
    max_new_tokens=max_new_tokens,
    lanes=min(-(-lanes // devices), each),
    rows=slots,
    columns=sampler.page_columns(max_new_tokens),
    mesh=mesh,
    streams=True,
  )
  some = max(each // _SHARE, 1)  # places of a device that a program visits
  holds: dict[int, Prompts] = {}  # place -> the one prompt that it holds
  run, spent = None, 0
  while True:
    free = _by_device(set(range(places)) - holds.keys(), devices, each)
    most = each if run is None else some
    room = sum(min(len(one), most) for one in free)
    more = feed(room, not holds) if room else None
    if more is not None:
      units, at, taken = _assigned(more, free, most, each)
      holds |= taken
      if run is None:
        run = sampler.begun(job, params, units, key)
      else:
        run = _admitted(sampler.restored(run, job), params, units, at, key)
      watch(run.progress)
      continue
    if run is None or not holds:
      return
    if run.progress.busy + run.progress.waiting:
      run = sampler.advance(run)
      watch(run.progress)
    over = not run.progress.busy + run.progress.waiting
    done = {p for p in holds if over or run.progress.resting[p]}
    share = (run.progress.slot_steps - spent) / max(len(done), 1)
    spent = run.progress.slot_steps if done else spent
    for batch in _batches(_by_device(done, devices, each), some):
      at = np.zeros((devices, some), np.int32)
      for d, one in enumerate(batch):
        at[d, : len(one)] = one
      out = jax.device_get(_taken(run.job, run.s, at.ravel(), share))
      rows = [
        d * some + i for d, one in enumerate(batch) for i in range(len(one))
      ]
      at_home = [
        d * each + place for d, one in enumerate(batch) for place in one
      ]
      prompts = [holds.pop(place) for place in at_home]
      yield (
        jax.tree.map(lambda *x: np.concatenate(x), *prompts),
        jax.tree.map(lambda x, rows=rows: x[rows], out),
      )


def _by_device(places: set[int], devices: int, each: int) -> list[list[int]]:
  """Places of each device, ascending, numbered from its own first."""
  return [
    sorted(p - d * each for p in places if p // each == d)
    for d in range(devices)
  ]


def _batches(places: list[list[int]], most: int) -> Iterator[list[list[int]]]:
  """At most so many places of each device at a time."""
  for start in range(0, max(map(len, places), default=0), most):
    yield [one[start : start + most] for one in places]


def _assigned(
  prompts: Prompts, free: list[list[int]], most: int, each: int
) -> tuple[Unit, Int[np.ndarray, " rows"], dict[int, Prompts]]:
  """Spreads prompts over the devices, the emptiest first.

  Args:
    prompts: At most as many as have room.
    free: Places of each device, from `_by_device`.
    most: Prompts that a device reads.
    each: Places of a device.

  Returns:
    What each device reads, in which of its places, and who holds what now.
  """
  devices = len(free)
  row = np.zeros((devices, most), np.int32)
  at = np.zeros((devices, most), np.int32)
  real = np.zeros((devices, most), bool)
  taken, count = {}, [0] * devices
  for i in range(len(prompts.index)):
    left = [
      len(one) - n if n < most else -1
      for one, n in zip(free, count, strict=True)
    ]
    d = left.index(max(left))
    place = free[d][count[d]]
    row[d, count[d]], at[d, count[d]], real[d, count[d]] = i, place, True
    taken[d * each + place] = jax.tree.map(lambda x, i=i: x[i : i + 1], prompts)
    count[d] += 1
  units = Unit(
    prompts=jax.tree.map(lambda x: np.asarray(x)[row.ravel()], prompts),
    offset=np.zeros(row.size, np.int32),
    real=real.ravel(),
  )
  return units, at.ravel(), taken


def _admitted(
  run: Run, params: PyTree, units: Unit, at: np.ndarray, key: Key[Array, ""]
) -> Run:
  """With more prompts, in these places of their devices."""
  weights, prefix, queue = run.fixed
  prefix, queue, s, progress = _admit(
    run.job, params, prefix, queue, run.s, units, at, key
  )
  return run._replace(
    fixed=Fixed(weights, prefix, queue),
    s=s,
    progress=sampler.on_host(progress),
  )


@functools.partial(
  jax.jit, static_argnames="job", donate_argnames=("prefix", "queue", "s")
)
def _admit(job: Job, params, prefix, queue, s, units, at, key):
  """Reads prompts into places that are free; lanes have them from then on."""
  N, T = job.n, job.max_new_tokens

  def admit(params, prefix, queue, s, units, at, key):
    P = queue.sizes[0]
    s = sampler.shift(s, queue)  # no lane holds on to what is done
    more, fresh, first = sampler.read(job, params, units, key)
    # Out of bounds, also of the prompt that is none, so that it is not written.
    to = jnp.where(units.real, at, P + 1)
    put = lambda x, new: x.at[to].set(new, mode="drop")
    record = s.record.reshape(P, N, T, 2)
    empty = jnp.full((len(to), N, T, 2), -1, jnp.int32).at[:, :, 0].set(first)
    # Those that no lane has had come first, then these.
    left = jnp.arange(P + 1) + s.next
    todo = s.todo.at[left].get(mode="fill", fill_value=P)
    last = jnp.sum(todo < P) + jnp.cumsum(units.real) - 1
    todo = todo.at[jnp.where(units.real, last, P + 1)].set(at, mode="drop")
    s = dataclasses.replace(
      s,
      todo=todo,
      next=jnp.zeros_like(s.next),
      record=put(record, empty).reshape(P * N, T, 2),
    )
    prefix = jax.tree.map(put, prefix, more)
    queue = jax.tree.map(put, queue, fresh)
    return prefix, queue, s, sampler.progress(s, queue, job)

  return sampler.on_devices(
    job,
    admit,
    (ALL, OWN, OWN, OWN, OWN, OWN, ALL),
    (OWN, OWN, OWN, PROGRESS),
  )(job.policy.cast(params), prefix, queue, s, units, at, key)


@functools.partial(jax.jit, static_argnames="job")
def _taken(job: Job, s: sampler.DecodeState, at, share) -> Rollouts:
  """Rollouts of the prompts in these places of their devices."""

  def take(s, at, share):
    record = s.record.reshape(-1, job.n, job.max_new_tokens, 2)[at]
    return sampler.unpacked(job, record, jnp.full(len(at), share, jnp.float32))

  return sampler.on_devices(job, take, (OWN, OWN, ALL), OWN)(s, at, share)
