"""Tables and the figure, from the results that there are.

  python -m launch.wall.report launch/wall/results.json launch/figures/wall.png
  python -m launch.wall.report launch/wall/results.json --run=runs/n512

The second prints the first table with a run of yours in it.
"""

import argparse
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from launch.wall import arms, study

# The arms of the first table.
FIRST = {
  "n16": "N = 16",
  "n16-8x-prompts": "N = 16, 8 x the prompts",
  "n512": "N = 512",
  "need": "16 to 512 by need",
}
NAMES = FIRST | {
  "n512-twice-the-rate": "N = 512, twice the rate",
}
LABELS = {"dead": "dead", "best_at_256": "best@256"}
NS = (8, 16, 32, 64, 128, 512)
# Task, advantages, samples of a step, pass@1, what is read there.
PROGRESS = (
  ("own", "maxrl", 2048, 0.3, "dead"),
  ("own", "maxrl", 2048, 0.3, "best_at_256"),
  ("own", "grpo", 2048, 0.2, "dead"),
  ("own", "leave_one_out", 2048, 0.15, "dead"),
  ("own", "maxrl", 2048, 0.2, "dead"),
  ("own", "maxrl", 8192, 0.2, "dead"),
  ("countdown", "maxrl", 2048, 0.2, "dead"),
)
KINDS = {
  "maxrl": "MaxRL",
  "grpo": "GRPO",
  "leave_one_out": "leave-one-out",
  "tokens": "whitened, the paper's",
}
COLOURS = dict(zip(NAMES, ("C0", "C9", "C3", "k", "C1"), strict=True))


