"""Sentences about where runs are compared and which runs are left out."""

from collections.abc import Mapping
from typing import Any

from brorl_jax.report.cells import Number, Part


def reached(data: Mapping[str, Any]) -> list[Part]:
  """The sentence that names the points of comparison."""
  parts: list[Part] = []
  for i, comparison in enumerate(data["comparisons"]):
    if comparison["key"] is not None:
      parts += ["; " if parts else " Compared are last evaluations by "]
      parts += [*_amount(data, i, ("comparisons", i, "reach"))]
      parts += [f" ({comparison['at']})"]
  if not parts:
    return []
  out: list[Part] = [*parts, ", which all runs reached."]
  for comparison in data["comparisons"]:
    early = too_early(data, comparison["at"])
    out += (
      [f" At {comparison['at']} ", *early, " and is not compared."]
      if early
      else []
    )
  return out


def too_early(data: Mapping[str, Any], at: str) -> list[Part]:
  """The runs without an evaluation near a point of comparison."""
  parts: list[Part] = []
  for i, comparison in enumerate(data["comparisons"]):
    for which in comparison["chosen"]:
      if comparison["at"] == at and which["run"] in comparison["early"]:
        place = ("runs", which["run"], "evaluations", which["evaluation"])
        name = data["runs"][which["run"]]["name"]
        parts += [" and " if parts else "", f"{name} was last evaluated after "]
        parts += _amount(data, i, (*place, comparison["key"]))
  return parts


def _amount(
  data: Mapping[str, Any], i: int, path: tuple[str | int, ...]
) -> list[Part]:
  """A cost, in the unit of comparison i."""
  key = data["comparisons"][i]["key"]
  units = {"net_hours": "", "cpu_hours": " of the processor"}
  kind = "count" if key == "samples" else "time"
  return [Number(path, kind), units.get(key, f" {key}")]
