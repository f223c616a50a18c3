"""Fewer lanes and slots for the last rollouts of a call.

Idle slots decode too. When no rollout waits, lanes are dropped down to a
quarter and slots of a lane too, again and again; those of a single lane over
pages down to a half. Each size is one program, compiled in 2.5 CPU-s for 6
layers of width 256: 512 slots of one lane have 8, 8 lanes of 16 have 7.
"""

import dataclasses
import functools
from collections.abc import Callable

from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.slots import DecodeProgress

_PART, _LEAST_SLOTS = 4, 4  # a step of 4 slots costs nearly what one of 2 costs


def fewer_lanes(lanes: int) -> int:
  """The next smaller number, 1 at the end."""
  return -(-lanes // _PART)


def fewer_slots(slots: int, *, lanes: int, pool: bool) -> int:
  """The next smaller number of each of the lanes, or the same at the end."""
  if pool:
    return -(-slots // _PART)
  part = _PART if lanes > 1 else 2
  return max(-(-slots // part), _LEAST_SLOTS) if slots > _LEAST_SLOTS else slots


def shrunk(spec: ProgramSpec, progress: DecodeProgress) -> ProgramSpec:
  """`spec` with fewer lanes or slots, if no rollout waits and many are idle."""
  # A single page has 64 columns or fewer: compiling would take longer than the
  # steps that are left.
  if progress.waiting or spec.pages == 1:
    return spec
  lanes = _least(spec.lanes, progress.lanes, fewer_lanes)
  fewer = functools.partial(fewer_slots, lanes=lanes, pool=bool(spec.blocks))
  slots = _least(spec.slots, progress.slots, fewer)
  return dataclasses.replace(spec, lanes=lanes, slots=slots)


def sizes(spec: ProgramSpec) -> int:
  """How many sizes `shrunk` may make, `spec` included."""
  if spec.pages == 1:
    return 1
  found, left = set(), [(spec.lanes, spec.slots)]
  while left:
    lanes, slots = size = left.pop()
    if size not in found:
      found.add(size)
      fewer = fewer_slots(slots, lanes=lanes, pool=bool(spec.blocks))
      left += [(fewer_lanes(lanes), slots), (lanes, fewer)]
  return len(found)


def _least(n: int, busy: int, fewer: Callable[[int], int]) -> int:
  while busy <= fewer(n) < n:
    n = fewer(n)
  return n
