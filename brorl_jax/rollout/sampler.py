"""N rollouts per prompt from one prefill, decoded in slots.

  rollouts            all of these prompts: the host's loop over `advance`
    programs.start    prefill and first tokens
    advance           turns pages and drops idle slots, then decodes:
      programs.segment  until the newest page is full or no prompt is left
      programs.resize   keeps only the slots that work
    programs.finish   the rollouts

In a step all slots write the same column of the newest page. A slot finds its
own newest columns by their age, so slots of different age share pages. A step
reads as many columns as the longest rollout in a slot has tokens, rounded up to
pages, not as many as the limit. On accelerators see `slots.Blocks`.
"""

import concurrent.futures as futures
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from brorl_jax.many import processes
from brorl_jax.rollout import programs
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.programs import DecodeInputs
from brorl_jax.rollout.slots import (
  DecodeProgress,
  Decoder,
  DecodeState,
  ProgramSpec,
  RolloutSpec,
  page_columns,
)
from brorl_jax.types import Prompts, Rollouts

# `sample` pads prompts to a power of two of at least 16 tokens, so that a new
# length finds its program compiled (.01 s instead of 11 s).
_LEAST_PROMPT = 16
# Rows of a CPU that decode together. Rollouts of random length then take each
# other's slots until the last ones: all at once, 32 prompts x 16 fill .36 of
# their slots. More rows make a token hardly cheaper (128: .30 CPU-ms for 6
# layers of width 256, 512: .27).
_ROWS = 128
# Slots of a lane, if many prompts have few rollouts: a lane begins its second
# prompt before the first one ends, but no third. 200 prompts x 16 fill .92 of
# 16 lanes of 8 (6,100 tokens per CPU-s), .69 of 8 of 16 (4,900).
_OF_PROMPT = 8
# More steps than any rollout has, so that `advance` ends for other reasons.
_NO_BOUND = 2**30
# Steps over a pool, at most, before idle slots may be dropped and a device that
# waits for prompts gets them. An exit costs about one step (estimated).
SPAN = 256
# The same over pages when no rollout waits.
_TAIL_SPAN = 32
# Least ratio of the slots of a size to the next one, and most sizes: each is
# compiled, in 2.5 CPU-s for 6 layers of width 256.
_RATIO = 1.6
_MOST_SIZES = 8
# Over pages: a step of 4 rows costs nearly what one of 2 does.
_LEAST_ROWS = 4
# Of all slots at most one in so many is idle since lanes are not full.
_WASTE = 8


class OpenRollouts(NamedTuple):
  """Rollouts in progress, as the host holds them between two programs."""

  full: ProgramSpec  # with all lanes and slots
  spec: ProgramSpec  # of the next program, which may have fewer
  inputs: DecodeInputs
  pages: tuple[Any, ...]  # the newest last, or the pool; () before both
  state: DecodeState
  progress: DecodeProgress
  prompt: int  # tokens of a prompt
  logits: Any = None  # in a stream, of the first tokens of prompts


def advance(decoding: OpenRollouts, steps: int = _NO_BOUND) -> OpenRollouts:
  """Decodes until the host must act, or `steps`; the state is donated."""
  with processes.launching:
    decoding, progress = _launched(decoding, steps)
  return decoding._replace(progress=on_host(progress))


def _launched(
  decoding: OpenRollouts, steps: int
) -> tuple[OpenRollouts, DecodeProgress]:
  """Both as they will be when the program has ended."""
  # Compaction copies the pages once and makes each later step cheaper. It waits
  # until no rollout needs a slot, so it is never undone.
  spec = shrunk(decoding)
  decoding = resized(decoding, spec)
  pages = list(decoding.pages) or [programs.cache(spec)]
  if spec.blocks:
    steps = min(steps, page_columns(spec.max_new_tokens), SPAN)
  elif not decoding.progress.waiting:
    steps = min(steps, _TAIL_SPAN)
  # Devices turn the page together, since the number of pages is static. As long
  # as one has work and free columns, the others wait for at most C steps.
  turned = spec.turns and not decoding.progress.room
  if turned:
    pages = programs.turn_pages(spec, pages, decoding.progress.longest)
  *older, newest = pages
  # As many pages as there can be: in front of these one that is not read.
  count = (spec.pages - 1 if spec.turns else 0) - len(older)
  unread = older[:1] or ([programs.cache(spec)] if count else [])
  read = (*unread * count, *older), np.int32(len(older)), newest
  how = decoding.state, turned, np.int32(steps)
  newest, state, progress = programs.segment(spec, decoding.inputs, *read, *how)
  return decoding._replace(pages=(*older, newest), state=state), progress


def resized(decoding: OpenRollouts, spec: ProgramSpec) -> OpenRollouts:
  """The same rollouts in the slots of `spec`, some of them idle."""
  if decoding.spec == spec:
    return decoding
  row, state = programs.resize(spec, decoding.state)
  if spec.blocks:  # a pool stays as it is
    return decoding._replace(spec=spec, state=state)
  pages = []
  for page in decoding.pages:
    pages.append(programs.moved(spec, page, row))
    jax.tree.map(lambda x: x.delete(), page)  # or there were all of them twice
  return decoding._replace(spec=spec, pages=tuple(pages), state=state)


