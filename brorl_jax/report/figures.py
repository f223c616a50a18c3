"""PNGs and tables for the terminal: of one run, and of the simulator."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from brorl_jax.report import stats
from brorl_jax.runs import lines

# What the figure and the table read of a line of metrics.jsonl.
METRICS = (
  "data/samples_total sampling/degenerate_fraction sampling/pass_rate "
  "reward/mean rollout/tokens_per_s"
).split()


def check_step(line: Any) -> None:
  """Raises ValueError if a line of metrics.jsonl cannot be drawn."""
  lines.has_scalars(line)
  for name in METRICS:
    if line.get(name) is None:
      raise ValueError(f"{name!r} is missing")


def check_evaluation(line: Any) -> None:
  """Raises ValueError if a line of eval/curve.jsonl cannot be drawn."""
  lines.has_step(line)
  number = lines.is_number
  every = lambda x: all(map(number, x))
  rates, families = line.get("rates"), line.get("by_family")
  half, summary = line.get("half_width", "missing"), line.get("summary")
  valid = {
    "pass_at_1": number(line.get("pass_at_1")),
    "half_width": half is None or number(half),
    "by_family": isinstance(families, dict) and every(families.values()),
    "rates": isinstance(rates, list) and bool(rates) and every(rates),
    "summary": isinstance(summary, dict)
    and isinstance(summary.get("by_domain"), dict),
  }
  for name in valid:
    if not valid[name]:
      raise ValueError(f"not an evaluation: {name!r} is missing or wrong")


def learning_curve(
  path: str | pathlib.Path,
  evaluations: Sequence[Mapping[str, Any]],
  steps: Sequence[Mapping[str, Any]],
  *,
  title: str,
) -> None:
  """Draws held-out pass@1 with its interval, and metrics of training prompts.

  Args:
    path: The PNG; its folder is created.
    evaluations: Lines of eval/curve.jsonl.
    steps: Lines of metrics.jsonl.
  """
  figure = Figure((11, 5.2), layout="constrained")
  grid = figure.add_gridspec(2, 2)
  heldout, shares, entropy = (
    figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1])
  )
  _draw_heldout(heldout, evaluations)
  _draw_training(shares, entropy, steps)
  for axis in (heldout, shares, entropy):
    _plain(axis)
    whole = MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
    axis.xaxis.set_major_locator(whole)
  for axis in (heldout, entropy):
    axis.set_xlabel("step")
  for axis, below in ((heldout, -0.12), (shares, -0.1)):
    axis.legend(  # inside it would hide lines
      fontsize=8,
      ncols=3,
      loc="upper center",
      bbox_to_anchor=(0.5, below),
      frameon=False,
    )
  figure.suptitle(title)
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=130)


def _plain(axis: Axes) -> None:
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)


def _draw_heldout(axis: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
  """Draws pass@1 of each family, and of all with its interval."""
  x = np.array([e["step"] for e in evaluations])
  mean = np.array([e["pass_at_1"] for e in evaluations])
  half = np.array([e["half_width"] for e in evaluations], float)  # None: NaN
  axis.plot(x, mean, "k-o", lw=2, ms=4, label="mean, 95 % interval", zorder=3)
  for family in evaluations[0]["by_family"]:
    y = [e["by_family"].get(family, np.nan) for e in evaluations]
    axis.plot(x, y, lw=1, alpha=0.6, label=family)
  axis.fill_between(x, mean - half, mean + half, color="k", alpha=0.15, lw=0)
  domains = ", ".join(evaluations[0]["summary"]["by_domain"])
  axis.set(ylabel="pass@1", title=f"held-out prompts: {domains}", ylim=(0, 1))


def _draw_training(
  shares: Axes, entropy: Axes, steps: Sequence[Mapping[str, Any]]
) -> None:
  """Draws rewards and shares of the training prompts, and the entropy."""
  x = np.array([s["step"] for s in steps])
  look: Any = {"lw": 1.5, "marker": "o" if len(x) == 1 else ""}
  reward = np.array([s["reward/mean"] for s in steps])
  # Not the kept prompts: without a filter these are all prompts.
  mixed = 1.0 - np.array([s["sampling/degenerate_fraction"] for s in steps])
  shares.plot(x, reward, **look, label="mean reward")
  shares.plot(x, mixed, **look, label="prompts with a gradient")
  # A length penalty may make rewards negative.
  shares.set_ylim(min(0.0, *reward), max(1.02, *reward))
  shares.set_title("training prompts")
  # Of a step without an update there is none: a gap.
  nats = np.array([s.get("policy/entropy") for s in steps], float)
  entropy.plot(x, nats, "C2", **look)
  entropy.set(title="entropy", ylabel="nats per token", ylim=(0.0, None))


def table(
  before: Mapping[str, Any],
  after: Mapping[str, Any],
  steps: Sequence[Mapping[str, Any]],
) -> str:
  """The result of a run in a few lines.

  Args:
    before: First line of eval/curve.jsonl.
    after: Last line of it.
    steps: Lines of metrics.jsonl.
  """
  gain = "unknown: the held-out prompts changed"
  if len(before["rates"]) == len(after["rates"]):
    gained = np.subtract(after["rates"], before["rates"])
    gain = f"{gained.mean():+.3f}"
    if len(gained) > 1:
      gain += f" +- {stats.mean_interval(gained)[1]:.3f}"
  half = lambda x: "" if x is None else f" +- {x:.3f}"
  interval = lambda e: f"{e['pass_at_1']:.3f}{half(e['half_width'])}"
  mean_of = lambda of, name: of([s[name] for s in steps])
  # The median, because the first step compiles.
  tokens_per_s = mean_of(np.median, "rollout/tokens_per_s")
  rows = (
    ("held-out pass@1 before", interval(before)),
    (f"held-out pass@1 after {steps[-1]['step']} steps", interval(after)),
    ("gain, same prompts", gain),
    ("rollouts", f"{steps[-1]['data/samples_total']:,}"),
    ("sampled tokens per second", f"{tokens_per_s:,.0f}"),
    (
      "dynamic sampling, prompts kept",
      f"{mean_of(np.mean, 'sampling/pass_rate'):.1%}",
    ),
  )
  width = max(len(name) for name, _ in rows)
  out = [f"  {name:<{width}}  {value}" for name, value in rows]
  return "\n".join([*out, "  (+-: 95 % interval over prompts)"])


# ----------------------------------------------------------------- simulator


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
