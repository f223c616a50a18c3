"""The numbers of `compare` -> one HTML page, by the template page.html.

The page needs no network. Its script shows the values of points and filters
responses; without it everything is there too.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2

from brorl_jax.report.load_runs import Json, Value

_WIDTH, _HEIGHT = 360, 210  # of a plot, in its own units
_LEFT, _TOP, _RIGHT, _BOTTOM = 48, 14, 350, 176  # of the area of its lines
_MOST_POINTS = 300  # of a line; of more, every k-th is drawn
_MOST_MARKS = 40  # events of a run on its curves
_FEW = 30  # points, which get dots
# Curves of training: name in the JSON -> title, unit, factor.
_CURVES = {
  "reward": ("Reward of training prompts", "mean", 1),
  "kept": ("Kept prompts", "%", 100),
  "alive": ("Prompts with a right answer", "%", 100),
  "entropy": ("Entropy", "nats per token", 1),
  "length": ("Length of responses", "tokens", 1),
  "kl": ("KL to the reference", "nats per token", 1),
}
_CAPTION = (
  "Held-out scores are measured at the dots, with 95 % bootstrap intervals; in "
  "between nothing was. Dotted: policies that were only evaluated. Triangles: "
  "events, listed below. CPU time is that of the process, without compiling or "
  "evaluating."
)


def count(x: Value, digits: int = 0) -> str:
  """A number of things, or their mean."""
  return "n/a" if x is None else f"{x:,.{digits}f}"


def percent(x: Value, digits: int = 1) -> str:
  """A fraction in percent, without the sign."""
  return "n/a" if x is None else f"{100 * x:.{digits}f}"


def signed(x: Value, form: str = "+.4f") -> str:
  """A difference."""
  return "n/a" if x is None else f"{x:{form}}"


def short(x: Value) -> str:
  """Three digits that matter."""
  if x is None:
    return "n/a"
  return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def p_value(x: Value) -> str:
  """A probability, which no float holds below 1e-308."""
  return "n/a" if x is None else f"{x:.2g}" if x > 0.0 else "< 1e-307"


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


def cost(x: float | int, key: str) -> str:
  """A cost with its unit; `key` is one of `compare.EQUAL`."""
  if key == "samples":
    return f"{count(x)} samples"
  return duration(x) + (" of CPU time" if key == "cpu_hours" else "")


def gain(result: Json) -> str:
  """The gain of an arm in points, with a 95 % interval over prompts."""
  mean = 100 * sum(result["gains"]) / len(result["gains"])
  half = result["gain_half"]
  return f"{mean:+.1f}" + ("" if half is None else f" ± {percent(half)}")


# -------------------------------------------------------------------- curves


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


class _Cost(NamedTuple):
  """A horizontal axis: its name, its key in the JSON and a factor."""

  name: str
  key: str
  factor: float


def ticks(low: float | int, high: float | int, most: int) -> list[float]:
  """Round numbers from low to high: multiples of 1, 2 or 5 times 10^k."""
  rough = (high - low) / most
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * rough)
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
    whole = plot.x == "step"
    along = [x for x in ticks(x0, x1, 5) if x >= 0 and not (whole and x % 1)]
  lines = []
  for line in plot.lines:
    last = len(line.points) - 1
    some = [*line.points[: last : -(-last // _MOST_POINTS) or 1]]
    some += line.points[-1:]
    ends = [(x, low) for x, low, _ in line.band]
    ends += [(x, top) for x, _, top in reversed(line.band)]
    told = [[px(x), py(y), f"{plot.x} {short(x)}", short(y)] for x, y in some]
    told += [[px(x), _TOP, f"{plot.x} {short(x)}", e] for x, e in line.marks]
    lines.append(
      {
        "line": line,
        "path": path(some),
        "band": path(ends) if ends else "",
        "dots": [(px(x), py(y)) for x, y in some] if line.dots else [],
        "marks": [px(x) for x, _ in line.marks],
        "points": json.dumps(told),
        "ends": [short(line.points[i][1]) for i in (0, -1)],
      }
    )
  return {
    "plot": plot,
    "size": (_WIDTH, _HEIGHT),
    "box": (_LEFT, _TOP, _RIGHT, _BOTTOM),
    "x": [(px(x), short(x)) for x in along],
    "y": [(py(y), f"{y:.6g}") for y in ticks(y0, y1, 4)],
    "lines": lines,
  }


def styles(data: Json) -> list[str]:
  """A colour for each arm, and dashes for each run of it."""
  out = {
    i: f"c{a % 8} d{(a + k) % 4}"
    for a, arm in enumerate(data["arms"])
    for k, i in enumerate(arm["runs"])
  }
  more = range(len(data["runs"]), len(data["runs"]) + len(data["deeper"]))
  return [out.get(i, f"c{i % 8} d3") for i in (*sorted(out), *more)]


def figures(data: Json) -> list[dict[str, Any]]:
  """Titles, captions and plots, by step and by CPU time."""
  every = [e for run in data["runs"] for e in run["evaluations"]]
  factor, unit = time_unit(max(e["cpu_hours"] or 0.0 for e in every))
  costs = (
    _Cost("step", "step", 1.0),
    _Cost(f"CPU time, {unit}", "cpu_hours", factor),
  )
  scores = functools.partial(_scores, data)
  domains = data["domains"] if len(data["domains"]) > 1 else ()
  task = lambda s, p: s["by_domain"][p["domain"]]["by_task"][p["task"]]
  total, shown = sum(map(len, data["tasks"].values())), len(data["panels"])
  some = f"The {shown} of {total} tasks in which the runs differ most."
  parts = {
    ("Curves", _CAPTION): lambda cost: [
      scores(cost, "Held-out pass@1", lambda s: s["all"]),
      *_training(data, cost),
    ],
    ("Held-out score by domain", ""): lambda cost: [
      scores(cost, d, lambda s, d=d: s["by_domain"][d]) for d in domains
    ],
    ("Held-out score by task", some if shown < total else ""): lambda cost: [
      scores(cost, p["task"], functools.partial(task, p=p))
      for p in (data["panels"] if total > 1 else ())
    ],
  }
  out = []
  if any(run["training"] for run in data["runs"]):
    for (title, caption), plots in parts.items():
      by = {f"by {cost.name.split(',')[0]}": plots(cost) for cost in costs}
      out.append({"title": title, "caption": caption, "choices": by})
  caption = (
    "How many prompts are solved by at least one of k samples, at the last "
    "evaluation of each run (unbiased estimate)."
  )
  plots = {"": _pass_at_k(data)}
  out.append({"title": "Pass@k", "caption": caption, "choices": plots})
  return [x for x in out if any(x["choices"].values())]


def _scores(
  data: Json, cost: _Cost, title: str, part: Callable[[Json], Json]
) -> Plot:
  """Pass@1 of a part of the held-out prompts."""
  spent = [
    [cost.factor * (e[cost.key] or 0.0) for e in run["evaluations"]]
    for run in data["runs"]
  ]
  lines = []
  for run, style, x in zip(data["runs"], styles(data), spent, strict=False):
    s = [part(e["summary"]) for e in run["evaluations"]]
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
  return Plot(title, cost.name, "%", lines)


def _training(data: Json, cost: _Cost) -> Iterator[Plot]:
  """The curves of training, without those that no run has."""
  for name, (title, unit, scale) in _CURVES.items():
    lines = []
    for run, style in zip(data["runs"], styles(data), strict=False):
      at = [cost.factor * x for x in run["curves"][cost.key]]
      y = run["curves"].get(name, ())
      points = [
        (x, scale * one)
        for x, one in zip(at, y, strict=False)
        if one is not None
      ]
      marks = [
        (at[min(max(m["step"], 1), len(at)) - 1], ", ".join(m["events"]))
        for m in (run["marks"][:_MOST_MARKS] if points else ())
      ]
      few = len(points) <= _FEW
      if points:
        lines.append(Line(run["name"], style, points, few, (), marks))
    if lines:
      yield Plot(title, cost.name, unit, lines)


def _pass_at_k(data: Json) -> list[Plot]:
  runs = [*zip([*data["runs"], *data["deeper"]], styles(data), strict=True)]
  plots = []
  for domain in data["domains"]:
    lines = []
    for run, style in runs:
      s = run["evaluations"][-1]["summary"]["by_domain"][domain]["pass_at_k"]
      points = [(k, 100 * s[str(k)]) for k in sorted(map(int, s))]
      lines.append(Line(run["name"], style, points))
    plots.append(Plot(domain, "k", "%", lines, log2=True))
  return plots


# ---------------------------------------------------------------------- page


def notices(data: Json) -> Iterator[str]:
  """What a reader should know before all numbers."""
  for run in data["runs"]:
    if not run["finished"]:
      done = f"step {count(run['steps'])} of {count(run['steps_wanted'])}"
      yield f"{run['name']} is not at its end: {done}."
    rewards = {*run["curves"].get("reward", ())}
    if len(rewards) == 1:
      yield (
        f"{run['name']}: the mean reward was {short(*rewards)} in every step. "
        "Look at the responses below."
      )


def document(**content: Any) -> str:
  """A page of page.html; what is not given is left out."""
  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.ChainableUndefined,
  )
  for written in (count, percent, signed, short, p_value, duration, cost, gain):
    environment.filters[written.__name__] = written
  source = (pathlib.Path(__file__).parent / "page.html").read_text()
  return environment.from_string(source).render(**content).lstrip()


def page(data: Json) -> str:
  """The page of `compare.numbers`."""
  drawn = figures(data)
  for one in drawn:
    one["choices"] = {
      name: [*map(drawing, plots)] for name, plots in one["choices"].items()
    }
  names = [run["name"] for run in data["runs"]]
  return document(
    title=", ".join(names),
    data=data,
    names=[", ".join(names[i] for i in arm["runs"]) for arm in data["arms"]],
    notices=[*notices(data)],
    styles=styles(data),
    figures=drawn,
  )
