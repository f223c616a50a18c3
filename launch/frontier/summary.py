"""The tables of README.md in this folder, in Markdown.

python -m launch.frontier.summary launch/frontier/results
"""

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from launch.frontier import draw, plateau, study


def row(some: Sequence[str]) -> str:
  return f"| {' | '.join(some)} |"


def short(value: float) -> str:
  """.123"""
  return f"{value:.3f}".replace("0.", ".", 1)


def best(one: Mapping[str, Any]) -> str:
  return f"{one['n']} ({one['low']} to {one['high']})"


def of_n(data: Mapping[str, Any]) -> list[str]:
  """Each question at its largest budget."""
  ns = ("8", "16", "32", "64", "128", "256", "512", "1024", "adaptive")
  used = [
    n for n in ns if any(n in question["ns"] for question in data["questions"])
  ]
  head = [
    "prompts, advantages", "rollouts", *used, "best N", "by worst@4",
    "by best@4", "predicted",
  ]  # fmt: skip
  out = [row(head), row(["---"] * len(head)).replace(" ", "")]
  for question in data["questions"]:
    last = question["budgets"][-1]
    rates = {c["n"]: c["pass_at_1"]["mean"] for c in last["cells"]}
    foretold = last["foretold"]
    cells = [
      draw.title_of(question),
      f"{last['budget']:,}",
      *(short(rates[n]) if n in rates else "" for n in used),
      best(last["best"]),
      str(last["best_worst_at_4"]["n"]),
      str(last["best_best_at_4"]["n"]),
      str(foretold["n"]) if foretold else "",
    ]
    out.append(row(cells))
  return out


def of_plateau(data: Mapping[str, Any]) -> list[str]:
  """The arms, and what N = 512 with 8 times the samples is ahead by."""
  head = [
    "from where N = 16 had stopped", "rate", "held-out", "gain",
    "expected", "trained", "of those in reach", "held-out at equal time",
    "N = 512, 8 x samples, minus it",
  ]  # fmt: skip
  out = [row(head), row(["---"] * len(head)).replace(" ", "")]
  test = data["plateau"]
  ahead = {one["arm"]: one["heldout"] for one in test["against"]}
  for arm in test["arms"]:
    minus = ""
    if (found := ahead.get(arm["arm"])) is not None:
      low, high = (f"{found[side]:+.3f}" for side in ("low", "high"))
      minus = f"{found['mean']:+.3f} ({low} to {high})"
    cells = [
      plateau.LABELS[arm["arm"]],
      f"{arm['rate']:.2g}",
      short(arm["heldout"]),
      f"{arm['heldout_gain']:+.3f}",
      "" if arm["expected"] is None else f"{arm['expected']:+.2f}",
      short(arm["train"]),
      short(arm["in_reach"]),
      short(arm["heldout_at_time"]),
      minus,
    ]
    out.append(row(cells))
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("results", type=pathlib.Path)
  data = study.numbers(parser.parse_args().results)
  print("\n".join(of_n(data)))
  if data["plateau"]["arms"]:
    print("\n" + "\n".join(of_plateau(data)))


if __name__ == "__main__":
  main()
