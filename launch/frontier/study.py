"""The results as the numbers of the page, all of them in one JSON."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.frontier import analysis, arms, plateau, problems, run
from launch.frontier.analysis import Cell

SEEDS = tuple(range(5))
SETS = {"even": SEEDS[::2], "odd": SEEDS[1::2]}  # seeds, to see it twice
# Rollouts of a 1.5B policy per device and hour, of at most 15,360 tokens, with
# the update: bounds by the roofline, from "On the paper's machines" in
# brorl_jax/rollout/README.md.
PER_DEVICE_HOUR = {
  "H100, 8 of them": 18_385 / 8,
  "H100, 64 of them": 140_271 / 64,
  "TPU v5p, 8 chips": 12_700 / 8,
  "TPU v6e, 16 chips": 18_150 / 16,
}
METRICS = (
  "pass_at_1", "heldout", "worst_at_4", "best_at_4", "best_at_256", "distinct",
  "lost", "won", "busy_s",
)  # fmt: skip


def numbers(results: pathlib.Path) -> dict[str, Any]:
  """All that there is so far; ends with a line if that answers nothing."""
  found: dict[run.Question, dict[str, Any]] = {}
  for q, doubled in run.questions():  # the largest budget first
    if q not in found and (one := question(results, q, doubled))["budgets"]:
      found[q] = one
  test = plateau.numbers(results)
  if not found and not test["arms"]:
    raise SystemExit(
      f"error: {results} answers no question yet, for one wants all of its N: "
      "run bash launch/frontier.sh, which resumes"
    )
  return {
    "questions": [*found.values()],
    "plateau": test,
    "cost": cost(results),
  }


def question(
  results: pathlib.Path, q: run.Question, doubled: int
) -> dict[str, Any]:
  """One comparison of N, at the budgets that all of its N have reached."""
  cells = [Cell(results, cell, SEEDS) for cell in q.cells(doubled)]
  name = analysis.question_of(cells[0].arm)
  every = analysis.budgets(q.task, doubled)
  told = [
    at_budget(cells, b, None if q.decayed else predicted(results, name, k))
    for k, b in enumerate(every)
    if b in q.budgets(doubled) and all(c.at(b) for c in cells)
  ]
  return {
    "name": name,
    "task": q.task,
    "pool": q.pool,
    "advantage": q.advantage,
    "samples": q.samples,
    "recipe": q.recipe,
    "decayed": q.decayed,
    "ns": list(map(str, q.ns)),
    "start": start(cells),
    "budgets": told,
    "curves": [
      curve(c, every[-1:] if q.decayed else analysis.budgets(q.task, 12))
      for c in cells
    ],
    "edges": [
      {"n": str(c.arm.n), "budget": b}
      for c in cells
      for b in q.budgets(doubled)
      if analysis.best_power(c.tuning, b)[0] is not None and c.power(b) is None
    ],
  }


def start(cells: Sequence[Cell]) -> dict[str, float] | None:
  """Before any training; None if nothing was run."""
  for cell in cells:
    for one in cell.tuning.values():
      return {k: one["points"][k][0] for k in ("pass_at_1", "best_at_256")}
  return None


def at_budget(
  cells: Sequence[Cell], budget: int, foretold: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Every N at one budget, and which is the best."""
  classes, _ = problems.POOLS.get(cells[0].arm.pool, (("puzzles",), 1))
  fixed = [c for c in cells if c.arm.n != "adaptive"]
  groups = {int(c.arm.n): c.prompts(budget, "train") for c in fixed}
  of_set = {
    name: {int(c.arm.n): c.only(seeds).prompts(budget, "train") for c in fixed}
    for name, seeds in SETS.items()
  }
  fewest = min(len(c.at(budget)) for c in cells)
  return {
    "budget": budget,
    "seeds": fewest,
    "cells": [_cell(c, budget, classes) for c in cells],
    "best": analysis.best_n(groups),
    "best_worst_at_4": analysis.best_n({n: p**4 for n, p in groups.items()}),
    "best_best_at_4": analysis.best_n(
      {n: 1 - (1 - p) ** 4 for n, p in groups.items()}
    ),
    "sets": {
      name: analysis.best_n(some)
      for name, some in of_set.items()
      if all(len(rows) for rows in some.values())
    },
    "foretold": foretold,
  }


def _cell(cell: Cell, budget: int, classes: Sequence[str]) -> dict[str, Any]:
  power = cell.power(budget)
  assert power is not None
  out: dict[str, Any] = {
    "n": str(cell.arm.n),
    "power": power,
    "rate": 2.0**power,
    "seeds": len(cell.at(budget)),
  }
  for name in METRICS:
    values = cell.values(budget, name)
    out[name] = {
      "mean": float(np.mean(values)),
      "low": float(min(values)),
      "high": float(max(values)),
    }
  p = cell.prompts(budget, "train")
  out["histogram"] = analysis.histogram(p, out["lost"]["mean"])
  # As many prompts of each class, one class after the other.
  parts = np.split(p, len(classes), axis=1)
  out["classes"] = {
    name: float(part.mean()) for name, part in zip(classes, parts, strict=True)
  }
  return out


def curve(cell: Cell, every: Sequence[int]) -> dict[str, Any]:
  """By budget, at the best rate of each; over seeds."""
  budgets = [b for b in every if cell.at(b)]
  out: dict[str, Any] = {"n": str(cell.arm.n), "budget": budgets}
  for name in ("pass_at_1", "best_at_256", "busy_s"):
    values = [cell.values(b, name) for b in budgets]
    out[name] = {
      "mean": [float(np.mean(v)) for v in values],
      "low": [min(v) for v in values],
      "high": [max(v) for v in values],
    }
  return out


def predicted(
  results: pathlib.Path, name: str, doubled: int
) -> dict[str, Any] | None:
  """What was written down before this budget was run."""
  known = arms.read(results / "predictions" / f"frontier-{doubled}.json") or {}
  return known.get(name)


def cost(results: pathlib.Path) -> dict[str, Any]:
  """Of all runs, the tuning included, and of as many of a 1.5B policy."""
  every = [arms.read(path) or {} for path in sorted(results.glob("*.json"))]
  runs = [one for one in every if "points" in one]
  rollouts = sum(one["points"]["samples"][-1] for one in runs)
  hours = dict.fromkeys(sorted(one["machine"] for one in runs), 0.0)
  for one in runs:
    hours[one["machine"]] += one["points"]["busy_s"][-1] / 3600.0
  return {
    "runs": len(runs),
    "rollouts": rollouts,
    "machines": [{"name": k, "hours": v} for k, v in hours.items()],
    "devices": [
      {"rollouts_per_hour": rate, "hours": rollouts / rate}
      for rate in PER_DEVICE_HOUR.values()
    ],
  }