def on_host(progress: DecodeProgress) -> DecodeProgress:
  """Progress as integers and one array of the host; waits for the program."""
  # One transfer for all fields, not ten.
  *numbers, resting, rows = jax.device_get(progress)
  return DecodeProgress(*map(int, numbers), resting=resting, rows=rows)


def compact_sizes(
  lanes: int, slots: int, *, prompt: int, new: int, pool: bool
) -> list[tuple[int, int]]:
  """(lanes, slots of each) that programs are compiled for, largest first.

  The busy slots of a lane may lie in several narrow ones, which have its prompt
  each, of so many tokens. With responses of at most `new` tokens no size takes
  more memory than the first.
  """
  most = lanes * slots
  least = min(1 if pool else _LEAST_ROWS, most)
  last = min(4 * least, most)
  few = min(math.ceil(math.log(most / last, _RATIO)), _MOST_SIZES - 2)
  middle = np.geomspace(most, last, few + 1)[1:].tolist()
  found = [(lanes, slots)]
  for rows in [*(-(-x // 4) * 4 for x in middle), least]:
    # The last one of a lane's narrow ones is half idle on average.
    narrow = 1 << int(math.log2(max(2 * rows / (_WASTE * lanes), 1)))
    count = math.ceil(rows / narrow)
    freed = 0 if pool else (most - count * narrow) * new
    if lanes == 1 or 2 * (count - lanes) * prompt > freed:
      narrow = math.ceil(rows / lanes)
      count = math.ceil(rows / narrow)
    if count * narrow < math.prod(found[-1]):
      found.append((count, narrow))
  return found


def shrunk(decoding: OpenRollouts) -> ProgramSpec:
  """The program with fewest slots that hold what is busy, if none waits."""
  now, progress = decoding.spec, decoding.progress
  # At most 64 columns: compiling would take longer than the steps left.
  if progress.waiting or now.pages == 1:
    return now
  fits = now.lanes, now.slots
  how = {"prompt": decoding.prompt, "new": now.max_new_tokens}
  for size in compact_sizes(*now.full, **how, pool=now.blocks > 0):
    # Lanes of each device, of which one needs most.
    needed = (-(-progress.rows // size[1])).reshape(-1, now.full[0]).sum(axis=1)
    if needed.max() <= size[0] and math.prod(size) < math.prod(fits):
      fits = size
  return dataclasses.replace(now, lanes=fits[0], slots=fits[1])


def rollouts(
  spec: RolloutSpec,
  params: PyTree,
  prompts: Prompts,
  key: Key[Array, ""],
  *,
  watch: Callable[[DecodeProgress], None] = lambda progress: None,
) -> Rollouts:
  """N rollouts of each prompt; prompts and slots lie on rows of devices. The
  `key` of this training step is only folded, so the caller may use it again.
  `watch` gets the progress after the prefill and after each program, of each
  group by itself.
  """
  P, n, count = len(prompts.index), spec.n, spec.groups
  one = functools.partial(_of_group, params=params, key=key, watch=watch)
  if count == 1 or (P % count and n % count):
    return one(spec, prompts)
  if P % count:  # each makes some rollouts of all prompts
    n //= count
    slots = -(-spec.slots // count)
    spec = dataclasses.replace(spec, n=n, slots=slots, groups=1)
    first = [np.full(P, g * n, np.int32) for g in range(count)]
    own = [dataclasses.replace(prompts, first=x) for x in first]
    join = lambda *x: jnp.concatenate(x, axis=1) if x[0].ndim > 1 else sum(x)
  else:
    spec = spec.share(P)
    cut = lambda g: jax.tree.map(lambda x: np.asarray(x)[g::count], prompts)
    own = [cut(g) for g in range(count)]
    join = lambda *x: jnp.stack(x, axis=1).reshape(P, *x[0].shape[1:])
  with futures.ThreadPoolExecutor(count) as pool:
    parts = [*pool.map(functools.partial(one, spec), own)]
  return jax.tree.map(join, *parts)


def _of_group(
  spec: RolloutSpec,
  prompts: Prompts,
  *,
  params: PyTree,
  key: Key[Array, ""],
  watch: Callable[[DecodeProgress], None],
) -> Rollouts:
  """The rollouts of one group."""
  P, n = len(prompts.index), spec.n
  # 3 prompts on 2 devices: each reads every prompt and makes half its rollouts.
  batch, parts = _spread(prompts, n, spec.devices)
  program = spec.program(len(batch.index), parts=parts)
  # Part k of a prompt makes its rollouts k N / parts and following.
  offset = np.arange(len(batch.index), dtype=np.int32) % parts * program.chunk
  batch = programs.batch_of(batch, np.ones(len(batch.index), bool))
  batch = batch._replace(offset=batch.offset + offset)
  with processes.launching:
    inputs, state, progress = programs.start(program, params, batch, key)
  now = on_host(progress)
  width, of = batch.prompts.tokens.shape[1], (inputs, (), state, now)
  decoding = OpenRollouts(program, program, *of, width)
  watch(now)
  while decoding.progress.busy + decoding.progress.waiting:
    if len(decoding.pages) < 2 and not program.blocks:
      processes.trim(0)  # compiling `start` and `segment` left 200 MB each
    decoding = advance(decoding)
    watch(decoding.progress)
  with processes.launching:
    out = programs.finish(decoding.spec, decoding.state)
  # The holes that pages leave fit no later one: a process has 1,130 MB after
  # three calls, not 680. Trimming costs 2 % of the time of 512 x 128 tokens.
  del inputs, state, decoding
  processes.trim(0)
  together = lambda x: x.reshape(-1, n, *x.shape[2:])[:P]
  arrays = map(together, (out.tokens, out.logp, out.mask, out.truncated))
  slot_steps = jnp.sum(out.slot_steps.reshape(-1, parts), axis=1)[:P]
  return Rollouts(*arrays, slot_steps=slot_steps)


def parts_of(P: int, N: int, devices: int) -> int:
  """Into how many parts a prompt's rollouts are cut to occupy all devices."""
  parts = devices // math.gcd(P, devices)
  return parts if N % parts == 0 else 1


def _spread(prompts: Prompts, n: int, devices: int) -> tuple[Prompts, int]:
  """Prompts, each repeated for its parts, and the number of parts.

  If neither divides evenly there is one part, and first prompts are repeated.
  """
  P = len(prompts.index)
  parts = parts_of(P, n, devices)
  if P * parts % devices == 0:
    return jax.tree.map(lambda x: np.repeat(x, parts, axis=0), prompts), parts
  more = np.arange(P + -P % devices) % P
  return jax.tree.map(lambda x: np.asarray(x)[more], prompts), 1


def lanes_and_slots(prompts: int, n: int) -> tuple[int, int]:
  """(lanes, slots of each) that decode n rollouts of each prompt on a CPU."""
  most = max(-(-_ROWS // max(prompts, 1)), min(-(-n // 2), _OF_PROMPT))
  slots = max(min(most, n), 1)
  return max(min(_ROWS // slots, prompts), 1), slots


def prompt_width(longest: int) -> int:
  """The power of two to which prompts of `longest` tokens are padded."""
  return max(1 << (longest - 1).bit_length(), _LEAST_PROMPT)


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
  """N rollouts of each prompt: tokens, log-probabilities, masks [P,N,T].

  Raises ValueError, with the value, if an argument is out of range.

  Args:
    prompts: Token ids, at least one per prompt. They are padded to a power of
      two, so that few lengths are compiled. Another number of prompts, n or
      max_new_tokens compiles another program.
    key: Of this call. Rollout n of prompt p depends on (key, p, n) alone.
    temperature: 0 is greedy. See `SamplingParams` for this and the next three.
    stop_ids: A rollout ends with the first of these tokens, which it includes.
    slots: Rollouts of a prompt that decode at the same time. None: N, or on a
      CPU as many as make 128 rows of all lanes.
    lanes: Prompts that decode at the same time. None: all, on a CPU at most
      128.
    mesh: From `meshes`; one device if None.
  """
  # A pool has room for what it holds; pages are as long for all rows.
  few = len(prompts), n
  if not policy.pool_columns:
    few = lanes_and_slots(len(prompts), n)
  lanes = few[0] if lanes is None else lanes
  slots = few[1] if slots is None else slots
  sampling = SamplingParams(temperature, top_k, top_p, min_p)
  for name, value, high in (
    ("prompts", len(prompts), math.inf),
    ("n", n, math.inf),
    ("max_new_tokens", max_new_tokens, math.inf),
    ("slots", slots, n),
    ("lanes", lanes, len(prompts)),
  ):
    if not 1 <= value <= high:
      most = f" and at most {high}" if math.isfinite(high) else ""
      raise ValueError(f"{name} = {value} must be at least 1{most}")
  if empty := [p for p, ids in enumerate(prompts) if not len(ids)]:
    raise ValueError(f"prompt {empty[0]} is empty")
  # An id out of range would read another token's embedding: XLA clamps indices.
  named = [(f"prompt {p}", ids) for p, ids in enumerate(prompts)]
  for name, ids in (*named, ("stop_ids", stop_ids)):
    if wrong := [int(v) for v in ids if not 0 <= v < policy.vocab]:
      known = f"the vocabulary, 0 to {policy.vocab - 1}"
      raise ValueError(f"token {wrong[0]} of {name} is not in {known}")

  # On the left, so that the last position of every prompt is a real token.
  shape = len(prompts), prompt_width(max(map(len, prompts)))
  tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
  for row, real, ids in zip(tokens, mask, prompts, strict=True):
    row[-len(ids) :], real[-len(ids) :] = ids, True
  spec = RolloutSpec(
    policy=policy,
    sampling=sampling,
    stop_ids=tuple(stop_ids),
    n=n,
    max_new_tokens=max_new_tokens,
    slots=slots,
    lanes=lanes,
    mesh=mesh,
  )
  index = np.arange(len(prompts), dtype=np.int32)
  return rollouts(spec, params, Prompts(tokens, mask, index), key)
