"""Fewer lanes and slots for the last rollouts of a call.

Idle slots decode too. When no rollout waits, lanes and slots that are idle are
dropped, again and again. Every size is one program, compiled in 2.5 CPU-s for 6
layers of width 256, so there are few: lanes have at most three numbers, slots
of several lanes two, those of one lane the rest.
"""

import dataclasses
import math

from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.slots import DecodeProgress

_MOST = 7  # sizes
# Over pages: a step of 4 slots costs nearly what one of 2 does.
_LEAST_SLOTS = 4


def sizes(lanes: int, slots: int, *, pool: bool) -> list[tuple[int, int]]:
  """(lanes, slots of each) that programs are compiled for, largest first."""
  least = min(1 if pool else _LEAST_SLOTS, slots)
  if lanes == 1:
    return [(1, s) for s in _numbers(slots, least, _MOST, 4 if pool else 2)]
  own = _numbers(slots, least, 3, 4)
  several = _numbers(lanes, 1, 3, 4)[:-1]
  grid = [(n, s) for n in several for s in own[:2]] + [(1, s) for s in own]
  return sorted(grid, key=lambda size: size[0] * size[1], reverse=True)


def shrunk(
  full: ProgramSpec, now: ProgramSpec, progress: DecodeProgress
) -> ProgramSpec:
  """`now` with fewer lanes or slots, if no rollout waits and many are idle."""
  # A single page has 64 columns or fewer: compiling would take longer than the
  # steps that are left.
  if progress.waiting or now.pages == 1:
    return now
  fits = now.lanes, now.slots
  for lanes, slots in sizes(full.lanes, full.slots, pool=bool(full.blocks)):
    if (
      progress.lanes <= lanes <= fits[0] and progress.slots <= slots <= fits[1]
    ):
      fits = lanes, slots
  return dataclasses.replace(now, lanes=fits[0], slots=fits[1])


def _numbers(most: int, least: int, count: int, ratio: int) -> list[int]:
  """At most `count` numbers from `most` to `least` in equal ratios.

  The ratio is about `ratio`, or more if that would be too many numbers; above 8
  they are rounded up to multiples of 4.
  """
  if most == least:
    return [least]
  steps = min(math.ceil(math.log(most / least, ratio)), count - 1)
  exact = [most * (least / most) ** (i / steps) for i in range(1, steps)]
  up = [math.ceil(n - 1e-9) for n in exact]
  return [most, *(n + (-n % 4 if n > 8 else 0) for n in up), least]
