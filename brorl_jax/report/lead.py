"""The first table of the page: the results of the runs."""

import functools
from collections.abc import Mapping
from typing import Any

from brorl_jax.report import cells
from brorl_jax.report.cells import Cell, Number, Part, Table
from brorl_jax.report.tables import reached, score


def table(data: Mapping[str, Any]) -> Table:
  """Results at equal time and at the end of the runs, with tests."""
  first, *others = data["runs"]
  # Other tables have the other points.
  places = [data["comparisons"][0]["at"], "end"]
  head, columns = ["run", "start, %"], []
  for at in dict.fromkeys(places):
    head += [f"at {'the end' if at == 'end' else at}, %"]
    columns += [functools.partial(_reached, data, at)]
    if others:
      head += [f"minus {first['name']}"]
      columns += [functools.partial(_gained, data, at)]
  rows = [
    [run["name"], _start(data, i), *(column(i) for column in columns)]
    for i, run in enumerate(data["runs"])
  ]
  caption: list[Part] = [
    "Pass@1, the mean over all held-out prompts, with 95 % bootstrap intervals "
    "over prompts.",
  ]
  if others:
    errors = "clustered by task" if _clustered(data) else "plain"
    caption += [
      f" Differences are paired over prompts; p is two-sided, {errors}; below "
      ".05 we call a difference significant. There is one run each: the "
      "variation between seeds is not included.",
      *reached(data),
    ]
  return Table("Result", caption, head, rows, 1)


def _chosen(data: Mapping[str, Any], at: str, run: int) -> tuple | None:
  """Path of the evaluation of a run at a point of comparison."""
  for comparison in data["comparisons"]:
    for which in comparison["chosen"] if comparison["at"] == at else ():
      if which["run"] == run and run not in comparison["early"]:
        return ("runs", run, "evaluations", which["evaluation"])
  return None


def _start(data: Mapping[str, Any], run: int) -> Cell:
  if data["runs"][run]["evaluations"][0]["step"] != 0:
    return ""
  return score(data, ("runs", run, "evaluations", 0, "summary", "all"))


def _reached(data: Mapping[str, Any], at: str, run: int) -> Cell:
  """The score of a run at a point of comparison, and its step."""
  path = _chosen(data, at, run)
  if path is None:
    return "too early" if data["runs"][run]["training"] else ""
  cell = score(data, (*path, "summary", "all"))
  if cells.value((*path, "step"), data) is None:
    return cell
  parts = [cell] if isinstance(cell, Number) else [*cell]
  return [*parts, "\nstep ", Number((*path, "step"), "count")]


def _gained(data: Mapping[str, Any], at: str, run: int) -> Cell:
  """The difference to the first run at a point, and the test."""
  for i, test in enumerate(data["tests"]):
    if test["at"] == at and test["other"]["run"] == run:
      how = "plain" if test["by_task"] is None else "by_task"
      gain: list[Part] = [Number(("tests", i, "difference"), "signed")]
      if test["difference"] == test["plain"]["standard_error"] == 0.0:
        return [*gain, "\nequal for every prompt"]
      return [*gain, "\np ", Number(("tests", i, how, "p_two_sided"), "p")]
  return ""


def _clustered(data: Mapping[str, Any]) -> bool:
  return any(one["by_task"] is not None for one in data["tests"])
