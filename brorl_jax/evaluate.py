"""Held-out prompts -> one record per sample -> pass@1 with its interval."""

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PyTree

from brorl_jax.rl import stats
from brorl_jax.tasks.base import Example, Verdict
from brorl_jax.types import Rollouts


class Evaluation(NamedTuple):
  """What held-out prompts say about one set of parameters."""

  pass_at_1: Float[np.ndarray, " P"]  # of each prompt
  mean: float
  half_width: float  # of the 95 % interval over prompts
  by_family: dict[str, float]
  records: list[dict[str, Any]]  # one per sample


def evaluate(
  params: PyTree,
  puzzles: Sequence[Example],
  *,
  rollouts: Callable[[PyTree, Sequence[Example], int], Rollouts],
  verdicts: Callable[[Sequence[Example], Rollouts], list[list[Verdict]]],
  chunk: int,
) -> Evaluation:
  """Samples and scores every held-out puzzle.

  Args:
    params: Of the policy.
    puzzles: Held out.
    rollouts: (params, `chunk` puzzles, place of the first) -> rollouts, host.
    verdicts: One for each rollout, [P][N].
    chunk: Puzzles that are sampled together; the last chunk is filled up with
      repetitions that do not count.
  """
  records, rates = [], []
  for start in range(0, len(puzzles), chunk):
    real = puzzles[start : start + chunk]
    filled = [*real, *[real[0]] * (chunk - len(real))]
    out = jax.tree.map(
      operator.itemgetter(slice(len(real))), rollouts(params, filled, start)
    )
    length = out.mask.sum(axis=2)
    for p, row in enumerate(verdicts(real, out)):
      rates.append(np.mean([verdict.reward for verdict in row]))
      records += [
        {
          "id": real[p].id,
          "domain": real[p].domain,
          "task": real[p].task,
          "sample": n,
          "tokens": int(length[p, n]),
          "truncated": bool(out.truncated[p, n]),
          "score": verdict.score,
          "pass": verdict.status == "pass",
          "answer": verdict.answer,
        }
        for n, verdict in enumerate(row)
      ]
  return summarise(puzzles, np.array(rates), records)


def summarise(
  puzzles: Sequence[Example],
  pass_at_1: Float[np.ndarray, " P"],
  records: list[dict[str, Any]],
) -> Evaluation:
  """Means over prompts, which are independent; samples of one are not."""
  mean, half = stats.mean_interval(jax.numpy.asarray(pass_at_1))
  family = collections.defaultdict(list)
  for puzzle, rate in zip(puzzles, pass_at_1, strict=True):
    family[puzzle.task].append(rate)
  return Evaluation(
    pass_at_1=pass_at_1,
    mean=float(mean),
    half_width=float(half),
    by_family={name: float(np.mean(rates)) for name, rates in family.items()},
    records=records,
  )
