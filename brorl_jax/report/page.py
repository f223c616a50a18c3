"""The numbers of `compare` -> one HTML page, by the template page.html.

The page needs no network, and a script only to show the values of points.
"""

import html
import json
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jinja2

from brorl_jax import evaluate
from brorl_jax.errors import printable
from brorl_jax.report import compare
from brorl_jax.report.load_runs import Json, Value

_WIDTH, _HEIGHT = 360, 210  # of a plot, in its own units
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 14, 350, 176  # of the area of its lines
_MOST_POINTS = 300  # of a line; of more, every k-th is drawn
_MOST_MARKS = 40  # events of a run on its curves
_FEW = 30  # points, which get dots
_MOST_LINES = 40  # rows of a table on a terminal
Axis = tuple[str, str, float]  # name, key in the JSON, factor


def number(x: Value, form: str = ",.0f") -> str:
  """A number in a format of Python's."""
  return "n/a" if x is None else f"{x:{form}}"


def percent(x: Value, digits: int = 1) -> str:
  """A fraction in percent, without the sign."""
  return "n/a" if x is None else f"{100 * x:.{digits}f}"


def short(x: Value) -> str:
  """Three digits that matter."""
  return number(x, ",.0f" if abs(x or 0) >= 100 else ".3g")


def time_unit(hours: float | int) -> tuple[float, str]:
  """Factor and name of a convenient unit for a time in hours."""
  for factor, unit in ((1.0, "h"), (60.0, "min")):
    if hours * factor >= 1.0:
      return factor, unit
  return 3600.0, "s"


def duration(hours: Value) -> str:
  """A time with its unit."""
  if hours is None:
    return "n/a"
  factor, unit = time_unit(hours)
  return f"{short(hours * factor)} {unit}"


def gain(result: Json) -> str:
  """The gain of an arm in points, with a 95 % interval over prompts."""
  mean = 100 * sum(result["gains"]) / len(result["gains"])
  half = result["gain_half"]
  return f"{mean:+.1f}" + ("" if half is None else f" ± {percent(half)}")


class Line(NamedTuple):
  """Points of a run on a plot."""

  name: str
  style: str  # CSS classes: colour and dashes
  points: Sequence[tuple[float, float]]
  dots: bool = True  # at each point
  band: Sequence[tuple[float, float, float]] = ()  # x, low, high
  marks: Sequence[tuple[float, str]] = ()  # x and what happened there


class Plot(NamedTuple):
  """Lines with two axes."""

  title: str
  x: str  # name and unit
  y: str  # unit
  lines: Sequence[Line]
  log2: bool = False  # the horizontal axis


