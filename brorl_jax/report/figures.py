"""The numbers of a comparison -> Figures 1 and 4, and pass@k.

Pages show a figure at its width here, 96 pixels to the inch, so a label of 9
points has 9 points on the page too.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.figure
import numpy as np

from brorl_jax.report import cells

WIDTH = 10.0  # inches
_COLUMNS = 3
_ROOM = 120  # characters of a legend, side by side
_DPI = 144  # sharp on screens with 1.5 pixels per point
# Lines differ without colours too. Where runs coincide, later ones have wider
# gaps and hollow markers, so that those below stay visible.
_MARKERS = "osD^vP*X"
_DASHES = ("-", (0, (3, 3)), (0, (3, 6)), (0, (3, 9)))
STYLE: Any = {
  "font.size": 10,
  "axes.titlesize": 10,
  "axes.labelsize": 10,
  "xtick.labelsize": 9,
  "ytick.labelsize": 9,
  "legend.fontsize": 9,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.alpha": 0.25,
}


class Figure(NamedTuple):
  """A figure of the page."""

  file: str  # name of the file, next to the page
  title: str
  caption: str


def draw(folder: pathlib.Path, data: Mapping[str, Any]) -> list[Figure]:
  """Writes the PNGs of a comparison, except empty ones."""
  out = []
  with matplotlib.rc_context(STYLE):
    if any(run["training"] for run in data["runs"]):
      out.append(score(folder, data))
      reached = {one["key"] for one in data["comparisons"]}
      out += [
        trajectories(folder, data, key)
        for key in ("net_hours", "samples")
        if key in reached
      ]
    out.append(pass_at_k(folder, data))
  return out


def score(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  """Figure 1: score of each domain against time, with intervals."""
  domains = data["domains"]
  figure, axes = axes_of(len(domains), height=3.4)
  every = [e["net_hours"] for run in data["runs"] for e in run["evaluations"]]
  scale, unit = cells.time_unit(max(x for x in every if x is not None))
  for axis, domain in zip(axes, domains, strict=True):
    of = lambda one: one["summary"]["by_domain"][domain]
    for i, run in enumerate(data["runs"]):
      every = run["evaluations"]
      y = [100 * of(one)["pass_at_k"]["1"] for one in every]
      low, high = (
        100 * np.array([of(one)[side] for one in every], float)  # None: NaN
        for side in ("low", "high")
      )
      line = look(i, run)
      if run["training"]:
        x = [one["net_hours"] * scale for one in every]
        axis.plot(x, y, ms=4, **line)
        axis.fill_between(x, low, high, color=line["color"], alpha=0.12, lw=0)
      else:  # without a time
        axis.axhline(y[0], **line | {"marker": "", "ls": ":"})
    axis.set(title=_plain(domain), xlabel=unit, ylabel="pass@1, %")
  legend(figure, axes)
  save(figure, folder / "score.png")
  caption = (
    "Pass@1 of the held-out prompts against the time of steps and saving, "
    "without compiling, with 95 % bootstrap intervals. Markers are "
    "evaluations; between them nothing was measured. Dotted: policies that "
    "were only evaluated."
  )
  return Figure(
    "score.png", "Score against time (the paper's Figure 1)", caption
  )


def trajectories(
  folder: pathlib.Path, data: Mapping[str, Any], key: str
) -> Figure:
  """Figure 4: a panel for each task, up to the cost that all runs reached."""
  panels = data["panels"]
  (reach,) = [c["reach"] for c in data["comparisons"] if c["key"] == key]
  scale, unit = 1e-3, "thousand samples"
  if key == "net_hours":
    scale, unit = cells.time_unit(reach)
  figure, axes = axes_of(len(panels), height=2.3)
  for axis, panel in zip(axes, panels, strict=True):
    for i, run in enumerate(data["runs"]):
      if not run["training"]:
        continue
      every = run["evaluations"]
      s = [
        e["summary"]["by_domain"][panel["domain"]]["by_task"][panel["task"]]
        for e in every
      ]
      x = np.array([e[key] * scale for e in every])
      y = np.array([100 * one["pass_at_k"]["1"] for one in s])
      # A line to the next evaluation would show values that were not measured,
      # and end at another point than the tables.
      inside = x <= reach * scale
      axis.plot(x[inside], y[inside], ms=4, **look(i, run))
    margin = 0.03 * reach * scale or 1.0  # no run got beyond the start
    axis.set_xlim(-margin, reach * scale + margin)
    axis.set(title=_plain(panel["task"]), xlabel=unit, ylabel="pass@1, %")
  legend(figure, axes)
  what = {"net_hours": "time", "samples": "samples"}[key]
  aside = {"net_hours": " without compiling", "samples": ""}[key]
  name = f"tasks_by_{what}.png"
  save(figure, folder / name)
  total = sum(map(len, data["tasks"].values()))
  which = (
    "all tasks"
    if len(panels) == total
    else f"the {len(panels)} of {total} tasks in which the runs differ most"
  )
  caption = (
    f"Pass@1 of {which}, up to the {what}{aside} that all runs reached "
    "(a line ends with the evaluation that the tables show); each panel has a "
    "scale of its own."
  )
  return Figure(name, f"Tasks on equal {what} (the paper's Figure 4)", caption)


def pass_at_k(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  """Pass@k of the last evaluation of each run, by domain."""
  domains = data["domains"]
  figure, axes = axes_of(len(domains), height=3.2)
  for axis, domain in zip(axes, domains, strict=True):
    ticks = set[int]()
    for i, run in enumerate([*data["runs"], *data["deeper"]]):
      s = run["evaluations"][-1]["summary"]["by_domain"][domain]
      k = sorted(map(int, s["pass_at_k"]))
      y = [100 * s["pass_at_k"][str(one)] for one in k]
      axis.plot(k, y, ms=4, **look(i, run))
      ticks |= {*k}
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ticks), [str(one) for one in sorted(ticks)])
    axis.minorticks_off()
    axis.set(title=_plain(domain), xlabel="k, samples", ylabel="pass@k, %")
  legend(figure, axes)
  save(figure, folder / "pass_at_k.png")
  caption = (
    "How many prompts are solved by one of k samples at least, of the last "
    "evaluation of each run (unbiased estimate). An evaluation with more "
    "samples than the runs have is only drawn here."
  )
  return Figure("pass_at_k.png", "Pass@k", caption)


def look(i: int, run: Mapping[str, Any]) -> dict[str, Any]:
  """The style of run i in all figures."""
  n = f" (N = {run['n']})" if run["n"] else ""
  return {
    "color": f"C{i % 10}",
    "ls": _DASHES[i % len(_DASHES)],
    "marker": _MARKERS[i % len(_MARKERS)],
    "fillstyle": "none" if i else "full",
    "lw": 1.5,
    "label": f"{_plain(run['name'])}{n}",
  }


def _plain(name: str) -> str:
  """A name with escaped dollar signs, which would start mathematics."""
  return name.replace("$", r"\$")


def axes_of(count: int, *, height: float) -> tuple[Any, Sequence[Any]]:
  """A figure as wide as the page with `count` axes, three in a row."""
  columns = min(count, _COLUMNS)
  rows = -(-count // columns)
  size = (WIDTH, rows * height + 0.5)
  figure = matplotlib.figure.Figure(size, layout="constrained")
  axes = [*figure.subplots(rows, columns, squeeze=False).ravel()]
  for axis in axes[count:]:
    axis.remove()
  return figure, axes[:count]


def legend(figure: Any, axes: Sequence[Any]) -> None:
  """One legend for all panels, outside them so that it hides no line."""
  every: dict[str, Any] = {}
  for axis in axes:
    for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
      every.setdefault(label, line)
  labels, lines = [*every], [*every.values()]
  longest = max(map(len, labels)) + 8  # the line before it
  columns = max(1, min(len(labels), 4, _ROOM // longest))
  figure.legend(
    lines,
    labels,
    loc="outside lower center",
    ncols=columns,
    frameon=False,
    handlelength=3,  # otherwise the widest gap would hide the line
  )


def save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
  """Saves a figure as a PNG."""
  figure.savefig(path, dpi=_DPI)
