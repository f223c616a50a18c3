"""Figures of the frontier."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker

from brorl_jax.report import figures
from brorl_jax.report.figures import Figure

TASKS = {
  "shared": "one rule for all prompts",
  "own": "an answer of its own for each prompt",
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
_COLOURS = {
  "8": "C0", "16": "C9", "32": "C2", "64": "C8", "128": "C1", "256": "C6",
  "512": "C3", "1024": "C5", "adaptive": "k",
}  # fmt: skip
_MARKERS = dict(zip(_COLOURS, "osD^vP*Xd", strict=True))


def title_of(q: Mapping[str, Any]) -> str:
  """A question in words."""
  out = f"{TASKS[q['task']]}, {q['pool']} prompts, {ADVANTAGES[q['advantage']]}"
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
  figure, axes = figures.axes_of(3 * ABREAST, height=2.8)
  for i, q in enumerate(some):
    _curves(axes[i], q, "pass_at_1", "pass@1")
    axes[i].set_title(_title(q))
    _curves(axes[ABREAST + i], q, "best_at_256", "best@256")
    _best(axes[2 * ABREAST + i], q)
  for i, axis in enumerate(axes):
    if i % ABREAST >= len(some):
      axis.remove()
  figures.legend(figure, axes)
  figures.save(figure, folder / file)
  caption = (
    "Exact, of the trained prompts, by rollouts generated; each N at its best "
    "rate by pass@1 for each budget; means over seeds and their range. Below: "
    "the N with the best pass@1, with its 95 % interval over prompts and "
    "seeds; crosses are what smaller budgets had predicted."
  )
  return Figure(file, "Which N for which budget", caption)


def _thousands(axis: Any) -> None:
  axis.set_xscale("log", base=2)
  axis.xaxis.set_major_formatter(ticker.EngFormatter(sep="", places=0))
  axis.set_xlabel("rollouts generated")


def _title(q: Mapping[str, Any]) -> str:
  task, *rest = title_of(q).split(", ")
  return f"{task},\n{', '.join(rest)}"


def _curves(axis: Any, q: Mapping[str, Any], key: str, label: str) -> None:
  for one in q["curves"]:
    if not one["budget"]:
      continue
    n, found = one["n"], one[key]
    axis.plot(
      one["budget"], found["mean"], color=_COLOURS[n], marker=_MARKERS[n],
      ms=4, lw=1.5, label=n if n == "adaptive" else f"N = {n}",
    )  # fmt: skip
    axis.fill_between(
      one["budget"], found["low"], found["high"], color=_COLOURS[n],
      alpha=0.15, lw=0,
    )  # fmt: skip
  _thousands(axis)
  axis.set_ylabel(label)


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
    axis.plot(at, list(map(float, n)), "x", color="C3", ms=9, mew=2)
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
  labels = ("<1e-4", "1e-3", ".01", ".1", ".5", ".9", "1")
  figure, axes = figures.axes_of(len(some), height=2.9)
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
  figures.legend(figure, axes)
  figures.save(figure, folder / "interference.png")
  caption = (
    "At the largest budget. Left: prompts that were lost on the way, although "
    "each began at .001 or above (but for the impossible ones of mixed pools)."
  )
  return Figure("interference.png", "Winners and losers", caption)
