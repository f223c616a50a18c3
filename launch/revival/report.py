"""Tables and figures of the revival experiment, from what has run so far.

  python launch/revival/report.py runs/revival

Writes runs/revival/report/: revival.json, index.html, and PNGs.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import study

from brorl_jax.report import cells, figures, page
from brorl_jax.report.cells import Number, Table
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
  "paths": "Many right responses: three numbers, steps, answer",
  "puzzles": "One short answer: eight families, held-out prompts",
}
EXACT = (
  ("pass@1", "pass_at_1", "decimal"),
  ("pass@1, prompts not trained on", "heldout", "decimal"),
  ("distinct right in 256", "distinct", "mean"),
  ("right answers above 1e-4, %", "covered", "percent1"),
  ("right answers that lost mass, %", "fell", "percent1"),
  ("mass they lost", "lost", "decimal"),
  ("prompts below .05, %", "dead", "percent1"),
)
SAMPLED = (("held-out pass@1", "pass_at_1", "decimal"),)


def branches(data: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Wings and branches that have runs, in the order of the page."""
  return [
    (wing, where)
    for wing in WINGS
    for where in BRANCHES
    if data["wings"].get(wing, {}).get(where, {}).get("arms")
  ]


def ends(data: Mapping[str, Any], wing: str, where: str) -> Table:
  """Each arm after its time, and after as many samples as all had."""
  arms = data["wings"][wing][where]["arms"]
  base: tuple[str, ...] = ("wings", wing, where, "arms")
  columns = EXACT if "dead" in next(iter(arms.values()))["end"] else SAMPLED
  first = next(iter(arms))
  mean = lambda path, kind: Number((*base, *path, "mean"), kind)
  rows = [
    ["where they begin", "", "", "", "", ""]
    + [mean((first, "start", key), kind) for _, key, kind in columns]
  ]
  for at in ("end", "equal_samples"):
    for name in arms:
      measure = lambda key, kind, name=name, at=at: mean((name, at, key), kind)
      span = [
        Number((*base, name, at, "pass_at_1", side), "decimal")
        for side in ("low", "high")
      ]
      samples = (
        measure("samples", "thousands")
        if at == "end"
        else Number(("wings", wing, where, "samples_of_all"), "thousands")
      )
      rows.append(
        [
          "equal time" if at == "end" else "equal samples",
          ARMS[name][0],
          Number((*base, name, "lr"), "rate"),
          Number((*base, name, "seeds"), "count"),
          samples,
          [span[0], " to ", span[1]],
          *(measure(key, kind) for _, key, kind in columns),
        ]
      )
  caption = (
    "Means over seeds; the range is that of the seeds. Learning rates were "
    "tuned for each arm with another seed. Time: processor seconds of the "
    "steps, compiling, evaluations and checkpoints aside."
  )
  head = ["at", "arm", "learning rate", "seeds", "samples, thousands"]
  head += ["range of pass@1", *(name for name, _, _ in columns)]
  title = f"{WINGS[wing]}, {BRANCHES[where]}"
  return Table(title, caption, head, rows, 2)


def levels(data: Mapping[str, Any], wing: str, where: str) -> Table | None:
  """Arms when they reach the same pass@1."""
  arms = data["wings"][wing][where]["arms"]
  base: tuple[str, ...] = ("wings", wing, where, "arms")
  if "dead" not in next(iter(arms.values()))["end"]:
    return None
  columns = [c for c in EXACT if c[1] != "pass_at_1"]
  rows = []
  for level in dict.fromkeys(k for arm in arms.values() for k in arm["levels"]):
    for name, arm in arms.items():
      if arm["levels"].get(level) is None:
        continue
      path = (*base, name, "levels", level)
      mean = lambda key, kind, path=path: Number((*path, key, "mean"), kind)
      rows.append(
        [
          level,
          ARMS[name][0],
          mean("busy_s", "rate"),
          mean("samples", "thousands"),
          *(mean(key, kind) for _, key, kind in columns),
        ]
      )
  if not rows:
    return None
  head = ["pass@1", "arm", "processor seconds", "samples, thousands"]
  caption = (
    "When pass@1 first reaches the level, between two measurements by a line; "
    "an arm of which a seed never does has no row."
  )
  title = f"At equal pass@1: {WINGS[wing]}, {BRANCHES[where]}"
  return Table(title, caption, [*head, *(c[0] for c in columns)], rows, 2)


def tests(data: Mapping[str, Any]) -> Table:
  """Each arm against N = 16."""
  columns = (
    ("difference of pass@1", "difference", "signed"),
    ("d_z", "effect_size", "decimal"),
    ("p, plain", "p_plain", "p"),
    ("p, by prompt", "p_by_prompt", "p"),
    ("seeds ahead", "seeds_ahead", "count"),
    ("seeds", "seeds", "count"),
  )
  rows = []
  for wing, where in branches(data):
    for name, arm in data["wings"][wing][where]["arms"].items():
      if "against_n16" in arm:
        base = ("wings", wing, where, "arms", name)
        path = (*base, "against_n16")
        back = Number((*base, "revived"), "percent1")
        cells_ = [Number((*path, key), kind) for _, key, kind in columns]
        rows.append([wing, where, ARMS[name][0], *cells_, back])
  caption = (
    "At equal time, less N = 16: the last pass@1 of each prompt and seed, "
    "paired; two-sided p, plain and with errors clustered by prompt. Revived: "
    "prompts whose pass@1 was below .05 where the arm began and is .5 or more "
    "at the end."
  )
  head = ["wing", "branch", "arm", *(c[0] for c in columns), "revived, %"]
  return Table("Against N = 16", caption, head, rows, 3)


