"""Paired t-tests between evaluations, plain and clustered by task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from brorl_jax.report import stats

# The test of the paper: unclustered, over more than 10,000 instances.
PAPER = {"difference": 0.0033, "t": 4.84, "p_one_sided": 6.5e-7}
Which = Mapping[str, int]  # indices of a run and of its evaluation


def tests(
  rates: Callable[[Which], Mapping[str, float]],
  tasks: Mapping[str, str],
  comparisons: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
  """Tests of the first run against each other run, paired by prompt.

  One prompt has no variance and gives no test; neither does an early run.

  Args:
    rates: Of an evaluation: pass@1 of each prompt by its id.
    tasks: Id of each prompt -> what it is clustered by.
    comparisons: Each with the evaluations that are "chosen", and the runs that
      are "early" there.
  """
  index = {name: i for i, name in enumerate(sorted(set(tasks.values())))}
  cluster = np.array([index[task] for task in tasks.values()])
  for comparison in comparisons if len(tasks) > 1 else ():
    first, *others = comparison["chosen"]
    for other in others:
      if {first["run"], other["run"]} & {*comparison["early"]}:
        continue
      a, b = (
        np.array([rates(which)[id] for id in tasks]) for which in (other, first)
      )
      plain = stats.paired_t(a, b)
      by_task = (
        stats.paired_t(a, b, cluster=cluster) if len(index) > 1 else None
      )
      yield {
        "at": comparison["at"],
        "first": first,
        "other": other,
        "n": len(tasks),
        "difference": _finite(plain.difference),
        "effect_size": _finite(plain.effect_size),
        "plain": _test(plain),
        "by_task": None if by_task is None else _test(by_task),
      }


def _test(result: stats.PairedT) -> dict[str, Any]:
  names = ("standard_error", "t", "p_one_sided", "p_two_sided", "dof")
  out = {name: _finite(getattr(result, name)) for name in names}
  return out | {"clusters": result.dof + 1}


def _finite(value: Any) -> float | None:
  """None for an infinite t (no variance): JSON has no infinities."""
  return float(value) if np.isfinite(value) else None
