"""What is said of where runs are compared, and of runs that are not."""

from collections.abc import Mapping
from typing import Any

from brorl_jax.report.cells import Number, Part


def reached(data: Mapping[str, Any]) -> list[Part]:
  """Where the runs are compared."""
  parts: list[Part] = []
  for i, one in enumerate(data["comparisons"]):
    if one["key"] is not None:
      parts += ["; " if parts else " Compared are last evaluations by "]
      parts += [*_amount(data, i, ("comparisons", i, "reach"))]
      parts += [f" ({one['at']})"]
  if not parts:
    return []
  out: list[Part] = [*parts, ", which all runs reached."]
  for one in data["comparisons"]:
    early = too_early(data, one["at"])
    out += (
      [f" At {one['at']} ", *early, " and is not compared."] if early else []
    )
  return out


def too_early(data: Mapping[str, Any], at: str) -> list[Part]:
  """Which runs have no evaluation near where all are compared, if any."""
  parts: list[Part] = []
  for i, one in enumerate(data["comparisons"]):
    for which in one["chosen"]:
      if one["at"] == at and which["run"] in one["early"]:
        place = ("runs", which["run"], "evaluations", which["evaluation"])
        name = data["runs"][which["run"]]["name"]
        parts += [" and " if parts else "", f"{name} was last evaluated after "]
        parts += _amount(data, i, (*place, one["key"]))
  return parts


def _amount(
  data: Mapping[str, Any], i: int, path: tuple[str | int, ...]
) -> list[Part]:
  """What had been spent, in the unit of comparison i."""
  key = data["comparisons"][i]["key"]
  units = {"net_hours": "hours", "cpu_hours": "CPU-hours"}
  kind = "count" if key == "samples" else "hours"
  return [Number(path, kind), f" {units.get(key, key)}"]
