"""Held-out prompts -> one record per sample -> pass@k, majority, intervals."""

import collections
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from brorl_jax import collect
from brorl_jax.rl import stats
from brorl_jax.rl.pass_at_k import pass_at_k
from brorl_jax.tasks.base import Example, Verdict
from brorl_jax.types import Judged, Rollouts

Record = Mapping[str, Any]  # of one sample, as JSON
Chunks = Iterator[list[dict[str, Any]]]  # of records
_STATUSES = ("pass", "fail", "invalid")
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
  **dict.fromkeys(
    ("step", "sample", "tokens"),
    ("an integer of at least 0", lambda x: type(x) is int and x >= 0),
  ),
  **dict.fromkeys(
    ("id", "domain", "task", "reason", "answer"),
    ("text", lambda x: isinstance(x, str)),
  ),
  **dict.fromkeys(
    ("truncated", "pass"), ("true or false", lambda x: isinstance(x, bool))
  ),
  "score": (
    "a finite number",
    lambda x: type(x) in (int, float) and math.isfinite(x),
  ),
  "status": (f"one of {', '.join(_STATUSES)}", _STATUSES.__contains__),
}


def evaluate(
  params: PyTree,
  examples: Sequence[Example],
  *,
  rollouts: Callable[[PyTree, Sequence[Example], int], Rollouts],
  judged: Callable[[Sequence[Example], Rollouts], list[list[Judged]]],
  chunk: int,
  first: int = 0,
) -> Chunks:
  """Samples and scores held-out examples: records of one chunk after the other.

  Args:
    params: Of the policy.
    examples: Held out.
    rollouts: (params, `chunk` examples, place of the first) -> rollouts, host.
    judged: One for each rollout, [P][N].
    chunk: Examples that are sampled together; the last chunk is filled up with
      repetitions that do not count.
    first: Place of the example to begin with.

  Yields:
    Records of a chunk, by example and then by sample.
  """
  for start in range(first, len(examples), chunk):
    real = examples[start : start + chunk]
    filled = [*real, *[real[0]] * (chunk - len(real))]
    out = jax.tree.map(
      operator.itemgetter(slice(len(real))), rollouts(params, filled, start)
    )
    length = out.mask.sum(axis=2)
    yield [
      {
        "id": real[p].id,
        "domain": real[p].domain,
        "task": real[p].task,
        "sample": n,
        "tokens": int(length[p, n]),
        "truncated": bool(out.truncated[p, n]),
        "score": one.verdict.score,
        "pass": one.verdict.status == "pass",
        "status": one.verdict.status,
        "reason": one.verdict.reason,
        "answer": one.verdict.answer,
      }
      for p, row in enumerate(judged(real, out))
      for n, one in enumerate(row)
    ]


def check_record(line: Any) -> None:
  """Checks what was read as a record, its "step" with it.

  Raises:
    ValueError: Naming the first field that it lacks, or that is wrong.
  """
  for name, (kind, good) in _FIELDS.items():
    if not isinstance(line, dict) or name not in line:
      raise ValueError(f"there is no {name!r}")
    if not good(line[name]):
      shown = json.dumps(line[name])[:40]
      raise ValueError(f"{name!r} is {shown}, which is not {kind}")
  if line["pass"] != (line["status"] == "pass"):
    shown = json.dumps(line["pass"])
    raise ValueError(f"'pass' is {shown}, 'status' is {line['status']!r}")


def check_judged(records: Sequence[Record]) -> None:
  """Raises `collect.Unjudged` if verifiers failed on too many responses."""
  fields = ("status", "score", "reason", "answer")
  collect.check_judged(
    Judged(r["task"], Verdict(*(r[name] for name in fields)), 0.0)
    for r in records
  )


def summary(records: Sequence[Record]) -> dict[str, Any]:
  """What the records of one evaluation say, as plain JSON.

  Of all prompts, of each domain and of each task:

    prompts, samples  how many; samples are those of each prompt
    pass_at_k         for k = 1, 2, 4, ... and all samples: the probability
                      that one of k samples is right, unbiased
    mean_at_k         for k = all samples: the share of them that is right,
                      which is pass_at_k for k = 1 by its other name
    majority_at_k     that the answer which most of k samples give is right:
                      the mean over disjoint blocks of k samples one after the
                      other. Of tied answers the share that is right; empty
                      ones do not vote; where nobody votes it is wrong.
    mean_score        of the verifiers' own numbers, where parts may count
    low, high         95 % percentile bootstrap interval of pass@1: prompts
                      drawn anew within tasks; None if no task has two. Below
                      some 20 prompts it is too narrow, and it has no width
                      where all prompts agree, however few they are.
    tokens_mean, truncated_fraction   of all samples
    invalid           samples on which the verifier failed. These do not count:
                      a prompt with v < k others is taken at k = v, one
                      without any has failed.

  A task's numbers are means over its prompts, a domain's means over its tasks,
  those of all prompts means over prompts.

  Args:
    records: One per sample, of one step.

  Raises:
    ValueError: There are none, a sample is there twice, or prompts have
      different numbers of samples.
  """
  prompts = list(_by_prompt(records).values())
  samples = len(prompts[0])
  # n samples give up to n; powers of two below are enough for a curve.
  ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
  named = [(prompt[0]["domain"], prompt[0]["task"]) for prompt in prompts]
  tasks = list(dict.fromkeys(named))
  group = np.array([tasks.index(name) for name in named])
  said = functools.partial(
    _said,
    ks=ks,
    samples=samples,
    tasks=_tasks(np.array([_numbers(p, ks) for p in prompts]), group),
  )
  size, one = np.bincount(group), np.eye(len(tasks))
  by_domain = {}
  for g, (domain, task) in enumerate(tasks):
    mine = np.array([float(other == domain) for other, _ in tasks])
    by_domain.setdefault(domain, {**said(mine), "by_task": {}})
    by_domain[domain]["by_task"][task] = said(one[g])
  return {"all": said(size), "by_domain": by_domain}