def number(x: Mapping[str, float], digits: int = 2) -> str:
  """A mean with its interval: .61 (.55 to .67)."""
  three = (f"{x[k]:.{digits}f}" for k in ("mean", "low", "high"))
  mean, low, high = (t.replace("0.", ".", 1) for t in three)
  return f"{mean} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """Lines of markdown."""
  lines = [head, ["---"] * len(head), *rows]
  return [f"| {' | '.join(map(str, row))} |" for row in lines]


def horizon(results: study.Results, by: str = "busy_s") -> float:
  """What the arms of the first table have all spent, rounded down."""
  most = study.end(results, [*FIRST], by)
  unit = 10.0 if by == "busy_s" else 50_000.0
  return most // unit * unit


def first_table(results: study.Results) -> list[str]:
  """The arms of the first table at equal CPU-seconds."""
  found = study.at_equal(results, [*FIRST], "busy_s", horizon(results))
  rows = [
    [
      NAMES[name],
      *(number(x[k]) for k in ("pass_at_1", "dead", "heldout")),
      f"{x['best_at_256']['mean']:.2f}".removeprefix("0"),
      f"{x['samples'] / 1e6:.1f} M",
      x["seeds"],
    ]
    for name, x in found.items()
  ]
  head = ["", "pass@1", "dead prompts", "held-out", "best@256"]
  return table([*head, "rollouts", "seeds"], rows)


def rollout_table(results: study.Results) -> list[str]:
  """The same at equal rollouts."""
  at = horizon(results, "samples")
  found = study.at_equal(results, [*FIRST], "samples", at)
  rows = [
    [NAMES[k], number(x["pass_at_1"]), number(x["dead"]), f"{x['busy_s']:.0f}"]
    for k, x in found.items()
  ]
  return table(["", "pass@1", "dead prompts", "CPU-s"], rows)


def progress_table(results: study.Results) -> list[str]:
  """Earlier runs where they reach the same pass@1; a row has one rate."""
  rows = []
  for task, kind, samples, level, measure in PROGRESS:
    batch = f", {samples:,} samples" if samples != 2048 else ""
    row = [f"{task}, {KINDS[kind]}{batch}", level, LABELS[measure]]
    for n in NS:
      runs = results.get(f"earlier/{task}/{kind}/{samples}/{n}", {})
      x = (study.at_progress(runs, level) or {}).get(measure)
      text = f"{x['mean']:.2f}" if x else ""
      row.append(f"{text} ± {x['half']:.2f}" if x and x["half"] else text)
    rows.append(row)
  return table(["runs", "at pass@1", "N =", *map(str, NS)], rows)


def law_table(results: study.Results) -> list[str]:
  """dead at the end = a - b log2 N: what was expected, and what came."""
  told = {"maxrl": ".09 ± .02", "grpo": ".05 ± .02"}
  rows = []
  for kind, name in KINDS.items():
    if (x := study.slope(results, kind)) is not None:
      values = ", ".join(map(str, sorted(x["n"])))
      expected = told.get(kind, "0 ± .02")
      one = f"{x['mean']:.3f}, one seed".removeprefix("0")
      came = number(x, 3) if x["low"] < x["high"] else one
      rows.append([name, values, expected, came])
  return table(["advantages", "N", "b expected", "b found"], rows)


def end_table(results: study.Results) -> list[str]:
  """Every arm at the end of its runs, less those of the first table."""
  rows = []
  for name in arms.ARMS:
    if name not in results or name in FIRST:
      continue
    p = study.prompts(results[name], "busy_s", np.inf)
    x = {k: study.interval(of(p) * 1.0) for k, of in study.MEASURES.items()}
    last = [run["points"]["busy_s"][-1] for run in results[name].values()]
    rows.append(
      [
        name,
        number(x["pass_at_1"]),
        number(x["dead"]),
        f"{np.mean(last):.0f}",
        len(p),
      ]
    )
  return table(["arm", "pass@1", "dead prompts", "CPU-s", "seeds"], rows)


def figure(results: study.Results, path: pathlib.Path) -> None:
  """pass@1 by CPU-seconds, and prompts alive by pass@1."""
  drawing = matplotlib.figure.Figure((10.0, 4.2), layout="constrained")
  time, alive = drawing.subplots(1, 2)
  for name in COLOURS:
    if name not in results:
      continue
    for i, run in enumerate(results[name].values()):
      points, label = run["points"], None if i else NAMES[name]
      style: Any = {"color": COLOURS[name], "lw": 1.2, "label": label}
      time.plot(points["busy_s"], points["pass_at_1"], **style)
      rest = 1.0 - np.array(points["dead"])
      alive.plot(points["pass_at_1"], rest, **style)
  time.set(xlabel="CPU-seconds", ylabel="pass@1 of 128 hard prompts")
  alive.set(xlabel="pass@1", ylabel="share of prompts alive (p ≥ 1e-4)")
  for axis in (time, alive):
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  handles, labels = time.get_legend_handles_labels()
  drawing.legend(
    handles, labels, loc="outside lower center", ncols=3, frameon=False
  )
  drawing.savefig(path, dpi=144)


def with_run(results: study.Results, folder: pathlib.Path) -> list[str]:
  """The curve of a run, and the first table where N = 512 had as many rollouts:
  seconds of another machine are not compared.
  """
  points = arms.measured(folder)["points"]
  columns = ("samples", "busy_s", "pass_at_1", "dead", "best_at_256", "heldout")
  last = len(points["step"]) - 1
  rows = [
    [
      f"{points[k][i]:,.0f}" if k == "samples" else f"{points[k][i]:.3g}"
      for k in columns
    ]
    for i in sorted({round(x) for x in np.linspace(0, last, 8)})
  ]
  spent = min(points["samples"][-1], study.end(results, ["n512"], "samples"))
  every = results["n512"].values()
  at = float(
    np.mean(
      [
        np.interp(spent, r["points"]["samples"], r["points"]["busy_s"])
        for r in every
      ]
    )
  )
  machine = next(iter(every))["machine"]
  found = study.at_equal(results, [*FIRST], "busy_s", at)
  shown = lambda x: [number(x[k]) for k in ("pass_at_1", "dead", "heldout")]
  measured = [f"{points[k][-1]:.2f}" for k in ("pass_at_1", "dead", "heldout")]
  return [
    *table(["rollouts", "CPU-s", *columns[2:]], rows),
    "",
    f"At {at:.0f} CPU-s of {machine}, where N = 512 has {spent:,.0f} rollouts:",
    "",
    *table(
      ["", "pass@1", "dead prompts", "held-out", "seeds"],
      [
        [f"this run, {folder.name}", *measured, 1],
        *([NAMES[k], *shown(x), x["seeds"]] for k, x in found.items()),
      ],
    ),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("results", type=pathlib.Path)
  parser.add_argument("figure", type=pathlib.Path, nargs="?")
  parser.add_argument("--run", type=pathlib.Path)
  a = parser.parse_args()
  results = arms.read(a.results)
  if missing := FIRST.keys() - results:
    raise SystemExit(
      f"error: {a.results} has no run of {', '.join(sorted(missing))}, which "
      "the tables need; run bash launch/wall.sh, which resumes"
    )
  if a.run is not None:
    print(*with_run(results, a.run), sep="\n")
    return
  seconds = horizon(results)
  print(f"At {seconds:.0f} CPU-s:", *first_table(results), sep="\n")
  rollouts = horizon(results, "samples")
  equal = rollout_table(results)
  print(f"\nAt {rollouts:,.0f} rollouts:", *equal, sep="\n")
  for make in (progress_table, law_table, end_table):
    print("", *make(results), sep="\n")
  if a.figure is not None:
    figure(results, a.figure)


if __name__ == "__main__":
  main()
