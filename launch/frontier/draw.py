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
  return out + (", whole recipe" if q["recipe"] == "whole" else "")


def frontier(
  folder: pathlib.Path, some: Sequence[Mapping[str, Any]], file: str
) -> Figure:
  """pass@1 by budget for each N, and below it which N is the best."""
  figure, axes = figures.axes_of(2 * len(some), height=3.1)
  for i, q in enumerate(some):
    _rewards(axes[2 * i], q)
    _best(axes[2 * i + 1], q)
  figures.legend(figure, axes)
  figures.save(figure, folder / file)
  caption = (
    "Left of each pair: exact pass@1 of the trained prompts by rollouts "
    "generated, each N at the best rate for each budget; means over seeds and "
    "their range. Right: the best N, with its 95 % interval over prompts and "
    "seeds; crosses are what smaller budgets had predicted."
  )
  return Figure(file, "Which N for which budget", caption)


def _thousands(axis: Any) -> None:
  axis.set_xscale("log", base=2)
  axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
  axis.set_xlabel("rollouts generated")


def _rewards(axis: Any, q: Mapping[str, Any]) -> None:
  for one in q["curves"]:
    if not one["budget"]:
      continue
    n = one["n"]
    axis.plot(
      one["budget"], one["pass_at_1"], color=_COLOURS[n], marker=_MARKERS[n],
      ms=4, lw=1.5, label=n if n == "adaptive" else f"N = {n}",
    )  # fmt: skip
    axis.fill_between(
      one["budget"], one["low"], one["high"], color=_COLOURS[n], alpha=0.15,
      lw=0,
    )  # fmt: skip
  _thousands(axis)
  words = title_of(q).split(", ")
  axis.set_title(f"{words[0]},\n{', '.join(words[1:])}")
  axis.set_ylabel("pass@1")


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
  axis.set_title("best N by budget")
  axis.set_ylabel("N")


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
    words = title_of(q).split(", ")
    axis.set_title(f"{words[0]},\n{', '.join(words[1:])}")
    axis.set_xticks(np.arange(len(labels)), labels)
    axis.set(xlabel="p of a prompt, up to", ylabel="share of prompts")
  figures.legend(figure, axes)
  figures.save(figure, folder / "interference.png")
  caption = (
    "At the largest budget. Left: prompts that were lost on the way, although "
    "each began at .001 or above (but for the impossible ones of mixed pools)."
  )
  return Figure("interference.png", "Winners and losers", caption)
