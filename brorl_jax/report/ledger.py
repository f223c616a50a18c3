"""The ledger of training prompts: what their rollouts were, visit by visit.

From visits.jsonl, a line for each prompt that a step drew. The report has the
table, the curves, and ledger.jsonl, a line for each prompt.
"""

import collections
import functools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from brorl_jax.report import figures
from brorl_jax.report.cells import Number, Table
from brorl_jax.report.figures import Figure
from brorl_jax.runs.lines import has_step

# Pass rates below the first are lost, above the second were there.
_LOST, _THERE = 0.01, 0.1
_WON = 0.5
_PARTS = 12  # of the curve: steps are taken together
_MOST_K = 512
_NUMBERS = ("drawn", "right", "invalid", "tokens")
_OTHERS = {"id": str, "task": str, "kept": bool}


def check(line: Any) -> None:
  """Raises ValueError if a line is no visit."""
  has_step(line)
  for name in _NUMBERS:
    if type(line.get(name)) is not int or line[name] < 0:
      raise ValueError(f"{name!r} is missing or not what a run writes")
  for name, kind in _OTHERS.items():
    if not isinstance(line.get(name), kind):
      raise ValueError(f"{name!r} is missing or not what a run writes")
  if line["right"] > line["drawn"]:
    raise ValueError("'right' is not what a run writes")


class Rest(NamedTuple):
  """When a prompt rests; see filter.rest_after and filter.rest_steps."""

  after: int  # rejections in a row; 0: never
  steps: int


_NEVER = Rest(0, 0)


def prompts(
  lines: Iterable[Mapping[str, Any]], rest: Rest = _NEVER
) -> list[dict[str, Any]]:
  """What became of each prompt, in the order of their first visits.

  Returns:
    For each prompt: id, task; visits, each with step, drawn, right, wrong,
    invalid; last_seen, its last step; of the last visit p, low, high: the
    share of right rollouts and its 95 % interval, and pass_at_k for 1, 2, 4,
    ... up to 512, unbiased if the number of rollouts does not hang on them;
    won: below .1 at the first visit and at least .5 at the last; lost: at
    least .1 at some visit, and below .01 at the last; rests: the last step
    for which it rests, None if it does not when the lines end.
  """
  found: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
  last = 0
  for line in lines:
    if line["drawn"]:
      found[line["id"]].append(line)
      last = max(last, line["step"])
  return [_prompt(seen, rest, last) for seen in found.values()]


def _prompt(
  seen: Sequence[Mapping[str, Any]], rest: Rest, last: int
) -> dict[str, Any]:
  rates = [line["right"] / line["drawn"] for line in seen]
  end = seen[-1]
  n, c = end["drawn"], end["right"]
  low, high = interval(n, c)
  rejected = [not line["kept"] for line in seen[-rest.after :]]
  until = end["step"] + rest.steps
  rests = rest.after and len(rejected) == rest.after and all(rejected)
  ks = [1 << i for i in range(min(n, _MOST_K).bit_length())]
  return {
    "id": end["id"],
    "task": end["task"],
    "visits": [
      {
        "step": line["step"],
        "drawn": line["drawn"],
        "right": line["right"],
        "wrong": line["drawn"] - line["right"] - line["invalid"],
        "invalid": line["invalid"],
      }
      for line in seen
    ],
    "last_seen": end["step"],
    "p": rates[-1],
    "low": low,
    "high": high,
    "pass_at_k": {str(k): pass_at_k(n, c, k) for k in ks},
    "won": len(seen) > 1 and rates[0] < _THERE and rates[-1] >= _WON,
    "lost": max(rates) >= _THERE and rates[-1] < _LOST,
    "rests": until if rests and until > last else None,
  }


def interval(n: int, c: int) -> tuple[float, float]:
  """Wilson's 95 % interval of a share of which c of n were seen."""
  p, z = c / n, 1.959964
  middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
  half = z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def summary(
  lines: Iterable[Mapping[str, Any]], rest: Rest = _NEVER
) -> dict[str, Any]:
  """What the page shows of a ledger; empty without a visit.

  Returns:
    prompts, visits, again: prompts with a second visit. never: prompts without
    a right rollout in any visit. won, lost, resting: see `prompts`. curve:
    means over the prompts of some steps, with unbiased pass@k.
  """
  every = prompts(lines, rest)
  steps: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
  for one in every:
    for visit in one["visits"]:
      steps[visit["step"]].append((visit["drawn"], visit["right"]))
  if not steps:
    return {}
  right = lambda one: sum(visit["right"] for visit in one["visits"])
  return {
    "prompts": len(every),
    "visits": sum(len(one["visits"]) for one in every),
    "again": sum(len(one["visits"]) > 1 for one in every),
    "never": sum(not right(one) for one in every),
    "won": sum(one["won"] for one in every),
    "lost": sum(one["lost"] for one in every),
    "resting": sum(one["rests"] is not None for one in every),
    "curve": _curve(steps),
  }


