"""The alarm for a policy that answers better and can answer less."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from brorl_jax.report import ledger, stats


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
  solved = [(rate > 0.0).astype(np.float32) for rate in rates]
  n = now["summary"]["all"]["samples"]
  return _told(rates, solved, f"prompts with a right one of {n}")


def inverted_in_training(visits: Iterable[Mapping[str, Any]]) -> str | None:
  """The same of training prompts, from their first to their last visits.

  Of prompts with two or more. As numbers of rollouts may differ, both visits
  of a prompt have pass@k at the smaller one. If they stopped when some were
  right, both are a little too high.

  Args:
    visits: Lines of visits.jsonl.
  """
  # Not by `ledger.prompts`, which also finds pass@k up to 512 of each.
  first: dict[str, Mapping[str, Any]] = {}
  last: dict[str, Mapping[str, Any]] = {}
  for line in visits:
    if line["drawn"]:
      first.setdefault(line["id"], line)
      last[line["id"]] = line
  pairs = [(first[p], last[p]) for p in first if first[p] is not last[p]]
  rates, solved = [], []
  for which in (0, 1):
    seen = [(pair[which]["drawn"], pair[which]["right"]) for pair in pairs]
    k = [min(a["drawn"], b["drawn"]) for a, b in pairs]
    rates.append(np.array([c / n for n, c in seen], np.float32))
    solved.append(
      np.array(
        [ledger.pass_at_k(*x, k) for x, k in zip(seen, k, strict=True)],
        np.float32,
      )
    )
  return _told(rates, solved, f"pass@k of {len(pairs)} training prompts")


def _told(
  rates: list[np.ndarray], solved: list[np.ndarray], what: str
) -> str | None:
  """Both changes in a line, if one is a rise and the other a fall."""
  if len(rates[0]) < 2 or len(rates[0]) != len(rates[1]):
    return None
  rise, rise_half = stats.mean_interval(rates[1] - rates[0])
  fall, fall_half = stats.mean_interval(solved[1] - solved[0])
  if rise <= rise_half or -fall <= fall_half:
    return None
  return (
    f"pass@1 rose from {rates[0].mean():.3f} to {rates[1].mean():.3f}, but "
    f"{what} fell from {solved[0].mean():.3f} to {solved[1].mean():.3f}; "
    "larger N, advantage.kind = 'pass_at_k' or 'maxrl', and advantage.credit = "
    "'distinct' keep more"
  )
