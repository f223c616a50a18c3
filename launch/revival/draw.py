"""Figures of the revival experiment."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker

from brorl_jax.report import figures
from brorl_jax.report.figures import Figure

ARMS = {  # as people read them, and their look
  "n16": ("N = 16", "k", "o"),
  "n512_equal_samples": ("N = 512, equal samples", "C0", "s"),
  "n512_paper": ("N = 512, 8 x samples", "C1", "D"),
  "n512_equal_prompts": ("N = 512, equal prompts", "C3", "^"),
  "n16_distinct": ("N = 16, credit by distinct answer", "C2", "v"),
  "n512_distinct": ("N = 512, credit by distinct answer", "C4", "P"),
}
BRANCHES = {
  "saturated": "after N = 16 stood still",
  "start": "from the beginning",
}
WINGS = {
  "countdown": "Many right answers: four numbers and a target",
  "queens": "Many right answers: queens on a board, two of them placed",
  "paths": "Many right responses: three numbers, steps, answer",
  "puzzles": "One short answer: eight families, held-out prompts",
}


def branches(data: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Wings and branches that have runs, in the order of the page."""
  return [
    (wing, where)
    for wing in WINGS
    for where in BRANCHES
    if data["wings"].get(wing, {}).get(where, {}).get("arms")
  ]


def curves(
  folder: pathlib.Path, data: Mapping[str, Any], x: str, label: str
) -> Figure:
  """pass@1 of every branch against time or samples."""
  some = branches(data)
  figure, axes = figures.axes_of(len(some), height=3.4)
  for axis, (wing, where) in zip(axes, some, strict=True):
    arms = data["wings"][wing][where]["arms"]
    for name, arm in arms.items():
      _line(axis, name, arm["curves"], x, "pass_at_1")
    if x == "samples":
      axis.set_xscale("log")
      axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
      axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
      axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    title = f"{wing}, {BRANCHES[where]}"
    axis.set(title=title, xlabel=label, ylabel="pass@1")
    axis.set_ylim(_wide(axis.get_ylim()))
  _legend(figure, axes)
  file = f"pass_at_1_by_{x}.png"
  figures.save(figure, folder / file)
  caption = "Lines: means over seeds; bands: their range."
  return Figure(file, f"pass@1 against {label}", caption)


