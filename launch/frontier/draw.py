"""Figures of the frontier."""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np
from matplotlib import ticker

from launch.frontier.plateau import LABELS

TASKS = {
  "shared": "one shared rule",
  "own": "no shared rule",
  "countdown": "many right answers",
  "reasoning": "steps before the answer",
}
ADVANTAGES = {
  "leave_one_out": "leave-one-out",
  "grpo": "GRPO",
  "maxrl": "MaxRL",
  "tokens": "the paper's",
}
ABREAST = 3  # questions of a figure
_ABOVE = 34  # characters above a panel
_COLOURS = {
  "8": "C0", "16": "C9", "32": "C2", "64": "C8", "128": "C1", "256": "C6",
  "512": "C3", "1024": "C5", "adaptive": "k",
}  # fmt: skip
_MARKERS = dict(zip(_COLOURS, "osD^vP*Xd", strict=True))
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


def axes_of(count: int, *, height: float) -> tuple[Any, Sequence[Any]]:
  """A figure as wide as the page with `count` axes, three in a row."""
  columns = min(count, 3)
  rows = -(-count // columns)
  figure = matplotlib.figure.Figure(
    (10.0, rows * height + 0.5), layout="constrained"
  )
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
  longest = max(map(len, every)) + 8  # the line before it
  figure.legend(
    [*every.values()],
    [*every],
    loc="outside lower center",
    ncols=max(1, min(len(every), 4, 120 // longest)),
    frameon=False,
    handlelength=3,
  )


def save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
  """Saves a figure as a PNG that is sharp on fine screens."""
  figure.savefig(path, dpi=144)


def title_of(q: Mapping[str, Any]) -> str:
  """A question in words."""
  prompts = "puzzles" if q["pool"] == "puzzles" else f"{q['pool']} prompts"
  out = f"{TASKS[q['task']]}, {prompts}, {ADVANTAGES[q['advantage']]}"
  if q["samples"] != 2048:
    out += f", {q['samples']:,} samples per step"
  out += ", rate to 0" if q["decayed"] else ""
  out += ", whole recipe" if q["recipe"] == "whole" else ""
  return out + (", more values of N" if "adaptive" in q["ns"] else "")


def frontier(
  folder: pathlib.Path, some: Sequence[Mapping[str, Any]], file: str
) -> Figure:
  """By budget: pass@1 of each N, best@256 of each, and which N is the best.

  Args:
    folder: Where the figure goes.
    some: At most ABREAST questions.
    file: Its name.
  """
  figure, axes = axes_of(4 * ABREAST, height=2.8)
  for i, q in enumerate(some):
    _curves(axes[i], q, "pass_at_1", "pass@1")
    _envelope(axes[i], q)
    axes[i].set_title(_title(q))
    _curves(axes[ABREAST + i], q, "best_at_256", "best@256")
    _best(axes[2 * ABREAST + i], q)
    seconds = axes[3 * ABREAST + i]
    _curves(seconds, q, "pass_at_1", "pass@1", by="busy_s")
    seconds.set_xlabel("CPU-seconds of the steps")
  for i, axis in enumerate(axes):
    if i % ABREAST >= len(some):
      axis.remove()
  # The panel with the most values of N first, for they are in order there.
  legend(figure, sorted(axes, key=lambda a: -len(a.get_lines())))
  save(figure, folder / file)
  caption = (
    "Exact, of the trained prompts (where answers have steps: from 16 samples, "
    "of held-out ones), by rollouts generated; each N at its best rate by "
    "pass@1 for each budget; means over seeds and their range; dotted: the "
    "best of all N; dashed: before training. Third row: the N with the best "
    "pass@1, with its 95 % interval over prompts and seeds; crosses are what "
    "smaller budgets had predicted. Last row: the same budgets by what they "
    "cost."
  )
  return Figure(file, "Which N for which budget", caption)


def _thousands(axis: Any) -> None:
  axis.set_xscale("log", base=2)
  axis.xaxis.set_major_formatter(ticker.EngFormatter(sep="", places=0))
  axis.set_xlabel("rollouts generated")


def _title(q: Mapping[str, Any]) -> str:
  task, rest = title_of(q).split(", ", 1)
  return f"{task},\n{textwrap.fill(rest, _ABOVE)}"


def _curves(
  axis: Any, q: Mapping[str, Any], key: str, label: str, *, by: str = "budget"
) -> None:
  for one in q["curves"]:
    if not one["budget"]:
      continue
    n, found = one["n"], one[key]
    x = one[by] if by == "budget" else one[by]["mean"]
    axis.plot(
      x, found["mean"], color=_COLOURS[n], marker=_MARKERS[n],
      ms=4, lw=1.5, label=n if n == "adaptive" else f"N = {n}",
    )  # fmt: skip
    axis.fill_between(
      x, found["low"], found["high"], color=_COLOURS[n],
      alpha=0.15, lw=0,
    )  # fmt: skip
  axis.axhline(q["start"][key], color="C7", ls="--", lw=1)
  _thousands(axis)
  axis.set_ylabel(label)


def _envelope(axis: Any, q: Mapping[str, Any]) -> None:
  """The best of all N at each budget that all of them have reached."""
  best = [max(c["pass_at_1"]["mean"] for c in b["cells"]) for b in q["budgets"]]
  axis.plot([b["budget"] for b in q["budgets"]], best, "k:", lw=3, alpha=0.5)


def _best(axis: Any, q: Mapping[str, Any]) -> None:
  x = np.array([b["budget"] for b in q["budgets"]])
  best = [b["best"] for b in q["budgets"]]
  y = np.array([one["n"] for one in best], float)
  low = y - np.array([one["low"] for one in best])
  high = np.array([one["high"] for one in best]) - y
  axis.errorbar(
    x, y, [np.maximum(low, 0), np.maximum(high, 0)], fmt="ko-", ms=5, capsize=3
  )
  told = [
    (b["budget"], b["foretold"]["n"]) for b in q["budgets"] if b["foretold"]
  ]
  if told:
    at, n = zip(*told, strict=True)
    # Beside the point, not on the end of its interval.
    axis.plot(
      np.array(at) * 1.12, [*map(float, n)], "x", color="C3", ms=9, mew=2
    )
  axis.set_yscale("log", base=2)
  fixed = [int(n) for n in q["ns"] if n.isdigit()]
  axis.set(yticks=fixed, ylim=(min(fixed) / 1.5, max(fixed) * 1.5))
  axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
  _thousands(axis)
  axis.set_ylabel("best N")


def interference(
  folder: pathlib.Path, some: Sequence[Mapping[str, Any]]
) -> Figure:
  """How the prompts' p is spread at the largest budget, by N."""
  labels = ("1e-4", "1e-3", ".01", ".1", ".5", ".9", "1")
  figure, axes = axes_of(len(some), height=2.9)
  for axis, q in zip(axes, some, strict=True):
    cells = q["budgets"][-1]["cells"]
    width = 0.8 / len(cells)
    for i, cell in enumerate(cells):
      n = cell["n"]
      at = np.arange(len(labels)) + (i - (len(cells) - 1) / 2) * width
      axis.bar(
        at, cell["histogram"], width, color=_COLOURS[n],
        label=n if n == "adaptive" else f"N = {n}",
      )  # fmt: skip
    axis.set_title(_title(q))
    axis.set_xticks(np.arange(len(labels)), labels)
    axis.set(xlabel="p of a prompt, up to", ylabel="share of prompts")
  legend(figure, sorted(axes, key=lambda a: -len(a.patches)))
  save(figure, folder / "interference.png")
  caption = (
    "At the largest budget. Left: prompts that were lost on the way, although "
    "each began at .001 or above (but for the impossible ones of mixed pools)."
  )
  return Figure("interference.png", "Winners and losers", caption)


def plateau(folder: pathlib.Path, test: Mapping[str, Any]) -> Figure:
  """Each arm of the test, and what `paper` is ahead of it by."""
  figure, axes = axes_of(2, height=2.9)
  ends, ahead = axes
  for i, arm in enumerate(test["arms"]):
    ends.plot(arm["heldout_by_seed"], [i] * arm["seeds"], "o", color="C7", ms=4)
    ends.plot(arm["heldout"], i, "ks", ms=6)
    ends.plot(arm["heldout_at_time"], i, "x", color="C3", ms=8, mew=2)
  ends.set_yticks(
    range(len(test["arms"])), [LABELS[arm["arm"]] for arm in test["arms"]]
  )
  ends.set_xlabel("held-out pass@1 (squares; cross: at equal time)")
  for i, one in enumerate(test["against"]):
    for side, down, colour in (("heldout", 0.0, "k"), ("train", 0.25, "C0")):
      told = one[side]
      half = [[told["mean"] - told["low"]], [told["high"] - told["mean"]]]
      ahead.errorbar(
        told["mean"], i + down, xerr=half, fmt="o", color=colour, capsize=3
      )
  ahead.axvline(0.0, color="k", lw=1)
  ahead.set_yticks(
    range(len(test["against"])), [LABELS[one["arm"]] for one in test["against"]]
  )
  ahead.set_xlabel(f"{LABELS['paper']}, minus it")
  for axis in axes:
    axis.invert_yaxis()
  save(figure, folder / "plateau.png")
  caption = (
    "After equal rollouts. Small dots are seeds. Right: differences with their "
    "95 % interval, paired and clustered by prompt; black on held-out prompts, "
    "blue on trained ones."
  )
  return Figure("plateau.png", "From where N = 16 had stopped", caption)
