"""Held-out prompts -> one record per sample -> pass@1 with its interval."""

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PyTree

from brorl_jax.collect import check_judged
from brorl_jax.rl import stats
from brorl_jax.tasks.base import Example
from brorl_jax.types import Judged, Rollouts


class Evaluation(NamedTuple):
  """What held-out prompts say about one set of parameters."""

  pass_at_1: Float[np.ndarray, " P"]  # of each prompt
  mean: float
  half_width: float  # of the 95 % interval over prompts
  by_family: dict[str, float]
  records: list[dict[str, Any]]  # one per sample


def evaluate(
  params: PyTree,
  examples: Sequence[Example],
  *,
  rollouts: Callable[[PyTree, Sequence[Example], int], Rollouts],
  judged: Callable[[Sequence[Example], Rollouts], list[list[Judged]]],
  chunk: int,
) -> Evaluation:
  """Samples and scores every held-out example.

  Responses on which a verifier failed do not count; a prompt with none that
  could be judged counts as failed.

  Args:
    params: Of the policy.
    examples: Held out.
    rollouts: (params, `chunk` examples, place of the first) -> rollouts, host.
    judged: One for each rollout, [P][N].
    chunk: Examples that are sampled together; the last chunk is filled up with
      repetitions that do not count.

  Raises:
    Unjudged: Verifiers failed on too many responses.
  """
  records, rates, every = [], [], []
  for start in range(0, len(examples), chunk):
    real = examples[start : start + chunk]
    filled = [*real, *[real[0]] * (chunk - len(real))]
    out = jax.tree.map(
      operator.itemgetter(slice(len(real))), rollouts(params, filled, start)
    )
    length = out.mask.sum(axis=2)
    for p, row in enumerate(judged(real, out)):
      every += row
      valid = [one.verdict.reward for one in row if one.valid]
      rates.append(sum(valid) / max(len(valid), 1))
      records += [
        {
          "id": real[p].id,
          "domain": real[p].domain,
          "task": real[p].task,
          "sample": n,
          "tokens": int(length[p, n]),
          "truncated": bool(out.truncated[p, n]),
          "score": one.verdict.score,
          "pass": one.verdict.status == "pass",
          "reason": one.verdict.reason,
          "answer": one.verdict.answer,
        }
        for n, one in enumerate(row)
      ]
  check_judged(every)
  return summarise(examples, np.array(rates), records)


def summarise(
  examples: Sequence[Example],
  pass_at_1: Float[np.ndarray, " P"],
  records: list[dict[str, Any]],
) -> Evaluation:
  """Means over prompts, which are independent; samples of one are not."""
  mean, half = stats.mean_interval(jax.numpy.asarray(pass_at_1))
  family = collections.defaultdict(list)
  for example, rate in zip(examples, pass_at_1, strict=True):
    family[example.task].append(rate)
  return Evaluation(
    pass_at_1=pass_at_1,
    mean=float(mean),
    half_width=float(half),
    by_family={name: float(np.mean(rates)) for name, rates in family.items()},
    records=records,
  )
