"""The learning curve and a short table of one run."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from brorl_jax.report import stats
from brorl_jax.runs import lines

# What the figure and the table read of a line of metrics.jsonl.
_OF_A_STEP = (
  "data/samples_total sampling/degenerate_fraction sampling/pass_rate "
  "reward/mean rollout/tokens_per_s"
).split()


def check_step(line: Any) -> None:
  """Raises ValueError if a line of metrics.jsonl cannot be drawn."""
  lines.has_scalars(line)
  for name in _OF_A_STEP:
    if line.get(name) is None:
      raise ValueError(f"{name!r} is missing")


def check_evaluation(line: Any) -> None:
  """Raises ValueError if a line of eval/curve.jsonl cannot be drawn."""
  lines.has_step(line)
  number = lines.is_number
  every = lambda x: all(map(number, x))
  rates, families = line.get("rates"), line.get("by_family")
  good = {
    "pass_at_1": number(line.get("pass_at_1")),
    "half_width": "half_width" in line
    and (line["half_width"] is None or number(line["half_width"])),
    "by_family": isinstance(families, dict) and every(families.values()),
    "rates": isinstance(rates, list) and bool(rates) and every(rates),
    "summary": isinstance(line.get("summary"), dict)
    and isinstance(line["summary"].get("by_domain"), dict),
  }
  for name, right in good.items():
    if not right:
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
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
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


def _draw_heldout(
  heldout: Any, evaluations: Sequence[Mapping[str, Any]]
) -> None:
  """Draws pass@1 of each family, and of all with its interval."""
  x = np.array([e["step"] for e in evaluations])
  mean = np.array([e["pass_at_1"] for e in evaluations])
  half = np.array([e["half_width"] for e in evaluations], float)  # None: NaN
  heldout.plot(
    x, mean, "k-o", lw=2, ms=4, label="mean, 95 % interval", zorder=3
  )
  for family in evaluations[0]["by_family"]:
    y = [e["by_family"].get(family, np.nan) for e in evaluations]
    heldout.plot(x, y, lw=1, alpha=0.6, label=family)
  heldout.fill_between(x, mean - half, mean + half, color="k", alpha=0.15, lw=0)
  domains = ", ".join(evaluations[0]["summary"]["by_domain"])
  heldout.set(ylabel="pass@1", title=f"held-out prompts: {domains}")
  heldout.set_ylim(0, 1)


def _draw_training(
  shares: Any, entropy: Any, steps: Sequence[Mapping[str, Any]]
) -> None:
  """Draws rewards and shares of the training prompts, and the entropy."""
  x = np.array([s["step"] for s in steps])
  look: Any = {"lw": 1.5, "marker": "o" if len(x) == 1 else ""}
  of = lambda name: np.array([s[name] for s in steps])
  # Not the kept prompts: without a filter these are all prompts.
  mixed = 1.0 - of("sampling/degenerate_fraction")
  shares.plot(x, of("reward/mean"), **look, label="mean reward")
  shares.plot(x, mixed, **look, label="prompts with a gradient")
  # A length penalty may make rewards negative.
  shares.set_ylim(min(0.0, *of("reward/mean")), max(1.02, *of("reward/mean")))
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
  if len(before["rates"]) == len(after["rates"]) == 1:
    gain = f"{after['rates'][0] - before['rates'][0]:+.3f}"
  elif len(before["rates"]) == len(after["rates"]):
    gain = "{:+.3f} +- {:.3f}".format(
      *gain_interval(before["rates"], after["rates"])
    )
  # The median, because the first step compiles.
  tokens_per_s = np.median([s["rollout/tokens_per_s"] for s in steps])
  samples = steps[-1]["data/samples_total"]
  rate = np.mean([s["sampling/pass_rate"] for s in steps])
  half = lambda x: "" if x is None else f" +- {x:.3f}"
  interval = lambda e: f"{e['pass_at_1']:.3f}{half(e['half_width'])}"
  rows = (
    ("held-out pass@1 before", interval(before)),
    (f"held-out pass@1 after {steps[-1]['step']} steps", interval(after)),
    ("gain, same prompts", gain),
    ("rollouts", f"{samples:,}"),
    ("sampled tokens per second", f"{tokens_per_s:,.0f}"),
    ("dynamic sampling, prompts kept", f"{rate:.1%}"),
  )
  width = max(len(name) for name, _ in rows)
  lines = [f"  {name:<{width}}  {value}" for name, value in rows]
  return "\n".join([*lines, "  (+-: 95 % interval over prompts)"])


def gain_interval(
  before: Sequence[float], after: Sequence[float]
) -> tuple[float, float]:
  """Mean gain over the same prompts and half its 95 % interval."""
  both: list[Float[np.ndarray, " P"]] = [np.asarray(x) for x in (before, after)]
  return stats.mean_interval(both[1] - both[0])
