"""The page, its figures and its JSON, from the results that there are.

python -m launch.frontier.report launch/frontier/results runs/frontier/report
"""

import argparse
import base64
import json
import pathlib
from typing import Any

import matplotlib

from brorl_jax.report import page
from launch.frontier import cells, draw, machine, plateau, study
from launch.frontier.cells import Number, Table

TITLE = "How many rollouts per prompt?"
COLUMNS = (
  ("rate", "rate", "rate"),
  ("seeds", "seeds", "count"),
  ("pass@1", "pass_at_1", "decimal"),
  ("held-out", "heldout", "decimal"),
  ("worst@4", "worst_at_4", "decimal"),
  ("best@4", "best_at_4", "decimal"),
  ("best@256", "best_at_256", "decimal"),
  ("lost, %", "lost", "percent1"),
  ("won, %", "won", "percent1"),
  ("CPU-s", "busy_s", "mean"),
)


def best_table(data: dict[str, Any]) -> Table:
  """The best N of each question by budget."""
  rows = []
  for i, q in enumerate(data["questions"]):
    for k, b in enumerate(q["budgets"]):
      path = ("questions", i, "budgets", k)
      number = lambda *at, path=path, kind="count": Number((*path, *at), kind)
      interval = lambda of, number=number: [
        number(of, "n"), " (", number(of, "low"), " to ", number(of, "high"),
        ")",
      ]  # fmt: skip
      sets: list[Any] = ["n/a"]
      if len(b["sets"]) == 2:
        sets = [number("sets", "even", "n"), ", ", number("sets", "odd", "n")]
      foretold: list[Any] = ["n/a"]
      if b["foretold"]:
        foretold = [number("foretold", "n", kind="value")]
      rows.append(
        [
          draw.title_of(q),
          number("budget"),
          interval("best"),
          interval("best_worst_at_4"),
          interval("best_best_at_4"),
          sets,
          foretold,
        ]
      )
  head = (
    "question", "budget", "best N by pass@1", "by worst@4", "by best@4",
    "in two sets of seeds", "predicted",
  )  # fmt: skip
  caption = (
    "Budgets are rollouts generated. In brackets the 95 % interval of a "
    "bootstrap over prompts and seeds. Predicted: from smaller budgets, before "
    "this one was run."
  )
  return Table("The best N", caption, head, rows, 1)


def question_table(data: dict[str, Any], i: int) -> Table:
  """All N of one question at its largest budget."""
  q = data["questions"][i]
  k = len(q["budgets"]) - 1
  rows: list[list[Any]] = []
  for j, cell in enumerate(q["budgets"][k]["cells"]):
    path = ("questions", i, "budgets", k, "cells", j)
    of = lambda key, path=path, cell=cell: (
      (*path, key, "mean") if isinstance(cell[key], dict) else (*path, key)
    )
    rows.append(
      [f"N = {cell['n']}" if cell["n"] != "adaptive" else "adaptive"]
      + [Number(of(key), kind) for _, key, kind in COLUMNS]
      + [
        Number((*path, "classes", name), "decimal") for name in cell["classes"]
      ]
    )
  classes = [f"p of {n}" for n in q["budgets"][k]["cells"][0]["classes"]]
  budget = Number(("questions", i, "budgets", k, "budget"), "count")
  caption: list[Any] = ["After ", budget, " rollouts, means over seeds."]
  if q["edges"]:
    left = ", ".join(f"N = {e['n']} at {e['budget']:,}" for e in q["edges"])
    caption.append(
      f" Left out, because the best rate was at the edge of the grid: {left}."
    )
  head = ["", *(c[0] for c in COLUMNS), *classes]
  return Table(draw.title_of(q), caption, head, rows, 1)


def cost_table() -> Table:
  """The same number of rollouts, of a policy with 1.5 billion parameters."""
  rows: list[list[Any]] = [
    [
      name,
      Number(("cost", "devices", i, "rollouts_per_hour"), "count"),
      Number(("cost", "devices", i, "hours"), "count"),
    ]
    for i, name in enumerate(study.PER_DEVICE_HOUR)
  ]
  caption: list[Any] = [
    Number(("cost", "rollouts"), "count"),
    " rollouts of at most 15,360 tokens and their updates, by the roofline: no "
    "machine needs less.",
  ]
  head = ("device", "rollouts per device-hour", "device-hours")
  return Table("The same of a 1.5B policy", caption, head, rows, 1)


def write(results: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Writes the page and its files; returns the page."""
  data = study.numbers(results)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "frontier.json").write_text(json.dumps(data, indent=1) + "\n")
  some, tested = data["questions"], bool(data["plateau"]["arms"])
  tables, drawn = [], []
  with matplotlib.rc_context(draw.STYLE):
    for i in range(0, len(some), draw.ABREAST):
      file = f"frontier{i // draw.ABREAST or ''}.png"
      drawn.append(draw.frontier(folder, some[i : i + draw.ABREAST], file))
    if some:
      drawn.append(draw.interference(folder, some))
      tables.append(best_table(data))
      tables += [question_table(data, i) for i in range(len(some))]
    if tested:
      drawn.append(draw.plateau(folder, data["plateau"]))
      tables = [*plateau.tables(data), *tables]
  tables.append(cost_table())
  image = lambda one: base64.b64encode((folder / one.file).read_bytes())
  text = page.document(
    title=TITLE,
    notes=[cells.plain(_cost(data), data)],
    images=[x._asdict() | {"base64": image(x).decode()} for x in drawn],
    tables=[cells.filled(table, data) for table in tables],
  )
  (folder / "index.html").write_text(text)
  for table in tables:
    print(table.title, cells.text(table, data), sep="\n")
  return folder / "index.html"


def _cost(data: dict[str, Any]) -> list[Any]:
  hours: list[Any] = []
  for i, one in enumerate(data["cost"]["machines"]):
    busy = Number(("cost", "machines", i, "hours"), "mean")
    hours += ["; " if i else "", busy, f" of {one['name']}"]
  return [
    "All of it, the tuning of rates included: ",
    Number(("cost", "runs"), "count"),
    " runs, ",
    Number(("cost", "rollouts"), "count"),
    " rollouts. Hours of one core or of one GPU, shared with others: ",
    *hours,
    ". Nothing here says what happens at 1.5 billion parameters.",
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("results", type=pathlib.Path)
  parser.add_argument("folder", type=pathlib.Path)
  a = parser.parse_args()
  with machine.one_line():
    print(write(a.results, a.folder))


if __name__ == "__main__":
  main()