def _ticks(low: float, high: float, most: int, whole: bool) -> list[float]:
  """Multiples of 1, 2 or 5 times a power of ten, in at most so many parts."""
  least = max((high - low) / most, float(whole))
  power = 10.0 ** math.floor(math.log10(least) + 1e-9)
  steps = (m * power for m in (1, 2, 5, 10))
  step = next(x for x in steps if x > least * (1 - 1e-9))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def drawing(plot: Plot) -> dict[str, Any]:
  """Where everything of a plot lies, for the template."""
  to_x = math.log2 if plot.log2 else float
  xs = [to_x(x) for line in plot.lines for x, _ in line.points]
  ys = [y for line in plot.lines for _, y in line.points]
  ys += [y for line in plot.lines for _, *ends in line.band for y in ends]
  x0, x1 = min(xs) if plot.log2 else min(0.0, *xs), max(xs)
  if x0 == x1:  # one point stands in the middle
    x0, x1 = x0 - 1.0, x1 + 1.0
  y0, y1 = min(0.0, *ys), max(0.0, *ys)
  room = 0.06 * (y1 - y0) or 1.0
  y0, y1 = y0 - room * (y0 < 0.0), y1 + room
  px = lambda x: round(_LEFT + (to_x(x) - x0) / (x1 - x0) * (_RIGHT - _LEFT), 1)
  py = lambda y: round(_BOTTOM - (y - y0) / (y1 - y0) * (_BOTTOM - _TOP), 1)
  path = lambda some: "M" + "L".join(f"{px(x)} {py(y)}" for x, y in some)
  if plot.log2:
    along = [2.0**i for i in range(math.ceil(x0), math.floor(x1) + 1)]
  else:
    along = _ticks(max(x0, 0.0), x1, 5, plot.x == "step")
  lines = []
  for line in plot.lines:
    last = len(line.points) - 1
    some = [*line.points[: last : -(-last // _MOST_POINTS) or 1]]
    some += line.points[-1:]
    ends = [(x, low) for x, low, _ in line.band]
    ends += [(x, top) for x, _, top in reversed(line.band)]
    # What the script shows: place, value on x, value on y or event.
    shown = [[px(x), py(y), f"{plot.x} {short(x)}", short(y)] for x, y in some]
    shown += [[px(x), _TOP, f"{plot.x} {short(x)}", e] for x, e in line.marks]
    drawn = {
      "line": line,
      "path": path(some),
      "band": path(ends) if ends else "",
      "dots": [(px(x), py(y)) for x, y in some] if line.dots else [],
      "marks": [px(x) for x, _ in line.marks],
      "points": json.dumps(shown),
      "ends": [short(line.points[i][1]) for i in (0, -1)],
    }
    lines.append(drawn)
  return {
    "plot": plot,
    "size": (_WIDTH, _HEIGHT),
    "box": (_LEFT, _TOP, _RIGHT, _BOTTOM),
    "x": [(px(x), short(x)) for x in along],
    "y": [(py(y), f"{y:.6g}") for y in _ticks(y0, y1, 4, False)],
    "lines": lines,
  }


def styles(data: Json) -> list[str]:
  """A colour for each arm, and dashes for each run of it."""
  out = {
    i: f"c{a % 8} d{(a + k) % 4}"
    for a, arm in enumerate(data["arms"])
    for k, i in enumerate(arm["runs"])
  }
  return [out[i] for i in sorted(out)]


def figures(data: Json) -> list[dict[str, Any]]:
  """Titles and plots, by step and by CPU time."""
  every = [e for run in data["runs"] for e in run["evaluations"]]
  factor, unit = time_unit(max(e["cpu_hours"] or 0.0 for e in every))
  axes: dict[str, Axis] = {
    "by step": ("step", "step", 1.0),
    "by CPU time": (f"CPU time, {unit}", "cpu_hours", factor),
  }
  domains, curves, scores = data["domains"], {}, {}
  for name, axis in axes.items():
    if any(run["training"] for run in data["runs"]):
      curves[name] = [_scores(data, axis), *_training(data, axis)]
      if len(domains) > 1:
        scores[name] = [_scores(data, axis, domain) for domain in domains]
  by_title = {"Curves": curves, "Held-out score by domain": scores}
  by_title["Pass@k"] = {"": [_pass_at_k(data, domain) for domain in domains]}
  return [{"title": k, "choices": by} for k, by in by_title.items() if by]


def _scores(data: Json, axis: Axis, domain: str = "") -> Plot:
  label, key, factor = axis
  cost = lambda run: [factor * (e[key] or 0.0) for e in run["evaluations"]]
  spent = [*map(cost, data["runs"])]
  lines = []
  for run, style, x in zip(data["runs"], styles(data), spent, strict=True):
    every = [e["summary"] for e in run["evaluations"]]
    s = [one["by_domain"][domain] if domain else one["all"] for one in every]
    y = [100 * one["pass_at_k"]["1"] for one in s]
    if not run["training"]:  # it has no cost: a line from side to side
      ends = [(0.0, y[0]), (max(map(max, spent)), y[0])]
      lines.append(Line(run["name"], f"{style} flat", ends, dots=False))
      continue
    band = [
      (at, 100 * one["low"], 100 * one["high"])
      for at, one in zip(x, s, strict=True)
      if one["low"] is not None
    ]
    points = [*zip(x, y, strict=True)]
    lines.append(Line(run["name"], style, points, True, band))
  return Plot(domain or "Held-out pass@1", label, "%", lines)


def _training(data: Json, axis: Axis) -> Iterator[Plot]:
  """The curves of training, without those that no run has."""
  label, key, factor = axis
  for name, (_, title, unit, scale) in compare.CURVES.items():
    lines = []
    for run, style in zip(data["runs"], styles(data), strict=True):
      at = [factor * x for x in run["curves"][key]]
      both = zip(at, run["curves"].get(name, [None] * len(at)), strict=True)
      points = [(x, scale * one) for x, one in both if one is not None]
      if not points:
        continue
      marks: dict[float, str] = {}  # start and end mark themselves
      for e in run["events"]:
        x, kind = at[min(max(e["step"], 1), len(at)) - 1], printable(e["event"])
        seen = marks.get(x, "")
        if kind not in ("start", "end", *seen.split(", ")):
          marks[x] = f"{seen}, {kind}" if seen else kind
      some = [*marks.items()][:_MOST_MARKS]
      few = len(points) <= _FEW
      lines.append(Line(run["name"], style, points, few, (), some))
    if lines:
      yield Plot(title, label, unit, lines)


def _pass_at_k(data: Json, domain: str) -> Plot:
  lines = []
  for run, style in zip(data["runs"], styles(data), strict=True):
    summary = run["evaluations"][-1]["summary"]
    s = summary["by_domain"][domain]["pass_at_k"]
    points = [(k, 100 * s[str(k)]) for k in sorted(map(int, s))]
    lines.append(Line(run["name"], style, points))
  return Plot(domain, "k", "%", lines, log2=True)


def document(**content: Any) -> str:
  """A page of page.html; what is not given is left out."""
  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.ChainableUndefined,
    finalize=lambda x: printable(x) if type(x) is str else x,  # not Markup
  )
  for written in (number, percent, short, duration, gain):
    environment.filters[written.__name__] = written
  source = (pathlib.Path(__file__).parent / "page.html").read_text()
  return environment.from_string(source).render(**content).lstrip()


def page(data: Json) -> str:
  """The page of `compare.numbers` or `paper.numbers`."""
  if "arms" not in data:
    return document(title="The paper's tables", paper=data)
  names = [run["name"] for run in data["runs"]]
  return document(
    title=", ".join(names),
    data=data,
    names=[", ".join(names[i] for i in arm["runs"]) for arm in data["arms"]],
    styles=styles(data),
    figures=figures(data),
    drawing=drawing,
  )


def as_text(page: str) -> str:
  """Its tables for a terminal; of long ones the first rows."""
  out, cell = [], r"<t[hd]\b[^>]*>([^<]*)"
  table = r"<h2>([^<]*)</h2>\s*<div class=\"wide\".*?<tr>(.*?)</table>"
  for title, body in re.findall(table, page, re.DOTALL):
    cells = (re.findall(cell, row) for row in body.split("<tr>"))
    rows = [[*map(html.unescape, row)] for row in cells]
    out += ["", html.unescape(title), evaluate.aligned(rows[: _MOST_LINES + 1])]
    if (more := len(rows) - 1 - _MOST_LINES) > 0:
      out.append(f"  ... {more} more on the page")
  return "\n".join(out)