def write(
  path: pathlib.Path,
  runs: Iterable[tuple[str, Iterable[Mapping[str, Any]], Rest]],
) -> None:
  """A line for each prompt of each run, by name; no file without a visit."""
  lines = [
    json.dumps({"run": name, **one}) + "\n"
    for name, visits, rest in runs
    for one in prompts(visits, rest)
  ]
  if lines:
    path.write_text("".join(lines))


def _curve(steps: Mapping[int, Sequence[tuple[int, int]]]) -> list[Any]:
  """Pass@k of the prompts of some steps, for k up to what every one drew."""
  fewest = min(n for some in steps.values() for n, _ in some)
  ks = [1 << i for i in range(fewest.bit_length())]
  parts = np.array_split(sorted(steps), min(_PARTS, len(steps)))
  return [
    {
      "step": int(part[-1]),
      "pass_at_k": {
        str(k): float(
          np.mean([pass_at_k(n, c, k) for s in part for n, c in steps[int(s)]])
        )
        for k in ks
      },
    }
    for part in parts
  ]


@functools.lru_cache(maxsize=2**16)
def pass_at_k(n: int, c: int, k: int) -> float:
  """1 - C(n - c, k) / C(n, k), as rl/pass_at_k.py has it for many c of one n.

  Prompts have numbers of their own: that would be a program for each n and k.
  """
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def draw(folder: pathlib.Path, data: Mapping[str, Any]) -> list[Figure]:
  """Pass@k of the training prompts over time, if a run has a ledger."""
  runs = [(i, x) for i, x in enumerate(data["runs"]) if x["visits"]]
  if not runs:
    return []
  ks = {
    k: None for _, run in runs for k in run["visits"]["curve"][0]["pass_at_k"]
  }
  every = [*ks]
  # The first, one in between and the last.
  shown = dict.fromkeys([every[0], every[len(every) // 2], every[-1]])
  with matplotlib.rc_context(figures.STYLE):
    figure, axes = figures.axes_of(len(shown), height=2.5)
    for axis, k in zip(axes, shown, strict=True):
      for i, run in runs:
        curve = [x for x in run["visits"]["curve"] if k in x["pass_at_k"]]
        x, y = [x["step"] for x in curve], [x["pass_at_k"][k] for x in curve]
        axis.plot(x, 100 * np.array(y), ms=4, **figures.look(i, run))
      axis.set(title=f"pass@{k}", xlabel="step", ylabel="prompts, %")
      axis.set_ylim(0.0, 100.0)
    figures.legend(figure, axes)
    figures.save(figure, folder / "ledger.png")
  caption = (
    "Training prompts as they are drawn, kept or not, at the temperature of "
    "training: the share of which one of k rollouts is right, without bias "
    "from all rollouts of the prompt. Where pass@1 rises and the last panel "
    "falls, training takes away what the policy could do."
  )
  return [Figure("ledger.png", "Pass@k of the training prompts", caption)]


def table(data: Mapping[str, Any], number: int) -> Table:
  """What became of the prompts of each run."""
  names = "prompts", "visits", "again", "won", "lost", "never", "resting"
  rows = [
    [
      run["name"],
      *(Number(("runs", i, "visits", name), "count") for name in names),
    ]
    for i, run in enumerate(data["runs"])
    if run["visits"]
  ]
  caption = (
    "Training prompts that were drawn, kept or not. Seen again: with a second "
    "visit. Of those: won, of less than a tenth right rollouts at the first "
    "visit and at least half at the last; lost, of a tenth or more at some "
    "visit and less than a hundredth at the last. Never: without a right one. "
    "Resting: rejected too often in a row to be drawn next. Each prompt is a "
    "line of ledger.jsonl."
  )
  head = ["run", "prompts", "visits", "seen again", *names[3:]]
  return Table(f"Table {number}. Ledger of prompts", caption, head, rows, 1)
