"""What happened to the runs: on the time axis of their scores, and as a table.

Lines of events.jsonl that differ only in numbers are one row, with their count.
"""

import collections
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import matplotlib.lines
import numpy as np
from matplotlib.transforms import offset_copy

from brorl_jax.report import cells
from brorl_jax.report.cells import Number, Table

_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SHAPES = 5  # rows of one kind; where there are more, all of it are one row
_LONGEST = 300  # characters of a text
# Which process it was; columns of their own.
_ASIDE = ("step", "time", "event", "why", "pid", "host")
# Kinds in the order of the legend: colour, dashes, marker. Others are grey.
_LOOKS = {
  "end": ("black", "-", "s"),
  "resume": ("tab:green", "-", ">"),
  "warning": ("tab:orange", "--", "^"),
  "guard": ("tab:red", "-", "v"),
  "skip": ("tab:purple", ":", "x"),
  "starved": ("tab:brown", ":", "+"),
  "unjudged": ("tab:olive", ":", "d"),
  "workers": ("tab:olive", "--", "D"),
  "reference reset": ("tab:blue", "-.", "o"),
  "phase": ("tab:cyan", "-", "P"),
  "config": ("tab:pink", "--", "*"),
  "back": ("tab:gray", "-", "<"),
}
_OTHER = ("0.6", ":", ".")
_LANE = 12.0  # points between the markers of two kinds
_PANEL, _AROUND = 1.6, 0.55  # inches of a plot, and of what is around it


def folded(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The rows of a table, by first occurrence.

  Args:
    events: Lines of events.jsonl in their order.
  """
  shape = lambda e: (e["event"], _NUMBER.sub("0", _what(e)))
  shapes = {shape(e) for e in events}
  per_kind = collections.Counter(kind for kind, _ in shapes)
  rows: dict[Any, dict[str, Any]] = {}
  for event in events:
    key = shape(event)
    key = key if per_kind[key[0]] <= _SHAPES else key[0]
    at = {"step": event["step"], "time": _time(event)}
    row = rows.setdefault(
      key, {"event": event["event"], "count": 0, "first": at}
    )
    row |= {"count": row["count"] + 1, "last": at, "what": _what(event)}
  return list(rows.values())


def marks(
  events: Sequence[Mapping[str, Any]], spent: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Where events are on the time axis; each kind once per step.

  Args:
    events: Lines of events.jsonl.
    spent: From `cost.spent`: what each step had cost. An event of a step that
      has not ended yet is at the last one.
  """
  last = max(spent)
  seen = dict.fromkeys((e["event"], min(e["step"], last)) for e in events)
  return [
    {"event": kind, "step": step, "net_hours": spent[max(step, 0)]["net_hours"]}
    for kind, step in seen
    if kind != "start"  # at the left edge of each run
  ]


def _time(event: Mapping[str, Any]) -> str:
  """The time to the second."""
  return f"{event['time'][:10]} {event['time'][11:19]}"


def _what(event: Mapping[str, Any]) -> str:
  """All that an event says, as one line."""
  parts = [str(event["why"])] if "why" in event else []
  for name, value in event.items():
    if name in _ASIDE or (name == "changed" and parts):
      continue
    if isinstance(value, dict):
      parts += [f"{k} = {v}" for k, v in value.items()]
    else:
      parts.append(f"{name}: {value}")
  text = "; ".join(" ".join(part.split()) for part in parts)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def table(data: Mapping[str, Any], number: int) -> Table:
  """The events of all runs."""
  rows = []
  for i, run in enumerate(data["runs"]):
    for j, one in enumerate(run["events"]):
      at = lambda *keys: ("runs", i, "events", j, *keys)
      both = lambda key, kind: [
        Number(at("first", key), kind),
        *(
          [" → ", Number(at("last", key), kind)]
          if one["first"][key] != one["last"][key]
          else []
        ),
      ]
      rows.append(
        [
          run["name"],
          one["event"],
          one["what"],
          Number(at("count"), "count"),
          both("step", "count"),
          both("time", "value"),
        ]
      )
  caption = (
    "Of events.jsonl. Events of one kind that differ only in numbers are one "
    "row, with the text of the last. Step: the last that had ended, or the one "
    "in progress. Time in UTC."
  )
  head = ["run", "event", "what", "count", "step", "time"]
  return Table(f"Table {number}. Events", caption, head, rows, 3)


def timeline(path: pathlib.Path, data: Mapping[str, Any], dpi: int) -> str:
  """Draws the score of each run with its events; returns the caption."""
  runs = [run for run in data["runs"] if run["marks"]]
  kinds = [_ranked(run["marks"]) for run in runs]
  lanes = _LANE / 72 * sum(map(len, kinds))  # 72 points are an inch
  height = len(runs) * (_PANEL + _AROUND) + lanes + _AROUND
  figure = matplotlib.figure.Figure((10.0, height), layout="constrained")
  axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
  latest = max(e["net_hours"] for run in runs for e in run["evaluations"])
  scale, unit = cells.time_unit(latest)
  for axis, run, own in zip(axes, runs, kinds, strict=True):
    x = np.array([e["net_hours"] * scale for e in run["evaluations"]])
    y = [
      100 * e["summary"]["all"]["pass_at_k"]["1"] for e in run["evaluations"]
    ]
    axis.plot(x, y, color="0.35", lw=1.5, marker="o", ms=3)
    for mark in run["marks"]:
      lane = len(own) - own.index(mark["event"])
      _draw(axis, mark["net_hours"] * scale, mark["event"], lane)
    axis.set(ylabel="pass@1, %")
    axis.grid(False, axis="x")
    name = run["name"].replace("$", r"\$")
    axis.set_title(name, loc="left", pad=_LANE * len(own) + 6)
  axes[-1].set_xlabel(unit)
  figure.legend(
    handles=[*map(_handle, _ranked([m for r in runs for m in r["marks"]]))],
    loc="outside lower center",
    ncols=7,
    frameon=False,
    handlelength=3,  # of the longest dashes
  )
  figure.savefig(path, dpi=dpi)
  return (
    "Pass@1 of all held-out prompts against the time of steps and saving, "
    "without compiling, with what happened: a line for each event, and above "
    "the plot a row of markers for each kind."
  )


def _ranked(marks: Sequence[Mapping[str, Any]]) -> list[str]:
  """Their kinds, in the order of the legend."""
  kinds = {mark["event"] for mark in marks}
  ranked = [*_LOOKS, *sorted(kinds - _LOOKS.keys())]
  return [kind for kind in ranked if kind in kinds]


def _draw(axis: Any, x: float, kind: str, lane: int) -> None:
  """A line across the plot, and a marker above it in the row of its kind."""
  color, dashes, marker = _LOOKS.get(kind, _OTHER)
  axis.axvline(x, color=color, ls=dashes, lw=1, alpha=0.7, zorder=1)
  above = offset_copy(
    axis.get_xaxis_transform(),
    axis.figure,
    y=_LANE * (lane - 0.5),
    units="points",
  )
  axis.plot(
    [x],
    [1.0],
    transform=above,
    color=color,
    marker=marker,
    ms=5,
    clip_on=False,
  )


def _handle(kind: str) -> matplotlib.lines.Line2D:
  color, dashes, marker = _LOOKS.get(kind, _OTHER)
  return matplotlib.lines.Line2D(
    [], [], color=color, ls=dashes, lw=1, marker=marker, ms=5, label=kind
  )