def rates(records: Sequence[Record]) -> list[float]:
  """pass@1 of each prompt, in the order of the records; for pairing runs.

  Args:
    records: As those of `summary`, with the same errors.
  """
  return [_numbers(mine, [1])[0] for mine in _by_prompt(records).values()]


class _Tasks(NamedTuple):
  """Means over prompts, for each of G tasks."""

  size: Int[np.ndarray, " G"]  # prompts
  means: Float[np.ndarray, "G columns"]  # of what `_numbers` gives
  draws: Float[np.ndarray, "draws G"]  # of pass@1, prompts drawn anew


def _tasks(
  numbers: Float[np.ndarray, "P columns"], group: Int[np.ndarray, " P"]
) -> _Tasks:
  size = np.bincount(group)
  draws = stats.bootstrap_means(
    jax.random.key(0),  # the interval is a function of the records
    jnp.asarray(numbers[:, 0], jnp.float32),
    jnp.asarray(group),
    count=len(size),
  )
  means = [numbers[group == g].mean(axis=0) for g in range(len(size))]
  return _Tasks(size, np.array(means), np.asarray(draws))


def _said(
  weight: np.ndarray, *, ks: Sequence[int], samples: int, tasks: _Tasks
) -> dict[str, Any]:
  """The numbers of some tasks together, each of which has a weight."""
  share = weight / weight.sum()
  values = (share @ tasks.means).tolist()
  passed, values = values[: len(ks)], values[len(ks) :]
  majority, (score, tokens, truncated, _) = values[: len(ks)], values[len(ks) :]
  here = np.where(weight > 0, tasks.size, 0)
  low = high = None
  if here.max() > 1:  # or each prompt stands for its task alone
    drawn = jnp.asarray(tasks.draws @ share.astype(np.float32))
    low, high = map(float, stats.percentile_interval(drawn))
  return {
    "prompts": int(here.sum()),
    "samples": samples,
    "pass_at_k": dict(zip(map(str, ks), passed, strict=True)),
    "mean_at_k": {str(samples): passed[0]},
    "majority_at_k": dict(zip(map(str, ks), majority, strict=True)),
    "mean_score": score,
    "low": low,
    "high": high,
    "tokens_mean": tokens,
    "truncated_fraction": truncated,
    "invalid": round(float(here @ tasks.means[:, -1])),
  }


def _by_prompt(records: Sequence[Record]) -> dict[str, list[Record]]:
  """Records of each prompt; raises ValueError if they are not of one kind."""
  prompts: dict[str, list[Record]] = {}
  seen = set()
  for record in records:
    key = record["id"], record["sample"]
    if key in seen:
      raise ValueError(
        f"sample {key[1]} of {key[0]!r} is there twice; give the records of "
        "one evaluation"
      )
    seen.add(key)
    prompts.setdefault(record["id"], []).append(record)
  if not prompts:
    raise ValueError("there are no records; give those of an evaluation")
  first, *_ = prompts
  for name, mine in prompts.items():
    if len(mine) != len(prompts[first]):
      raise ValueError(
        f"{name!r} has {len(mine)} samples, {first!r} has "
        f"{len(prompts[first])}; give the records of one whole evaluation"
      )
    mine.sort(key=operator.itemgetter("sample"))
  return prompts


def _numbers(mine: Sequence[Record], ks: Sequence[int]) -> list[float]:
  """Of one prompt: pass@k, majority@k, score, tokens, truncated, invalid."""
  votes = [
    (r["answer"], r["pass"]) for r in mine if r.get("status") != "invalid"
  ]
  v, right = len(votes), sum(passed for _, passed in votes)
  score = sum(r["score"] for r in mine if r.get("status") != "invalid")
  return [
    *(float(_pass_at_k(v, right, min(k, v))) if v else 0.0 for k in ks),
    *(_majority(votes, min(k, v)) if v else 0.0 for k in ks),
    score / max(v, 1),
    sum(r["tokens"] for r in mine) / len(mine),
    sum(r["truncated"] for r in mine) / len(mine),
    float(len(mine) - v),
  ]


# For one count at a time: a table of all would be made of n x k numbers.
_pass_at_k = functools.cache(jax.jit(pass_at_k, static_argnums=(0, 2)))


def _majority(votes: Sequence[tuple[str, bool]], k: int) -> float:
  """Mean over blocks of k votes of how right the winning answer is."""
  blocks = [votes[i : i + k] for i in range(0, len(votes) - k + 1, k)]
  return sum(map(_won, blocks)) / len(blocks)


def _won(block: Sequence[tuple[str, bool]]) -> float:
  """Whether the answer given most often is right; the mean of tied ones."""
  passed = collections.defaultdict[str, list[bool]](list)
  for answer, right in block:
    if answer:
      passed[answer].append(right)
  most = max(map(len, passed.values()), default=0)
  # An answer may pass in one form of the response and not in another.
  right = [sum(p) / most for p in passed.values() if len(p) == most]
  return sum(right) / max(len(right), 1)