def sweep_table(data: Mapping[str, Any]) -> Table:
  """N at a constant number of samples per step."""
  columns = (
    ("N", "n", "count"),
    ("steps", "steps", "count"),
    ("prompts seen in step 1", "prompts_seen", "count"),
    ("kept, %", "pass_rate", "percent1"),
    ("foretold, %", "pass_rate_predicted", "percent1"),
    ("± standard error", "pass_rate_predicted_se", "percent1"),
    ("std of rewards in a group", "reward_std_within_group", "decimal"),
    ("variance foretold", "reward_variance_predicted", "decimal"),
    ("samples per processor second", "samples_per_cpu_s", "rate"),
    ("gain at equal samples", "gain_at_equal_samples", "signed"),
    ("gain per million samples", "gain_per_million_samples", "decimal"),
    ("gain at equal time", "gain_at_end", "signed"),
  )
  rows = [
    [Number(("sweep", "points", i, key), kind) for _, key, kind in columns]
    for i in range(len(data["sweep"]["points"]))
  ]
  caption = (
    "8,192 kept samples per step from the embedded policy, one seed, learning "
    "rate not tuned. Kept and std: of the first step. Foretold: from 512 "
    "samples of each of 480 other prompts that training may draw. Gains: of "
    "held-out pass@1 at temperature 1."
  )
  title = "N at a constant number of samples per step"
  return Table(title, caption, [c[0] for c in columns], rows, 0)


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
    title = f"{wing}, {BRANCHES[where]}"
    axis.set(title=title, xlabel=label, ylabel="pass@1")
  _legend(figure, axes)
  file = f"pass_at_1_by_{x}.png"
  figures.save(figure, folder / file)
  caption = "Lines: means over seeds; bands: their range."
  return Figure(file, f"pass@1 against {label}", caption)


def shrinkage(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  """How many right answers are left when pass@1 has come so far."""
  some = [
    (wing, where)
    for wing, where in branches(data)
    if "dead" in next(iter(data["wings"][wing][where]["arms"].values()))["end"]
  ]
  figure, axes = figures.axes_of(len(some), height=3.4)
  for axis, (wing, where) in zip(axes, some, strict=True):
    for name, arm in data["wings"][wing][where]["arms"].items():
      _line(axis, name, arm["curves"], "pass_at_1", "distinct")
    axis.set(
      title=f"{wing}, {BRANCHES[where]}",
      xlabel="pass@1",
      ylabel="distinct right in 256 samples",
    )
  _legend(figure, axes)
  figures.save(figure, folder / "distinct_by_pass_at_1.png")
  caption = (
    "Expected number of different right answers, a mean over prompts. Above "
    "another line: more answers kept on the way to the same pass@1."
  )
  title = "What is forgotten on the way"
  return Figure("distinct_by_pass_at_1.png", title, caption)


def overview(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  """The three panels that say most."""
  wanted = (
    ("countdown", "saturated", "busy_s", "pass_at_1"),
    ("puzzles", "saturated", "busy_s", "pass_at_1"),
    ("countdown", "start", "pass_at_1", "distinct"),
  )
  some = [one for one in wanted if one[:2] in branches(data)]
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
  _legend(figure, axes)
  figures.save(figure, folder / "revival.png")
  caption = "Lines: means over seeds; bands: their range."
  return Figure("revival.png", "In short", caption)


def sweep_figure(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
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
    markevery=12,
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


def write(root: pathlib.Path) -> pathlib.Path:
  """The page and what it is made of; returns the page."""
  data = study.numbers(root)
  folder = root / "report"
  folder.mkdir(exist_ok=True)
  (folder / "revival.json").write_text(json.dumps(data, indent=1) + "\n")
  tables, drawn = [], []
  with plt.rc_context(figures.STYLE):
    if branches(data):
      drawn.append(overview(folder, data))
      drawn.append(curves(folder, data, "busy_s", "processor seconds"))
      drawn.append(curves(folder, data, "samples", "samples generated"))
      drawn.append(shrinkage(folder, data))
      tables.append(tests(data))
    for wing, where in branches(data):
      tables.append(ends(data, wing, where))
      if (table := levels(data, wing, where)) is not None:
        tables.append(table)
    if data["sweep"]:
      drawn.append(sweep_figure(folder, data))
      tables.append(sweep_table(data))
  body = [page.figure(one, folder) for one in drawn]
  body += [page.table(one, data) for one in tables]
  html = page.document("The revival experiment", body)
  (folder / "index.html").write_text(html)
  for table in tables:
    print(table.title, cells.text(table, data), sep="\n")
  return folder / "index.html"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("root", type=pathlib.Path)
  print(write(parser.parse_args().root))


if __name__ == "__main__":
  main()
