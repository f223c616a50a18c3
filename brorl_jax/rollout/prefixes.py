"""Rollouts of short responses, where those that begin alike share a row.

512 answers of three tokens have some 100 distinct prefixes.

  level t   the rollouts that have not ended are sorted by their prefix
            a row for each distinct prefix of t tokens decodes its last token,
            and takes the keys and values of those before from its parent's row
            every rollout draws token t from the row of its prefix

These are the rollouts of the slots, up to rounding. Long responses soon have
nothing in common, and the keys and values of all rows are copied in each level.
Steps of configs/n512.py take 1.18 and 1.32 times the CPU time without this, of
need.py 1.21 and 1.44 times, of n16.py .86 times (two rounds, 2026-11-29).
"""

import concurrent.futures as futures
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from brorl_jax.many import processes
from brorl_jax.rollout import programs, slots
from brorl_jax.rollout.draw import block_of, draw_from
from brorl_jax.rollout.dynamic_sampling import Feed
from brorl_jax.rollout.programs import PrefillBatch
from brorl_jax.rollout.slots import Decoder, ProgramSpec, RolloutSpec, Seed
from brorl_jax.types import Prompts, Rollouts, behind

# Tokens of a response, at most. Copying the pages of 512 rows of 6 x 256 takes
# 5 % of a step if they have 16 columns, and 20 % with 64.
_MOST_TOKENS = 16
# Rows of a device that decode together: fewer are slow, more idle more often.
_ROWS = 256
# Prompts of a device at a time, at most: with more of them each has few rows,
# and all wait for the one with most prefixes.
_PROMPTS = 16
# Share of a machine's memory that all of this may take.
_SHARE = 16


