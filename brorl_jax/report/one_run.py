"""What one run shows for itself: a figure and a short table."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float

from brorl_jax.rl import stats

_WITHOUT = "sampling/degenerate_fraction"


def learning_curve(
  path: str | pathlib.Path,
  evaluations: Sequence[Mapping[str, Any]],
  steps: Sequence[Mapping[str, Any]],
  *,
  title: str,
) -> None:
  """Held-out pass@1 with its interval, and what the training prompts show.

  Args:
    path: The PNG; its folder is made.
    evaluations: Lines of eval/curve.jsonl.
    steps: Lines of metrics.jsonl.
    title: One line.
  """
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4.8), layout="constrained"
  )
  x = np.array([e["step"] for e in evaluations])
  mean = np.array([e["pass_at_1"] for e in evaluations])
  half = np.array([e["half_width"] for e in evaluations], float)  # None: NaN
  left.plot(x, mean, "k-o", lw=2, ms=4, label="mean, 95 % interval", zorder=3)
  for family in evaluations[0]["by_family"]:
    y = [e["by_family"][family] for e in evaluations]
    left.plot(x, y, lw=1, alpha=0.6, label=family)
  left.fill_between(x, mean - half, mean + half, color="k", alpha=0.15, lw=0)
  left.set(xlabel="step", ylabel="pass@1", title="held-out puzzles")
  left.set_ylim(0, 1)

  x = [s["step"] for s in steps]
  for label, of in (
    ("mean reward", lambda s: s["reward/mean"]),
    # Not those that were kept: with keep = "all" these are all.
    ("prompts with a gradient", lambda s: 1.0 - s[_WITHOUT]),
    ("entropy, nats per token", lambda s: s["policy/entropy"]),
  ):
    right.plot(x, [of(s) for s in steps], lw=1.5, label=label)
  right.set(xlabel="step", title="training prompts")
  right.set_ylim(bottom=0)
  for axis in (left, right):
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    below = (0.5, -0.14)  # inside it would hide a line of some run
    axis.legend(
      fontsize=8,
      ncols=3,
      loc="upper center",
      bbox_to_anchor=below,
      frameon=False,
    )
  figure.suptitle(title)
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=130)
  plt.close(figure)


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
  gain = "not known: the held-out prompts changed"
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
  mean, half = stats.mean_interval(jnp.asarray(both[1] - both[0]))
  return float(mean), float(half)
