"""Cost and speed of runs: time and samples, from their metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_HOUR = 3600.0  # seconds


def spent(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
  """The cumulative cost after each step.

  It includes saving, but not evaluations, whose frequency is a free choice.
  "net_hours" exclude compilation, which dominates runs of minutes but not of
  days.
  """
  hours = net = cpu = 0.0
  nothing = dict.fromkeys(("hours", "net_hours", "cpu_hours"), 0.0)
  out = {0: {**nothing, "samples": 0, "tokens": 0}}
  for line in lines:
    spent = (line["time/step_s"] + line["time/checkpoint_s"]) / _HOUR
    hours += spent
    net += spent - line["time/compile_s"] / _HOUR
    cpu += line["time/cpu_s"] / _HOUR
    out[line["step"]] = {
      "hours": hours,
      "net_hours": net,
      "cpu_hours": cpu,
      "samples": line["data/samples_total"],
      "tokens": line["data/tokens_total"],
    }
  return out


def throughput(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
  """Speeds over all steps but the first, which compiles.

  "generation" counts only the time of rollouts; "overall" counts the whole step
  and saving. None if nothing was sampled, or no time was spent.
  """
  if not lines:
    return None
  first = 1 if len(lines) > 1 else 0
  rest = lines[first:]
  total = lambda name: float(sum(line[name] for line in rest))
  made = lambda name: np.diff([0, *(line[name] for line in lines)])[first:]
  samples, tokens = made("data/samples_total"), made("data/tokens_total")
  kept = float(samples @ [line["sampling/pass_rate"] for line in rest])
  generation = total("time/rollout_s")
  overall = total("time/step_s") + total("time/checkpoint_s")
  if min(float(samples.sum()), generation, overall) <= 0.0:
    return None
  return {
    "steps": len(rest),
    "pass_rate": kept / float(samples.sum()),
    "generated_per_generation_s": float(samples.sum()) / generation,
    "generated_per_s": float(samples.sum()) / overall,
    "tokens_per_generation_s": float(tokens.sum()) / generation,
    "kept_per_s": kept / overall,
    "generation_share": generation / overall,
    "reward_std_within_group": total("reward/std_within_group") / len(rest),
  }
