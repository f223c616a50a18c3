"""The numbers of the results: at equal CPU-seconds, rollouts and progress.

Intervals are of 95 %, by a bootstrap that draws seeds and prompts again: the
prompts are the same in every arm, so that differences are paired.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.wall.arms import ARMS, DEAD, UNITS

DRAWS = 2000  # of the bootstrap
Results = Mapping[str, Mapping[str, Any]]  # by arm and seed
MEASURES = {
  "pass_at_1": lambda p: p,
  "dead": lambda p: p < DEAD,
  "best_at_256": lambda p: 1.0 - (1.0 - p) ** 256,
}


def prompts(
  runs: Mapping[str, Any],
  measure: str,
  by: str,
  at: float,
  side: str = "trained",
) -> np.ndarray:
  """[seeds, P]: a measure of every prompt when a run has spent `at` of "busy_s"
  or "samples". Between two checkpoints on a line; after the last as there.
  """
  rows = []
  for run in runs.values():
    of = MEASURES[measure](np.array(run["p"][side]) / UNITS) * 1.0
    x = float(np.interp(at, run["points"][by], np.arange(len(of))))
    low, part = int(x), x % 1
    rows.append((1 - part) * of[low] + part * of[math.ceil(x)])
  return np.array(rows)


def drawn(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
  """How often each seed and each prompt is drawn, as shares, [DRAWS, ...]. The
  same for every arm of a shape, and so for pairs of them.
  """
  rng = np.random.default_rng(0)
  share = lambda n: rng.multinomial(n, np.full(n, 1 / n), size=DRAWS) / n
  return share(shape[0]), share(shape[1])


def interval(values: np.ndarray) -> dict[str, float]:
  """Mean and interval of [seeds, P]."""
  seeds, some = drawn(values.shape)
  means = ((seeds @ values) * some).sum(axis=1)
  low, high = np.percentile(means, [2.5, 97.5])
  return {"mean": values.mean(), "low": low, "high": high}


def end(results: Results, names: Sequence[str], by: str) -> float:
  """The most that all of these arms have spent, by the mean of their runs.

  A run that ended before counts with its end: the same work took up to a sixth
  more or less time.
  """
  last = lambda runs: np.mean([run["points"][by][-1] for run in runs.values()])
  return float(min(last(results[name]) for name in names))


def at_equal(
  results: Results, names: Sequence[str], by: str, at: float
) -> dict[str, dict[str, Any]]:
  """Every arm when it has spent `at` of "busy_s" or of "samples"."""
  out: dict[str, dict[str, Any]] = {}
  other = {"busy_s": "samples", "samples": "busy_s"}[by]
  for name in names:
    runs = results[name]
    out[name] = {k: interval(prompts(runs, k, by, at)) for k in MEASURES}
    twins = prompts(runs, "pass_at_1", by, at, "heldout")
    spent = [
      np.interp(at, run["points"][by], run["points"][other])
      for run in runs.values()
    ]
    out[name] |= {"heldout": interval(twins), other: float(np.mean(spent))}
    out[name]["seeds"] = len(runs)
  return out


def difference(
  results: Results, first: str, other: str, at: float, measure: str
) -> dict[str, float]:
  """The first arm minus the other at equal CPU-seconds, paired by prompt."""
  both = first, other
  one, two = (prompts(results[x], measure, "busy_s", at) for x in both)
  n = min(len(one), len(two))
  return interval(one[:n] - two[:n])


def at_progress(runs: Mapping[str, Any], level: float) -> dict[str, Any] | None:
  """When pass@1 first reaches a level: the mean over seeds of all points, and
  half the width of their interval (t). Of the runs that reach it; None if none.
  """
  found: dict[str, list[float]] = {}
  for run in runs.values():
    points = run["points"]
    above = np.flatnonzero(np.array(points["pass_at_1"]) >= level)
    if not len(above) or above[0] == 0:
      continue
    i = above[0]
    a, b = points["pass_at_1"][i - 1 : i + 1]
    part = (level - a) / (b - a)
    for name in ("dead", "best_at_256", "heldout", "samples", "busy_s"):
      x, y = points[name][i - 1 : i + 1]
      found.setdefault(name, []).append((1 - part) * x + part * y)
  if not found:
    return None
  return {k: spread(v) for k, v in found.items()} | {
    "seeds": len(found["dead"])
  }


def came_back(results: Results) -> tuple[int, int]:
  """Prompts dead half-way through a run, and those of them above .01 at its
  end; of all runs of `ARMS`.
  """
  dead = back = 0
  for name in ARMS.keys() & results.keys():
    for run in results[name].values():
      p = np.array(run["p"]["trained"]) / UNITS
      lost = p[len(p) // 2] < DEAD
      dead, back = dead + lost.sum(), back + (lost & (p[-1] > 0.01)).sum()
  return int(dead), int(back)


def spread(values: Sequence[float]) -> dict[str, float]:
  """Mean and half the width of its interval over seeds; 0 for one seed."""
  import scipy.stats  # takes a second

  n, half = len(values), 0.0
  if n > 1:
    half = scipy.stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5
  return {"mean": float(np.mean(values)), "half": float(half)}


def slope(results: Results, kind: str) -> dict[str, Any] | None:
  """b of dead = a - b log2 N at the ends of runs, by least squares over means,
  and its interval when seeds are drawn again.
  """
  runs = {
    arm.n: [run["points"]["dead"][-1] for run in results[name].values()]
    for name, arm in ARMS.items()
    if (arm.kind, arm.samples, arm.task, arm.widen) == (kind, 2048, "own", 0)
    and name in results
    and "rate" not in name
  }
  if len(runs) < 2:
    return None
  x = np.log2(np.array([*runs], float))
  fit = lambda y: -float(np.polyfit(x, y, 1)[0])
  rng = np.random.default_rng(0)
  again = [
    fit([np.mean(rng.choice(dead, len(dead))) for dead in runs.values()])
    for _ in range(DRAWS)
  ]
  low, high = np.percentile(again, [2.5, 97.5])
  mean = fit([np.mean(dead) for dead in runs.values()])
  return {"mean": mean, "low": low, "high": high, "n": [*runs]}
