"""Runs and their evaluations -> the paper's tables, beside published numbers.

Scores are in percent, means over samples: of a program the share of tests that
pass. "strict" is pass@1. An evaluation belongs to the run that it names.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.errors import UserError
from brorl_jax.report import compare, stats
from brorl_jax.report.load_runs import Json, LoadedRun
from brorl_jax.verdicts.base import MADE

Scores = Mapping[str, tuple[np.ndarray, ...]]  # task -> the same prompts twice


class Arm(NamedTuple):
  """A policy: a step of a run, or a model."""

  name: str
  run: LoadedRun | None  # that trained it, if its folder was given
  step: int | None
  ends: Sequence[LoadedRun]  # its evaluations
  starts: Sequence[LoadedRun]  # those of the model that the run began with


def arms(runs: Sequence[LoadedRun]) -> list[Arm]:
  """The policies, in the order in which the folders name them."""
  place = lambda path: str(pathlib.Path(path).resolve())
  trained = {place(r.folder): r for r in runs if r.evaluated is None}
  found = collections.defaultdict[str, dict[Any, list[LoadedRun]]](dict)
  for run in runs:
    policy = run.about.get("evaluated") or {"run": run.folder}
    by_step = found[place(policy["run"] or policy["source"])]
    if run.evaluated is not None:
      by_step.setdefault(policy["step"], []).append(run)
  out = []
  for where, by_step in [*found.items()]:
    run, starts = trained.get(where), []
    if run:
      by_step = by_step or {run.evaluations[-1].step: []}
      starts = found[place(run.about.get("began_with", "."))].get(None, [])
    for step, ends in sorted(by_step.items(), key=lambda x: x[0] or 0):
      name = f"{run.name if run else pathlib.Path(where).name}, step {step}"
      if step is None:
        name = ends[0].config.get("policy.checkpoint") or "the embedded policy"
      out.append(Arm(name, run, step, ends, starts))
  return out


def sharing(runs: Sequence[LoadedRun], one: LoadedRun) -> list[LoadedRun]:
  """The evaluations that have a task of this one."""
  tasks = {*one.prompts.values()} if one.evaluated else {()}
  return [x for x in runs if x.evaluated and tasks & {*x.prompts.values()}]


def numbers(runs: Sequence[LoadedRun]) -> dict[str, Any]:
  """All, as JSON. Raises UserError if a policy was measured twice on a task."""
  every, file = arms(runs), pathlib.Path(__file__).with_name("published.json")
  published = json.loads(file.read_text())
  rows = [_row(arm, published["families"]) for arm in every]
  return published | {
    "rows": rows + [{**x, "published": True} for x in published["rows"]],
    "pairs": [_pair(every[0], arm) for arm in every[1:]],
    "paper": compare.PAPER,
  }


def _row(arm: Arm, families: Mapping[str, Sequence[str]]) -> dict[str, Any]:
  out: dict[str, Any] = {"name": arm.name, "tasks": {}, "means": {}}
  out["source"] = ", ".join(run.folder for run in arm.ends)
  if (run := arm.run) and arm.step is not None:
    if arm.step > len(run.metrics):
      has = f"{run.folder} has {len(run.metrics)} steps"
      other = f"{arm.ends[0].folder} evaluated step {arm.step} of it"
      raise UserError(f"{has}, but {other}; leave one of them out")
    # As if the run had ended, and was measured, at this step.
    last, metrics = run.evaluations[0], run.metrics[: arm.step]
    last = last._replace(step=arm.step)
    run = dataclasses.replace(run, metrics=metrics, evaluations=[last])
    told, kinds = compare.summary(run), _devices(run.about)
    spent, speed = told["evaluations"][0], told["throughput"] or {}
    out |= {k: told[k] for k in ("n", "prompts_per_step", "steps")}
    out |= {"samples": spent["samples"], "hours": spent["net_hours"]}
    out |= {"devices": kinds, "pass_rate": speed.get("pass_rate")}
    out["device_hours"] = sum(kinds.values()) * out["hours"] if kinds else None
    out["samples_per_s"] = speed.get("generated_per_generation_s")
  for run in arm.ends:
    for domain, x in run.evaluations[-1].summary["by_domain"].items():
      for task, one in x["by_task"].items():
        if (name := f"{domain}/{task}") in out["tasks"]:
          what = f"{run.folder} measured {arm.name} on {name}"
          must = "leave one of them out"
          raise UserError(f"{what}, as another folder did; {must}")
        scores = 100 * one["mean_score"], 100 * one["pass_at_k"]["1"]
        out["tasks"][name] = {"score": scores[0], "strict": scores[1]}
        out["tasks"][name] |= {"tokens": one["tokens_mean"]}
  gym = [x.partition("/")[2] for x in out["tasks"] if x.startswith(f"{MADE}/")]
  for family, of in {**families, MADE: gym}.items():  # gym: of 96
    some = [x for t in of if (x := out["tasks"].get(f"{family}/{t}"))]
    if some:
      mean = {k: float(np.mean([x[k] for x in some])) for k in some[0]}
      mean |= {"tasks": len(some), "of": 96 if of is gym else len(of)}
      out["means"][family] = mean
  return out


def _devices(about: Json) -> Mapping[str, int]:
  """The number of each kind; none if starts of the run had other ones."""
  starts = [about, *about.get("earlier", ())]
  first, *others = ((x.get("machine") or {}).get("devices") for x in starts)
  return first if first and all(x == first for x in others) else {}


def _scores(ends: Sequence[LoadedRun], starts: Sequence[LoadedRun]) -> Scores:
  """Scores of the prompts that both have, by task."""
  found = collections.defaultdict[str, list[tuple[float, float]]](list)
  for one, two in itertools.product(ends, starts):
    a, b = one.evaluations[-1].scores, two.evaluations[-1].scores
    # Another seed has other puzzles with the same ids.
    for name in a if one.puzzle_seed == two.puzzle_seed else ():
      if name in b:
        found["/".join(one.prompts[name])].append((a[name], b[name]))
  return {k: tuple(np.array(x).T) for k, x in found.items()}


def _pair(first: Arm, other: Arm) -> dict[str, Any]:
  """The second less the first, by task and over all prompts."""
  both = _scores(other.ends, first.ends)
  moved = [_moves(_scores(x.ends, x.starts)) for x in (first, other)]
  tasks, classes = {}, {}
  for task, (a, b) in both.items():
    tasks[task] = {"prompts": len(a), "difference": 100 * float((a - b).mean())}
    tasks[task] |= {"better": int((a > b).sum()), "worse": int((a < b).sum())}
    half = 100 * stats.mean_interval(a - b)[1] if len(a) > 1 else None
    tasks[task] |= {"half": half}
    if task in moved[0] and task in moved[1]:
      rose = sum(by_task[task] > 0 for by_task in moved)
      kind = ("neither rose", "one rose", "both rose")[rose]
      kind = "1 fell" if moved[0][task] < 0 else kind
      classes.setdefault(kind, []).append(task)
  a, b = (np.array([y for x in both.values() for y in x[i]]) for i in (0, 1))
  test = compare.paired(a, b, [task for task, x in both.items() for _ in x[0]])
  names = {"first": first.name, "other": other.name}
  return {**names, "tasks": tasks, "classes": classes, "test": test}


def _moves(scores: Scores) -> dict[str, int]:
  """1 for a task that rose by more than its 95 % interval, -1 if it fell."""
  several = {k: a - b for k, (a, b) in scores.items() if len(a) > 1}
  found = {k: stats.mean_interval(x) for k, x in several.items()}
  return {k: (x > half) - (x < -half) for k, (x, half) in found.items()}
