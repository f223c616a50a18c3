"""Running arms within the hours of the experiment, and choosing their rates."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launch.frontier import analysis, arms, machine
from launch.frontier.arms import Arm
from launch.frontier.machine import say

MOST_RATES = 8  # of a cell


class OutOfTime(Exception):
  """The hours of the experiment are spent."""


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Where it runs, how large, and until when (time.monotonic())."""

  root: pathlib.Path
  results: pathlib.Path
  scale: int
  lanes: machine.Machine
  deadline: float

  def each(self, some: Iterable[Arm]) -> None:
    """Runs what has no result yet, on as many lanes as there are."""
    self.lanes.each(self.run, list(some))

  def run(self, arm: Arm, cores: set[int] | None = None) -> dict[str, Any]:
    """The result of an arm; raises OutOfTime instead of a new run."""
    path = self.results / f"{arm.name}.json"
    found = arms.read(path)
    if found is not None and arms.reaches(found, arm.budget):
      return found
    if time.monotonic() > self.deadline:
      raise OutOfTime
    begin = time.monotonic()
    found = arms.run(
      arm,
      cores or os.sched_getaffinity(0),
      root=self.root,
      path=path,
      scale=self.scale,
    )
    rate, took = found["points"]["pass_at_1"][-1], time.monotonic() - begin
    say(f"{arm.name}, {arm.budget:,}: {rate:.3f} ({took:.0f} s)")
    return found


def tune(
  e: Experiment,
  cells: Sequence[Arm],
  budgets: Callable[[Arm], Sequence[int]],
  grid: Callable[[Arm], Sequence[float]],
) -> dict[Arm, dict[int, float]]:
  """For each cell the power of the best rate by budget.

  The best rate must be between two that were tried: the grid is extended. A
  budget for which MOST_RATES did not suffice has none.

  Args:
    e: The experiment.
    cells: Arms without rate and seed.
    budgets: Of a cell, ascending.
    grid: Powers of 2 that are tried first.
  """
  tried = lambda c: analysis.by_power(e.results, c, arms.TUNING_SEED)
  known = {c: tried(c) for c in cells}
  wanted = {
    (c, power): budgets(c)[-1]
    for c in cells
    for power in grid(c)
    if power not in known[c]
  }
  while True:
    e.each(
      dataclasses.replace(c, power=p, seed=arms.TUNING_SEED, budget=b)
      for (c, p), b in wanted.items()
    )
    wanted, best = {}, {}
    for cell in cells:
      found, best[cell], top = tried(cell), {}, 0.0
      for budget in budgets(cell):
        before, (power, missing) = top, analysis.best_power(found, budget)
        if power is None:  # the double of what was run: begin near its rate
          wanted |= {(cell, before + d): budget for d in (-1, 0, 1)}
          break
        top = power
        if not missing:
          best[cell][budget] = power
        elif len(found) < MOST_RATES:
          wanted |= {(cell, near): budget for near in missing}
    if not wanted:
      return best


def last_use(best: Mapping[int, float]) -> dict[float, int]:
  """The largest budget for which each rate is the best."""
  return {power: budget for budget, power in sorted(best.items())}