def together(
  policy: Decoder, *, n: int, max_new_tokens: int, memory_bytes: int
) -> int:
  """Prompts of a device whose rollouts should share rows at one time, in so
  much memory of it; 0: rollouts should have slots.
  """
  V, T = policy.vocab, max_new_tokens
  # A prefix is coded as a number below N V, see `_grouped`.
  if T > _MOST_TOKENS or n * V >= 2**31 - 1:
    return 0
  if policy.pool_columns:  # has slots
    return 0
  page = jax.eval_shape(lambda: policy.page(1, T))
  row = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page))
  # Two pages of all rollouts, and blocks of logits and two arrays like them for
  # each draw; logits, their exponentials and a copy of the rows of a pass.
  each = n * (2 * row + 4 * 3 * block_of(V))
  left = memory_bytes // _SHARE - 4 * 3 * _ROWS * V
  return min(max(left // each, 0), _PROMPTS)


def stream(
  spec: RolloutSpec, params: PyTree, feed: Feed, key: Seed, *, places: int
) -> Iterator[tuple[Prompts, Rollouts]]:
  """As `stream.stream`, for at most this many prompts at a time."""
  program = _program(spec, places)
  each = program.lanes * spec.devices
  together = each * spec.groups
  made = functools.partial(_made, program, each, params, key)
  with futures.ThreadPoolExecutor(spec.groups) as pool:
    while True:
      parts: list[Prompts] = []
      room = together
      # The feed may have more than it gives at once.
      while room and (more := feed(room, not parts)) is not None:
        parts.append(more)
        room -= len(more.index)
      if not parts:
        return
      prompts = behind(parts)
      some = _cut(prompts, -(-len(prompts.index) // spec.groups))
      yield from zip(some, pool.map(made, some), strict=True)


def rollouts(
  spec: RolloutSpec, params: PyTree, prompts: Prompts, key: Seed
) -> Rollouts:
  """As `sampler.rollouts`, on the host."""
  program = _program(spec, len(prompts.index))
  each = program.lanes * spec.devices
  made = functools.partial(_made, program, each, params, key)
  with futures.ThreadPoolExecutor(spec.groups) as pool:
    parts = [*pool.map(made, _cut(prompts, each))]
  return behind(parts)


def _cut(prompts: Prompts, each: int) -> list[Prompts]:
  """So many at a time."""
  starts = range(0, len(prompts.index), each)
  return [jax.tree.map(lambda x, i=i: x[i : i + each], prompts) for i in starts]


def _program(spec: RolloutSpec, places: int) -> ProgramSpec:
  """Lanes are the prompts of a device, at most those of `spec`; slots are their
  rows. Both are those of one of the groups.
  """
  most = min(-(-places // spec.devices), spec.lanes or _PROMPTS)
  each = -(-most // spec.groups)
  rows = min(max(_ROWS // (each * spec.groups), 1), spec.n)
  shared = dataclasses.replace(spec, slots=rows, lanes=None, blocks=None)
  return shared.program(each * spec.devices)


def _made(
  spec: ProgramSpec, places: int, params: PyTree, key: Seed, prompts: Prompts
) -> Rollouts:
  """The rollouts of `places` prompts or fewer, on the host."""
  P = len(prompts.index)
  # Places without a prompt read the first one and make nothing of it.
  row = np.where(np.arange(places) < P, np.arange(places), 0)
  read = jax.tree.map(lambda x: np.asarray(x)[row], prompts)
  batch = programs.batch_of(read, np.arange(places) < P)
  with processes.launching:
    made = _sampled(spec, params, batch, key)
  out = jax.device_get(made)
  processes.trim()  # 1.2 GB of each call, for 135M: the next may not fit there
  return jax.tree.map(lambda x: x[:P], out)


@functools.partial(jax.jit, static_argnames="spec")
def _sampled(
  spec: ProgramSpec, params: PyTree, batch: PrefillBatch, key: Seed
) -> Rollouts:
  whole, split = slots.WHOLE, slots.SPLIT
  made = functools.partial(_levels, spec)
  weights = spec.policy.unroll(spec.policy.cast(params))
  made = slots.on_devices(spec, made, (whole, split, whole), split)
  return made(weights, batch, key)


def _levels(
  spec: ProgramSpec, weights: PyTree, batch: PrefillBatch, key: Seed
) -> Rollouts:
  """All rollouts of a device's prompts, P of them, with R rows each."""
  P, N, T, R = len(batch.real), spec.chunk, spec.max_new_tokens, spec.slots
  parts = -(-N // R)  # passes of a level in which no two prefixes are alike
  prefix, queue, first = programs.read_prompts(spec, weights, batch, key)
  shared = spec.policy.lane_prompts(prefix, jnp.arange(P)[:, None])
  page = spec.policy.page(P * R, T)
  pages = jax.tree.map(lambda x: jnp.stack([x] * parts), page)
  prompt = jnp.arange(P)[:, None]

  def level(carry):
    t, token, row, going, packed, pages, decoded = carry
    group, parent, last, count = _grouped(token, row, going, spec.policy.vocab)
    # Whole passes: a slice that reached beyond the end would begin earlier.
    whole = lambda x: jnp.pad(x, ((0, 0), (0, parts * R - N)))
    parent, last = whole(parent), whole(last)
    uniform = queue.uniform(prompt, jnp.arange(N)[None], t)
    at = jnp.full((P, R), t, jnp.int32)

    def decode(i, carry):
      new, drawn = carry
      here = lambda x: jax.lax.dynamic_slice_in_dim(x, i * R, R, axis=1)
      # Rows hold what their parents' rows held, in whatever page.
      page_of, row_of = jnp.divmod(here(parent), R)
      at_page = page_of.ravel(), (prompt * R + row_of).ravel()
      read = weights, shared, [jax.tree.map(lambda x: x[at_page], pages)]
      of = here(last), at, jnp.zeros_like(at), t - 1, jnp.int32(0)
      logits, page = spec.policy.decode_step(*read, *of)
      new = jax.tree.map(lambda whole, x: whole.at[i].set(x), new, page)
      mine = going & (group // R == i)
      of = jnp.where(mine, group % R, 0)
      own = slots.pack(*draw_from(spec.sampling.cut(logits), of, uniform))
      return new, jnp.where(mine[..., None], own, drawn)

    passes = -(-jnp.max(count) // R)
    drawn = jnp.full((P, N, 2), -1, jnp.int32)
    pages, drawn = jax.lax.fori_loop(0, passes, decode, (pages, drawn))
    packed = packed.at[:, :, t].set(drawn)
    token = jnp.where(going, drawn[..., 0], token)
    going &= ~spec.ended(token)
    return t + 1, token, group, going, packed, pages, decoded + passes * R

  def more(carry):
    t, _, _, going, *_ = carry
    return (t < T) & jnp.any(going)

  token = first[..., 0]
  packed = jnp.full((P, N, T, 2), -1, jnp.int32).at[:, :, 0].set(first)
  going = ~spec.ended(token) & batch.real[:, None]
  start = (jnp.int32(1), token, jnp.zeros_like(token), going, packed, pages)
  out = jax.lax.while_loop(more, level, (*start, jnp.int32(0)))
  decoded = jnp.full(P, out[-1], jnp.float32)
  return programs.to_rollouts(spec, out[4], decoded)


_Each = Int[Array, "P N"]


def _grouped(
  token: _Each, row: _Each, going: Bool[Array, "P N"], vocab: int
) -> tuple[_Each, _Each, _Each, Int[Array, " P"]]:
  """Numbers the distinct prefixes of each prompt; `token` is the last of each
  rollout, after prefix number `row`. Returns the prefix of each rollout that is
  `going`, the parent and last token of each prefix, and their number.
  """
  none = jnp.iinfo(jnp.int32).max
  code = jnp.where(going, row * vocab + token, none)
  order = jnp.argsort(code, axis=1)
  ordered = jnp.take_along_axis(code, order, axis=1)
  before = jnp.pad(ordered[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  new = (ordered != before) & (ordered < none)
  number = jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1
  prompt = jnp.arange(len(token))[:, None]
  group = jnp.zeros_like(order).at[prompt, order].set(jnp.maximum(number, 0))
  # The first rollout of each prefix.
  place = jnp.argsort(~new, axis=1, stable=True)
  some = jnp.take_along_axis(order, place, axis=1)
  of = lambda x: jnp.take_along_axis(x, some, axis=1)
  return group, of(row), of(token), jnp.sum(new, axis=1, dtype=jnp.int32)
