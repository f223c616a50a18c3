"""Tables and the figure, from the results that there are.

  python -m launch.wall.report launch/wall/results.json launch/figures/wall.png
  python -m launch.wall.report launch/wall/results.json --run=runs/n512
  python -m launch.wall.report runs/wall/results --store=results.json

The second prints the first table with a run of yours in it, the third adds runs
to those that are stored.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from launch.wall import arms, study

PREDICTIONS = pathlib.Path(__file__).with_name("predictions.json")
# The arms of the first table.
FIRST = {
  "n16": "N = 16",
  "n16-8x-prompts": "N = 16, 8 x the prompts",
  "n512": "N = 512",
  "need": "16 to 512 by need",
  "n512-whitened": "N = 512, whitened",
}
LABELS = {"pass_at_1": "pass@1", "dead": "dead", "best_at_256": "best@256"}
NS = (8, 16, 32, 64, 128, 512)
# Task, advantages, samples of a step, pass@1, what is read there.
PROGRESS = (
  ("own", "maxrl", 2048, 0.3, "dead"),
  ("own", "maxrl", 2048, 0.3, "best_at_256"),
  ("own", "maxrl", 8192, 0.2, "dead"),
  ("countdown", "maxrl", 2048, 0.2, "dead"),
  ("steps", "maxrl", 2048, 0.15, "dead"),
)
KINDS = {
  "maxrl": "MaxRL",
  "grpo": "GRPO",
  "leave_one_out": "leave-one-out",
  "tokens": "whitened, the paper's",
}
END = (8, 16, 32, 128, 512, "need")
# Arms that no row of the table of ends has.
OTHERS = [
  name
  for name, (n, _, _, _, samples, _, widen) in arms.ARMS.items()
  if widen or "rate" in name or samples != (8192 if n == "need" else 2048)
]
COLOURS = dict(zip(FIRST, ("C0", "C9", "C3", "k", "C1"), strict=True))


def short(x: float, digits: int = 2) -> str:
  """.61, -.04, 1.00"""
  return f"{x:.{digits}f}".replace("0.", ".", 1)


def number(x: Mapping[str, float], digits: int = 2) -> str:
  """A mean with its interval: .61 (.55-.67)."""
  mean, low, high = (short(x[k], digits) for k in ("mean", "low", "high"))
  return f"{mean} ({low}{' to ' if x['low'] < 0.0 else '-'}{high})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """Lines of markdown."""
  lines = [head, ["---"] * len(head), *rows]
  return [f"| {' | '.join(map(str, row))} |" for row in lines]


def horizon(results: study.Results, by: str = "busy_s") -> float:
  """What all of the first table but its last have spent, rounded down."""
  most = study.end(results, [*FIRST][:-1], by)
  unit = 10.0 if by == "busy_s" else 50_000.0
  return most // unit * unit


def first_table(results: study.Results) -> list[str]:
  """The arms of the first table at equal CPU-seconds."""
  found = study.at_equal(results, [*FIRST], "busy_s", horizon(results))
  rows = [
    [
      FIRST[name],
      *(number(x[k]) for k in ("pass_at_1", "dead", "heldout")),
      short(x["best_at_256"]["mean"]),
      f"{x['samples'] / 1e6:.1f} M",
    ]
    for name, x in found.items()
  ]
  seeds = sorted(x["seeds"] for x in found.values())
  few = "" if seeds[0] == seeds[-1] else f"{seeds[0]} to "
  head = [f"{few}{seeds[-1]} seeds", "pass@1", "dead prompts", "held-out"]
  return table([*head, "best@256", "rollouts"], rows)


def progress_table(results: study.Results) -> list[str]:
  """Runs where they reach the same pass@1; of a row of own at one rate."""
  rows = []
  for task, kind, samples, level, measure in PROGRESS:
    batch = f", {samples:,} samples" if samples != 2048 else ""
    row = [f"{task}, {KINDS[kind]}{batch}", level, LABELS[measure]]
    for n in NS:
      keys = f"earlier/{task}/{kind}/{samples}/{n}", f"{task}-n{n}"
      found = (study.at_progress(results.get(k, {}), level) for k in keys)
      x = next((each[measure] for each in found if each), None)
      text = short(x["mean"]) if x else ""
      row.append(f"{text} ± {short(x['half'])}" if x and x["half"] else text)
    rows.append(row)
  return table(["runs", "at pass@1", "N =", *map(str, NS)], rows)


def law_table(results: study.Results) -> list[str]:
  """dead at the end = a - b log2 N: what was expected, and what came."""
  told = {"maxrl": 0.09, "grpo": 0.05}
  rows = []
  for kind, name in KINDS.items():
    if (x := study.slope(results, kind)) is not None:
      values = ", ".join(map(str, sorted(x["n"])))
      expected = told.get(kind, 0.0)
      one = f"{short(x['mean'], 3)}*"
      came = number(x, 3) if x["low"] < x["high"] else one
      mark = "" if abs(x["mean"] - expected) <= 0.02 else " ✗"
      rows.append([name, values, f"{short(expected)} ± .02", came + mark])
  return table(["advantages", "N", "b expected", "b found"], rows)


def at_end(results: study.Results, name: str) -> str:
  """.41 (.33-.49) at .59: dead at pass@1, at the end of the runs; * of one."""
  last = lambda k: study.prompts(results[name], k, "busy_s", np.inf)
  dead, p = study.interval(last("dead")), last("pass_at_1").mean()
  return f"{number(dead)} at {short(p)}{'*' if len(results[name]) == 1 else ''}"


def end_table(results: study.Results) -> list[str]:
  """Prompts dead and pass@1 at the ends of runs, by task and advantages."""
  rows: dict[tuple[str, str], dict[int | str, str]] = {}
  for name, arm in arms.ARMS.items():
    if name in results and name not in OTHERS:
      row = rows.setdefault((arm.task, arm.kind), {})
      row[arm.n] = at_end(results, name)
  cells = [
    [f"{task}, {KINDS[kind]}", *(row.get(n, "") for n in END)]
    for (task, kind), row in rows.items()
  ]
  head = ["by need" if n == "need" else f"N = {n}" for n in END]
  return table(["dead at pass@1", *head], cells)


def sentences(results: study.Results) -> list[str]:
  """What the tables do not show, a line each."""
  at, out = horizon(results, "samples"), []
  equal = study.at_equal(results, [*FIRST], "samples", at)
  each = [f"{FIRST[k]} {number(x['pass_at_1'])}" for k, x in equal.items()]
  out.append(f"- At {at:,.0f} rollouts pass@1 is: {'; '.join(each)}.")
  at = horizon(results)
  for first, other in (("n512", "n16"), ("need", "n512")):
    each = [
      f"{LABELS[k]} {number(study.difference(results, first, other, at, k))}"
      for k in ("pass_at_1", "dead")
    ]
    out.append(f"- {FIRST[first]} minus {FIRST[other]}: {', '.join(each)}.")
  dead, back = study.came_back(results)
  out.append(
    f"- Of {dead:,} dead half-way through a run, {back} ended above .01."
  )
  for name in [x for x in OTHERS if x in results and x not in FIRST]:
    at, was = arms.ARMS[name].widen, ""
    if at:
      each = [run["points"] for run in results[name].values()]
      then = np.mean([np.interp(at, x["step"], x["dead"]) for x in each])
      was = f"; {short(float(then))} at step {at}"
    out.append(f"- `{name}` ended with {at_end(results, name)}{was}.")
  return [*out, outside(results)]


def outside(results: study.Results) -> str:
  """Which ends were not as predicted."""
  told, out = json.loads(PREDICTIONS.read_text()), []
  (told,) = (x for x in told.values() if isinstance(x, dict))
  for name in [name for name in told if name in results]:
    for measure, (low, high) in told[name].items():
      p = study.prompts(results[name], measure, "busy_s", np.inf).mean()
      if not low - 0.005 <= p <= high + 0.005:
        what = f"`{name}` {LABELS[measure]} {short(p)}"
        out.append(f"{what} ({short(low)}-{short(high)})")
  return f"- Ends outside what was expected: {', '.join(out)}."


def figure(results: study.Results, path: pathlib.Path) -> None:
  """pass@1 by CPU-seconds, and prompts alive by pass@1."""
  drawing = matplotlib.figure.Figure((10.0, 4.2), layout="constrained")
  time, alive = drawing.subplots(1, 2)
  for name in FIRST:
    for i, run in enumerate(results[name].values()):
      points, label = run["points"], None if i else FIRST[name]
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
    handles, labels, loc="outside lower center", ncols=5, frameon=False
  )
  drawing.savefig(path, dpi=144)


def is_main_job(folder: pathlib.Path) -> bool:
  """Whether a run is one of configs/n512.py, with any advantages."""
  try:
    c = json.loads((folder / "config.json").read_text())["config"]
  except OSError:
    return False
  n = c["sampling"]["n"], c["sampling"]["rounds"]
  return n == (512, []) and c["policy"]["checkpoint"] == "embedded:hard"


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
  same = study.at_equal(results, ["n512"], "samples", spent)["n512"]
  at, machine = same["busy_s"], next(iter(results["n512"].values()))["machine"]
  found = study.at_equal(results, [*FIRST], "busy_s", at)
  shown = lambda x: [number(x[k]) for k in ("pass_at_1", "dead", "heldout")]
  measured = [short(points[k][-1]) for k in ("pass_at_1", "dead", "heldout")]
  return [
    *table(["rollouts", "CPU-s", *columns[2:]], rows),
    "",
    f"At {at:.0f} CPU-s of {machine}, where N = 512 has {spent:,.0f} rollouts:",
    "",
    *table(
      ["", "pass@1", "dead prompts", "held-out", "seeds"],
      [
        [f"this run, {folder.name}", *measured, 1],
        *([FIRST[k], *shown(x), x["seeds"]] for k, x in found.items()),
      ],
    ),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("results", type=pathlib.Path)
  parser.add_argument("figure", type=pathlib.Path, nargs="?")
  parser.add_argument("--run", type=pathlib.Path)
  parser.add_argument("--store", type=pathlib.Path)
  a = parser.parse_args()
  results = arms.read(a.results)
  if a.store is not None:
    stored = arms.read(a.store)
    results = stored | {k: stored.get(k, {}) | v for k, v in results.items()}
    arms.write(a.store, results)
  if missing := FIRST.keys() - results:
    raise SystemExit(
      f"error: {a.results} has no run of {', '.join(sorted(missing))}, which "
      "the tables need; run bash launch/wall.sh, which resumes"
    )
  if a.run is not None:
    if not is_main_job(a.run):
      raise SystemExit(
        f"error: --run={a.run} is no run of configs/n512.py; begin one: "
        f"python -m brorl_jax.main --config=configs/n512.py --workdir={a.run}"
      )
    print(*with_run(results, a.run), sep="\n")
    return
  print(f"At {horizon(results):.0f} CPU-s:", *first_table(results), sep="\n")
  for make in (sentences, progress_table, law_table, end_table):
    print("", *make(results), sep="\n")
  if a.figure is not None:
    figure(results, a.figure)


if __name__ == "__main__":
  main()
