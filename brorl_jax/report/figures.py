"""Figures and the table of the simulator."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def figure3(path: str | pathlib.Path, runs: Sequence[Mapping[str, Any]]):
  """The paper's Figure 3: correct mass, improved share, worst drop, by step.

  Args:
    path: The PNG.
    runs: Results of `--mode=simulate`, one per N.
  """
  figure = Figure((13, 4), layout="constrained")
  axes = figure.subplots(1, 3)
  colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(runs)))
  parts = (
    ("correct_mass", 1, "correct mass", "Q_pos"),
    ("improved_fraction", 100, "correct tokens above their start", "%"),
    ("worst_drop", 1, "worst change of a correct token", "probability"),
  )
  for axis, (name, scale, title, unit) in zip(axes, parts, strict=True):
    for run, colour in zip(runs, colours, strict=True):
      y = scale * np.array(run[name])
      axis.plot(range(len(y)), y, color=colour, label=f"N = {run['n']:,}")
    axis.set(title=title, ylabel=unit, xlabel="step")
    _plain(axis)
  figure.supxlabel("means over seeds; right: the worst token of any", size=8)
  axes[0].legend(fontsize=8)
  figure.savefig(path, dpi=130)


def sweep(path: str | pathlib.Path, runs: Sequence[Mapping[str, Any]]):
  """Correct mass after the last step against N, by optimizer."""
  figure = Figure((13, 4), layout="constrained")
  axes = figure.subplots(1, 3)
  for axis, optimizer, colour in zip(
    axes[:2], ("adamw", "sgd"), ("C0", "C1"), strict=True
  ):
    some = [run for run in runs if run["optimizer"] == optimizer]
    n = [run["n"] for run in some]
    gain = [run["correct_mass"][-1] - run["correct_mass"][0] for run in some]
    axis.plot(n, gain, "o-", color=colour, label=optimizer)
    axis.axhline(0.0, color="k", lw=1, ls=":")
    axis.set(ylabel="change of Q_pos", title=f"{optimizer}: correct mass")
    improved = [100 * run["improved_fraction"][-1] for run in some]
    axes[2].plot(n, improved, "o-", color=colour, label=optimizer)
  axes[2].set(ylabel="%", title="correct tokens above their start")
  for axis in axes:
    axis.set(xscale="log", xlabel="N, draws per step")
    _plain(axis)
    axis.legend(fontsize=8)
  figure.savefig(path, dpi=130)


def simulation_table(runs: Sequence[Mapping[str, Any]]) -> str:
  """A table of the last values of every run."""
  out = [
    f"  {'optimizer':<10}{'N':>8}{'Q_pos':>9}{'change':>11}{'improved':>10}"
    f"{'worst now':>12}{'worst ever':>12}"
  ]
  out += [
    f"  {run['optimizer']:<10}{run['n']:>8,}{run['correct_mass'][-1]:>9.4f}"
    f"{run['correct_mass'][-1] - run['correct_mass'][0]:>+11.2e}"
    f"{run['improved_fraction'][-1]:>10.1%}{run['worst_drop'][-1]:>12.1e}"
    f"{min(run['worst_drop']):>12.1e}"
    for run in runs
  ]
  start = runs[0]["correct_mass"][0]
  return "\n".join([*out, f"  (Q_pos starts at {start:.4f})"])


def _plain(axis: Axes) -> None:
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)