def shrinkage(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure | None:
  """How many right answers are left when pass@1 has come so far."""
  some = [
    (wing, where)
    for wing, where in branches(data)
    if "dead" in next(iter(data["wings"][wing][where]["arms"].values()))["end"]
  ]
  if not some:
    return None
  figure, axes = figures.axes_of(len(some), height=3.4)
  for axis, (wing, where) in zip(axes, some, strict=True):
    for name, arm in data["wings"][wing][where]["arms"].items():
      _line(axis, name, arm["curves"], "pass_at_1", "distinct")
    axis.set(
      title=f"{wing}, {BRANCHES[where]}",
      xlabel="pass@1",
      ylabel=f"distinct right in {64 if wing == 'paths' else 256} samples",
      xlim=_wide(axis.get_xlim()),
    )
  _legend(figure, axes)
  figures.save(figure, folder / "distinct_by_pass_at_1.png")
  caption = (
    "Expected number of different right answers, a mean over prompts. Above "
    "another line: more answers kept on the way to the same pass@1."
  )
  title = "What is forgotten on the way"
  return Figure("distinct_by_pass_at_1.png", title, caption)


def overview(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure | None:
  """The panels that say most."""
  wanted = (
    ("countdown", "saturated", "busy_s", "pass_at_1"),
    ("queens", "saturated", "busy_s", "pass_at_1"),
    ("paths", "saturated", "busy_s", "pass_at_1"),
    ("puzzles", "saturated", "busy_s", "pass_at_1"),
    ("countdown", "start", "pass_at_1", "distinct"),
    ("queens", "start", "pass_at_1", "distinct"),
  )
  some = [one for one in wanted if one[:2] in branches(data)]
  if not some:
    return None
  names = {
    "busy_s": "processor seconds",
    "pass_at_1": "pass@1",
    "distinct": "distinct right in 256 samples",
  }
  figure, axes = figures.axes_of(len(some), height=3.4)
  for axis, (wing, where, x, y) in zip(axes, some, strict=True):
    for name, arm in data["wings"][wing][where]["arms"].items():
      _line(axis, name, arm["curves"], x, y)
    title = f"{wing}, {BRANCHES[where]}"
    axis.set(title=title, xlabel=names[x], ylabel=names[y])
    if y == "pass_at_1":
      axis.set_ylim(_wide(axis.get_ylim()))
  _legend(figure, axes)
  figures.save(figure, folder / "revival.png")
  caption = "Lines: means over seeds; bands: their range."
  return Figure("revival.png", "In short", caption)


def sweep(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  """What a step keeps, gains and takes, by N."""
  points = data["sweep"]["points"]
  n = [p["n"] for p in points]
  of = lambda key: np.array([p[key] for p in points])
  figure, axes = figures.axes_of(3, height=3.4)
  rate, seen = of("pass_rate"), of("prompts_seen")
  error = 1.96 * np.sqrt(rate * (1 - rate) / seen)
  axes[0].errorbar(n, rate, error, fmt="ko", label="measured, 95 %")
  low = of("pass_rate_predicted") - 1.96 * of("pass_rate_predicted_se")
  high = 2 * of("pass_rate_predicted") - low
  axes[0].plot(n, of("pass_rate_predicted"), "C1-", label="foretold")
  axes[0].fill_between(n, low, high, color="C1", alpha=0.2, lw=0)
  axes[0].set(title="prompts kept, first step", ylim=(0, 1.05))
  axes[1].plot(n, of("gain_at_equal_samples"), "C0o-", label="equal samples")
  axes[1].plot(n, of("gain_at_end"), "C3s-", label="equal time")
  axes[1].set(title="gain of held-out pass@1")
  axes[2].plot(n, of("samples_per_cpu_s"), "C2o-", label="generated")
  axes[2].set(title="samples per processor second", ylim=(0, None))
  for axis in axes:
    axis.set(xscale="log", xlabel="N")
    axis.legend(frameon=False)
  figures.save(figure, folder / "sweep.png")
  title = "N at a constant number of samples per step"
  return Figure("sweep.png", title, "One seed; see the table.")


def _wide(limits: tuple[float, float]) -> tuple[float, float]:
  """An axis of pass@1 spans some .1, or nothing would look like much.

  It ends at 1, with room for a line there.
  """
  middle, half = sum(limits) / 2, max((limits[1] - limits[0]) / 2, 0.05)
  return middle - half, min(middle + half, 1.005)


def _line(
  axis: Any, name: str, runs: Sequence[Mapping[str, Any]], x: str, y: str
) -> None:
  """Mean over seeds where all of them are, and their range."""
  label, colour, marker = ARMS[name]
  grid = np.linspace(
    max(run[x][0] for run in runs), min(max(run[x]) for run in runs), 60
  )
  if x == "samples":
    first = max(run[x][1] for run in runs)
    grid = np.geomspace(first, grid[-1], 60)
  rising = lambda v: np.maximum.accumulate(v)
  lines = np.array([np.interp(grid, rising(run[x]), run[y]) for run in runs])
  mean = lines.mean(axis=0)
  axis.plot(
    grid,
    mean,
    color=colour,
    marker=marker,
    markevery=(2 * [*ARMS].index(name), 12),  # or they would hide each other
    ms=4,
    lw=1.5,
    label=label,
  )
  axis.fill_between(
    grid, lines.min(axis=0), lines.max(axis=0), color=colour, alpha=0.15, lw=0
  )


def _legend(figure: Any, axes: Sequence[Any]) -> None:
  """All arms once."""
  found = {}
  for axis in axes:
    for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
      found.setdefault(label, line)
  figure.legend(
    found.values(),
    found.keys(),
    loc="outside lower center",
    ncols=3,
    frameon=False,
  )
