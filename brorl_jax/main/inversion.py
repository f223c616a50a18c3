"""The alarm for a policy that answers better and can answer less."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from brorl_jax.rl import stats


def inverted(first: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
  """Whether more held-out responses are right, and fewer prompts can be solved.

  Both lie outside the 95 % interval of their differences on the same prompts.
  Training then moves mass to answers that were there already, and away from
  others: pass@1 rises and pass@n falls.

  Args:
    first: A line of eval/curve.jsonl, with "rates" and "summary".
    now: A later line, of the same prompts.

  Returns:
    Both changes in a line; None without an inversion, or with one prompt.
  """
  rates = [np.array(line["rates"], np.float32) for line in (first, now)]
  if len(rates[0]) < 2 or len(rates[0]) != len(rates[1]):
    return None
  solved = [(rate > 0.0).astype(np.float32) for rate in rates]
  rise, rise_half = stats.mean_interval(jnp.asarray(rates[1] - rates[0]))
  fall, fall_half = stats.mean_interval(jnp.asarray(solved[1] - solved[0]))
  if rise <= rise_half or -fall <= fall_half:
    return None
  n = now["summary"]["all"]["samples"]
  return (
    f"pass@1 rose from {rates[0].mean():.3f} to {rates[1].mean():.3f}, but "
    f"prompts with a right one of {n} fell from {solved[0].mean():.3f} to "
    f"{solved[1].mean():.3f}; larger N, advantage.kind = 'pass_at_k' or "
    "'maxrl', and advantage.credit = 'distinct' keep more"
  )
