"""Tables and figures of the revival experiment, from what has run so far.

  python -m launch.revival.report runs/revival

Writes runs/revival/report/: revival.json, index.html, and PNGs.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib

from brorl_jax.report import cells, figures, page
from brorl_jax.report.cells import Number, Table
from launch.revival import draw, study
from launch.revival.draw import ARMS, BRANCHES, WINGS, branches

EXACT = (
  ("pass@1", "pass_at_1", "decimal"),
  ("pass@1, prompts of the warm-up only", "heldout", "decimal"),
  ("distinct right in 256", "distinct", "mean"),
  ("right answers above 1e-4, %", "covered", "percent1"),
  ("right answers that lost mass, %", "fell", "percent1"),
  ("mass they lost", "lost", "decimal"),
  ("prompts below .05, %", "dead", "percent1"),
)
STEPS = (
  ("pass@1", "pass_at_1", "decimal"),
  ("different right answers in 64", "distinct", "mean"),
  ("mass of right answers with right steps", "known", "decimal"),
  ("right responses above 1e-4, %", "covered", "percent1"),
  ("right responses that lost mass, %", "fell", "percent1"),
  ("mass they lost", "lost", "decimal"),
  ("prompts below .05, %", "dead", "percent1"),
)
SAMPLED = (("held-out pass@1", "pass_at_1", "decimal"),)


def columns_of(arms: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
  """What was measured of a branch: header, name, and kind of number."""
  end = next(iter(arms.values()))["end"]
  if "known" in end:
    return STEPS
  return EXACT if "dead" in end else SAMPLED


def ends(data: Mapping[str, Any], wing: str, where: str) -> Table:
  """Each arm after its time, and after as many samples as all had."""
  arms = data["wings"][wing][where]["arms"]
  base: tuple[str, ...] = ("wings", wing, where, "arms")
  columns = columns_of(arms)
  first = next(iter(arms))
  mean = lambda path, kind: Number((*base, *path, "mean"), kind)
  rows: list[list[Any]] = [
    ["where they begin", "", "", "", "", "", "", ""]
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
          Number((*base, name, "prompts_per_step"), "count"),
          Number((*base, name, "lr"), "rate"),
          Number((*base, name, "lr_sqrt_rule"), "rate"),
          Number((*base, name, "seeds"), "count"),
          samples,
          [span[0], " to ", span[1]],
          *(measure(key, kind) for _, key, kind in columns),
        ]
      )
  caption = (
    "Means over seeds; the range is that of the seeds. Learning rates were "
    "tuned for each arm with another seed; the next column applies the sqrt "
    "rule to that of N = 16. Time: processor seconds of the steps, without "
    "compiling, evaluations and checkpoints."
  )
  if columns is STEPS:
    caption += (
      " pass@1 and different answers: of 64 samples of each prompt, whatever "
      "the steps. Right responses: answer and steps."
    )
  head = [
    "at",
    "arm",
    "prompts per step",
    "learning rate",
    "sqrt rule",
    "seeds",
  ]
  head += ["samples, thousands"]
  head += ["range of pass@1", *(name for name, _, _ in columns)]
  title = f"{WINGS[wing]}, {BRANCHES[where]}"
  return Table(title, caption, head, rows, 2)


def levels(data: Mapping[str, Any], wing: str, where: str) -> Table | None:
  """Arms when they reach the same pass@1."""
  arms = data["wings"][wing][where]["arms"]
  base: tuple[str, ...] = ("wings", wing, where, "arms")
  columns = [c for c in columns_of(arms) if c[1] != "pass_at_1"]
  if not columns:
    return None
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


def stood(data: Mapping[str, Any]) -> Table:
  """Where N = 16 stood still, if it did."""
  columns = (
    ("pass@1", "pass_at_1", "decimal"),
    ("steps", "steps", "count"),
    ("processor seconds", "busy_s", "rate"),
    ("learning rate", "lr", "rate"),
  )
  rows = [
    [title, "yes" if data["stood"][wing]["still"] else "no"]
    + [Number(("stood", wing, key), kind) for _, key, kind in columns]
    for wing, title in WINGS.items()
    if wing in data["stood"]
  ]
  caption = (
    "Still: over the last third of the steps pass@1 gained nothing significant "
    "(paired over prompts, one-sided p of 5 %) and changed by less than .03 "
    "(two one-sided tests, 5 %). At the best of the rates that were tried."
  )
  head = ["wing", "still", *(c[0] for c in columns)]
  return Table("Where N = 16 stood still", caption, head, rows, 2)


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
      base = ("wings", wing, where, "arms", name)
      back = Number((*base, "revived"), "percent1")
      for other in ("n16", "n16_distinct"):
        if f"against_{other}" in arm:
          path = (*base, f"against_{other}")
          numbers = [Number((*path, key), kind) for _, key, kind in columns]
          names = [ARMS[name][0], ARMS[other][0]]
          rows.append([wing, BRANCHES[where], *names, *numbers, back])
  caption = (
    "At equal time, arm less the other: the last pass@1 of each prompt and "
    "seed, paired; two-sided p, plain and with errors clustered by prompt. It "
    "holds for other prompts, not for other policies to begin with; how far "
    "seeds differ is in the ranges below. Revived: prompts whose pass@1 was "
    "below .05 where the arm began and is .5 or more at the end; of puzzles, "
    "which 16 samples measure, some are by chance, in all arms alike."
  )
  head = ["wing", "branch", "arm", "less", *(c[0] for c in columns)]
  title = "Against N = 16"
  return Table(title, caption, [*head, "revived, %"], rows, 4)


def sweep_table(data: Mapping[str, Any]) -> Table:
  """N at a constant number of samples per step."""
  columns = (
    ("N", "n", "count"),
    ("steps", "steps", "count"),
    ("prompts seen in step 1", "prompts_seen", "count"),
    ("kept, %", "pass_rate", "percent1"),
    ("foretold, %", "pass_rate_predicted", "percent1"),
    ("± standard error", "pass_rate_predicted_se", "percent1"),
    ("variance of rewards in a group", "reward_variance", "decimal"),
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
    "rate not tuned. Kept and variance: of the first step. Foretold: from 512 "
    "samples of each of 480 other prompts that training may draw. Gains: of "
    "held-out pass@1 at temperature 1."
  )
  title = "N at a constant number of samples per step"
  return Table(title, caption, [c[0] for c in columns], rows, 0)


def write(root: pathlib.Path) -> pathlib.Path:
  """Writes the page and its files; returns the page."""
  data = study.numbers(root)
  if not any((data["wings"], data["stood"], data["sweep"])):
    raise SystemExit(
      f"{root} has no results yet: run launch/reproduce.sh there"
    )
  folder = root / "report"
  folder.mkdir(exist_ok=True)
  (folder / "revival.json").write_text(json.dumps(data, indent=1) + "\n")
  drawn: list[figures.Figure | None] = []
  tables = []
  with matplotlib.rc_context(figures.STYLE):
    if branches(data):
      drawn.append(draw.overview(folder, data))
      drawn.append(draw.curves(folder, data, "busy_s", "processor seconds"))
      drawn.append(draw.curves(folder, data, "samples", "samples generated"))
      drawn.append(draw.shrinkage(folder, data))
      tables.append(tests(data))
    if data["stood"]:
      tables.append(stood(data))
    for wing, where in branches(data):
      tables.append(ends(data, wing, where))
      if (table := levels(data, wing, where)) is not None:
        tables.append(table)
    if data["sweep"]:
      drawn.append(draw.sweep(folder, data))
      tables.append(sweep_table(data))
  body = [page.figure(one, folder) for one in drawn if one is not None]
  body += [page.table(one, data) for one in tables]
  html = page.document("The revival experiment", body)
  (folder / "index.html").write_text(html)
  for table in tables:
    print(table.title, cells.text(table, data), sep="\n")
  return folder / "index.html"


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("root", type=pathlib.Path)
  print(write(parser.parse_args().root))


if __name__ == "__main__":
  main()
