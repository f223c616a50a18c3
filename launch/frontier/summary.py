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
  head = [
    "prompts, advantages",
    "rollouts",
    "pass@1 by N",
    "best N",
    "predicted",
  ]
  out = [row(head), row(["---"] * len(head)).replace(" ", "")]
  for question in data["questions"]:
    last = question["budgets"][-1]
    rates = (f"{c['n']}: {c['pass_at_1']['mean']:.3f}" for c in last["cells"])
    foretold = last["foretold"]
    cells = [
      draw.title_of(question),
      f"{last['budget']:,}",
      ", ".join(rates),
      best(last["best"]),
      str(foretold["n"]) if foretold else "",
    ]
    out.append(row(cells))
  return out


def of_plateau(data: Mapping[str, Any]) -> list[str]:
  """The arms, and what N = 512 with 8 times the samples is ahead by."""
  head = [
    "from where N = 16 had stopped", "held-out", "gain", "expected",
    "trained prompts in reach", "held-out at equal time",
    "N = 512, 8 x samples, minus this",
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
      f"{arm['heldout']:.3f}",
      f"{arm['heldout_gain']:+.3f}",
      "" if arm["expected"] is None else f"{arm['expected']:+.2f}",
      f"{arm['in_reach']:.3f}",
      f"{arm['heldout_at_time']:.3f}",
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
