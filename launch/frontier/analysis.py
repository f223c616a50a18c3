"""What the results say: reward by budget for each N, and which N is the best.

A cell is one N of a question; its result at a budget C has the rate that was
the best for C with the tuning seed, and is a mean over other seeds. pass@1 is
exact, of the prompts that are trained on.
"""

import copy
import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from launch.frontier import arms
from launch.frontier.arms import Arm, reaches

DRAWS = 2000  # of the bootstrap
BINS = (0.0, arms.LOST, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)  # of the histogram of p
Results = Mapping[float, Mapping[str, Any]]  # by the power of the rate


def question_of(arm: Arm) -> str:
  """What all N of a comparison share."""
  end = "-decayed" if arm.decayed else ""
  return (
    f"{arm.task}-{arm.pool}-{arm.advantage}-{arm.samples}-{arm.recipe}{end}"
  )


def at(result: Mapping[str, Any], budget: float, metric: str) -> float:
  """Of one run when it has generated `budget` rollouts."""
  points = result["points"]
  return float(np.interp(budget, points["samples"], points[metric]))


def by_power(results: pathlib.Path, cell: Arm, seed: int) -> dict[float, Any]:
  """Runs of a cell with one seed."""
  out = {}
  for power in np.arange(-20.0, 0.0, 0.5):
    arm = dataclasses.replace(cell, power=float(power), seed=seed)
    if (found := arms.read(results / f"{arm.name}.json")) is not None:
      out[power] = found
  return out


def best_power(found: Results, budget: int) -> tuple[float | None, set[float]]:
  """The best rate for a budget, and its neighbours that were not tried.

  The rate is None if nothing was run so far.
  """
  score = {
    power: at(result, budget, "pass_at_1")
    for power, result in found.items()
    if reaches(result, budget)
  }
  if not score:
    return None, set()
  top = max(score, key=score.__getitem__)
  return top, {top - 1, top + 1} - set(score)


class Cell:
  """One N of a question: its runs at the best rate of each budget."""

  def __init__(self, results: pathlib.Path, arm: Arm, seeds: Iterable[int]):
    self.arm = arm
    self.tuning = by_power(results, arm, arms.TUNING_SEED)
    self.runs = {seed: by_power(results, arm, seed) for seed in seeds}

  def power(self, budget: int) -> float | None:
    """Of the best rate; None if it is not between two that were tried."""
    top, missing = best_power(self.tuning, budget)
    return None if missing else top

  def at(self, budget: int) -> list[Mapping[str, Any]]:
    """The run of each seed that has reached the budget at its rate."""
    power = self.power(budget)
    if power is None:
      return []
    found = [runs.get(power) for runs in self.runs.values()]
    return [r for r in found if r is not None and reaches(r, budget)]

  def values(self, budget: int, metric: str) -> list[float]:
    return [at(r, budget, metric) for r in self.at(budget)]

  def only(self, seeds: Collection[int]) -> "Cell":
    """The same with some of its seeds."""
    part = copy.copy(self)
    part.runs = {s: r for s, r in self.runs.items() if s in seeds}
    return part

  def prompts(self, budget: int, side: str) -> np.ndarray:
    """[seeds, prompts], p at a budget; no row without a seed.

    Between two checkpoints on a line, as `values` are.
    """
    rows = []
    for run in self.at(budget):
      kept = run["prompts"]
      p = np.array(kept[side]) / arms.UNITS
      at = np.interp(budget, kept["samples"], np.arange(len(p)))
      before, part = int(at), at % 1
      rows.append((1 - part) * p[before] + part * p[math.ceil(at)])
    return np.array(rows)


def best_n(
  groups: Mapping[int, np.ndarray], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Any]:
  """Which N has the highest mean, with what certainty.

  A bootstrap: prompts are drawn again, the same ones for each N, and seeds are
  drawn again for each N.

  Args:
    groups: [seeds, prompts] by N.
    draws: Of the bootstrap.
    seed: Of its random numbers.

  Returns:
    n: the best on all data; low, high: the 2.5th and 97.5th percentile of the
    best one; share: of the draws in which each N is the best.
  """
  rng = np.random.default_rng(seed)
  ns = sorted(groups)
  # How often each one is drawn, as a share; then a draw is a weighted mean.
  drawn = lambda count: (
    rng.multinomial(count, np.full(count, 1 / count), size=draws) / count
  )
  prompts = drawn(groups[ns[0]].shape[1])
  means = np.stack(
    [((drawn(len(groups[n])) @ groups[n]) * prompts).sum(axis=1) for n in ns],
    axis=1,
  )
  won = np.array(ns)[means.argmax(axis=1)]
  low, high = np.percentile(won, [2.5, 97.5], method="closest_observation")
  return {
    "n": max(ns, key=lambda n: groups[n].mean()),
    "low": int(low),
    "high": int(high),
    "share": {str(n): float((won == n).mean()) for n in ns},
  }


def extrapolated(
  budgets: Sequence[int], values: Sequence[float], target: int
) -> float:
  """log(p / (1 - p)) on a line over log C, through the last three budgets."""
  x = np.log2(np.array(budgets[-3:], float))
  p = np.clip(np.array(values[-3:]), 1e-6, 1 - 1e-6)
  slope, level = np.polyfit(x, np.log(p / (1 - p)), 1)
  return float(1 / (1 + np.exp(-(slope * np.log2(target) + level))))


def budgets(task: str, doubled: int) -> list[int]:
  """The smallest budget of a task and its doubles."""
  return [arms.LEAST[task] * 2**k for k in range(doubled + 1)]


def predicted(cells: Sequence[Cell], target: int) -> dict[str, Any] | None:
  """pass@1 and the best N at a budget from those below it.

  None if a cell has fewer than two budgets, or any has reached the target.
  """
  values = {}
  for cell in cells:
    below = [b for b in budgets(cell.arm.task, 20) if b < target]
    if any(reaches(r, target) for r in cell.tuning.values()):
      return None
    known = {
      b: float(np.mean(v)) for b in below if (v := cell.values(b, "pass_at_1"))
    }
    if len(known) < 2:
      return None
    values[str(cell.arm.n)] = extrapolated([*known], [*known.values()], target)
  return {"pass_at_1": values, "n": max(values, key=values.__getitem__)}


def histogram(p: np.ndarray, lost: float) -> list[float]:
  """Share of the prompts in each of BINS, the last one closed.

  Args:
    p: [seeds, prompts], to four places: too coarse for the first bin.
    lost: Share of the prompts with p < LOST, which is the first bin.
  """
  count, _ = np.histogram(p, BINS)
  share = (count / p.size).tolist()
  return [lost, max(share[0] + share[1] - lost, 0.0), *share[2:]]
