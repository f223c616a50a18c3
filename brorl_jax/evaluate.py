"""Held-out prompts -> one record per sample -> pass@k, majority, intervals."""

import collections
import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from brorl_jax.many import processes
from brorl_jax.rl.pass_at_k import pass_at_k
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.types import Rollouts, ScoredResponse
from brorl_jax.verdicts.base import Example, Verdict

Record = Mapping[str, Any]  # one sample, as JSON
Chunks = Iterator[list[dict[str, Any]]]  # records of one chunk after the other
_STATUSES = ("pass", "fail", "invalid")
SHOWN = 3  # prompts of each task whose first responses are kept as text
_MOST = 1e18  # above any count or time; a sum of them stays finite
Kind = tuple[str, Callable[[Any], bool]]  # what a value must be, whether it is
_whole = lambda x: type(x) is int and 0 <= x < _MOST
_finite = lambda x: type(x) in (int, float) and abs(x) < _MOST
COUNT: Kind = "an integer of at least 0", _whole
NUMBER: Kind = "a finite number", _finite
_BOOL = ("true or false", lambda x: isinstance(x, bool))
_TEXT = ("text", lambda x: isinstance(x, str))
_OF_SOME = {"prompt": _TEXT, "response": _TEXT}
_OF_A_RECORD: Mapping[str, Kind] = {
  **dict.fromkeys(("step", "sample", "tokens"), COUNT),
  **dict.fromkeys(("id", "domain", "task", "reason", "answer"), _TEXT),
  **dict.fromkeys(("truncated", "pass"), _BOOL),
  "score": NUMBER,
  "status": (f"one of {', '.join(_STATUSES)}", _STATUSES.__contains__),
}


def evaluate(
  params: PyTree,
  examples: Sequence[Example],
  *,
  rollouts: Callable[[PyTree, Sequence[Example], int], Rollouts],
  score_responses: Callable[
    [Sequence[Example], Rollouts], list[list[ScoredResponse]]
  ],
  texts: Callable[[Rollouts], list[list[str]]],
  chunk: int,
  first: int = 0,
) -> Chunks:
  """Yields the records of held-out examples from number `first` on.

  A process samples `chunk` examples together; the last chunk is padded with
  repetitions, which are dropped. `rollouts` makes those of (params, `chunk`
  examples, index of the first) on the host; `texts` and `score_responses` are
  [P][N]. Records are ordered by example and sample. The first sample of the
  first examples of each task has its prompt and response as text.
  """
  by_task = collections.defaultdict[tuple[str, str], list[str]](list)
  for example in examples:
    by_task[example.domain, example.task].append(example.id)
  shown = {name for names in by_task.values() for name in names[:SHOWN]}
  for start in range(first, len(examples), chunk * jax.process_count()):
    own = start + chunk * jax.process_index()  # of this process
    real = examples[own : own + chunk]
    if not real:
      yield from filter(None, processes.gather([]))
      continue
    filled = [*real, *[real[0]] * (chunk - len(real))]
    of_real = operator.itemgetter(slice(len(real)))
    out = jax.tree.map(of_real, rollouts(params, filled, own))
    length, said = out.mask.sum(axis=2), texts(out)
    text = lambda p: {"prompt": real[p].question, "response": said[p][0]}
    records = [
      {
        **{name: getattr(real[p], name) for name in ("id", "domain", "task")},
        "sample": n,
        "tokens": int(length[p, n]),
        "truncated": bool(out.truncated[p, n]),
        "pass": scored.verdict.status == "pass",
        **dataclasses.asdict(scored.verdict),
        **(text(p) if n == 0 and real[p].id in shown else {}),
      }
      for p, row in enumerate(score_responses(real, out))
      for n, scored in enumerate(row)
    ]
    yield from filter(None, processes.gather(records))


def check_fields(fields: Mapping[str, Kind], line: Any) -> None:
  """Raises ValueError, which names the first field that is missing or wrong."""
  for name, (kind, good) in fields.items():
    if not isinstance(line, dict) or name not in line:
      raise ValueError(f"{name!r} is missing")
    if not good(line[name]):
      shown = json.dumps(line[name])[:40]
      raise ValueError(f"{name!r} is {shown}; it must be {kind}")


def check_record(line: Any) -> None:
  """`check_fields` of a record, which says twice whether it passed."""
  # Some records have both of those fields, others neither.
  some = isinstance(line, dict) and line.keys() & _OF_SOME.keys()
  check_fields({**_OF_A_RECORD, **(_OF_SOME if some else {})}, line)
  if line["pass"] != (line["status"] == "pass"):
    shown = json.dumps(line["pass"])
    raise ValueError(f"'pass' is {shown}, but 'status' is {line['status']!r}")


def check_invalid(records: Sequence[Record]) -> None:
  """Raises TooManyInvalid if verifiers failed on too many responses."""
  dynamic_sampling.check_invalid(
    ScoredResponse(r["task"], Verdict(r["status"], 0.0, r["reason"]), 0.0)
    for r in records
  )


def summary(records: Sequence[Record]) -> dict[str, Any]:
  """The scores of one evaluation: for all prompts, each domain, each task.

  configs/README.md, Evaluation summary, says what each value is. In addition:

  - An empty answer does not vote. Without any vote a majority is wrong.
  - Samples on which the verifier failed are left out: a prompt with v < k other
    samples counts with k = v, and a prompt without any counts as failed.
  - `low` and `high` are percentiles, by resampling prompts within tasks; None
    if no task has two prompts, and equal if all prompts agree.
  - `tokens_right` and `tokens_wrong` are None if there are no such responses.

  Raises ValueError if there are no records, a sample occurs twice, or prompts
  have different numbers of samples.
  """
  prompts = list(_by_prompt(records).values())
  samples = len(prompts[0])
  # Powers of two, and all samples, are enough for a curve.
  ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
  named = [(prompt[0]["domain"], prompt[0]["task"]) for prompt in prompts]
  tasks = list(dict.fromkeys(named))
  group = np.array([tasks.index(name) for name in named])
  sizes, one_hot = np.bincount(group), np.eye(len(tasks))
  each = np.array([_numbers(p, ks) for p in prompts])
  means = np.array([each[group == g].mean(axis=0) for g in range(len(tasks))])
  draws = bootstrap_means(each[:, 0], group)

  def numbers(weight: np.ndarray) -> dict[str, Any]:
    """Those of several tasks together, by weight: how many prompts of each."""
    share = weight / weight.sum()
    parts = np.split(share @ means, [len(ks), 2 * len(ks)])
    parts = [part.tolist() for part in parts]
    passed, majority, (score, tokens, truncated, *split, _) = parts
    right, rights, wrong, wrongs = split
    size = np.where(weight > 0, sizes, 0)
    low = high = None
    if size.max() > 1:  # otherwise there is nothing to resample
      low, high = np.percentile(draws @ share, [2.5, 97.5]).tolist()
    return {
      "prompts": int(size.sum()),
      "samples": samples,
      "pass_at_k": dict(zip(map(str, ks), passed, strict=True)),
      "mean_at_k": {str(samples): passed[0]},
      "majority_at_k": dict(zip(map(str, ks), majority, strict=True)),
      "mean_score": score,
      "low": low,
      "high": high,
      "tokens_mean": tokens,
      "truncated_fraction": truncated,
      "tokens_right": right / rights if rights else None,
      "tokens_wrong": wrong / wrongs if wrongs else None,
      "invalid": round(float(size @ means[:, -1])),
    }

  by_domain = {}
  for g, (domain, task) in enumerate(tasks):
    in_domain = np.array([float(other == domain) for other, _ in tasks])
    by_domain.setdefault(domain, {**numbers(in_domain), "by_task": {}})
    by_domain[domain]["by_task"][task] = numbers(one_hot[g])
  return {"all": numbers(sizes), "by_domain": by_domain}


def rates(records: Sequence[Record]) -> list[float]:
  """pass@1 of each prompt, in the order of the records; see `summary`."""
  return [_numbers(x, [1])[0] for x in _by_prompt(records).values()]


def scores(records: Sequence[Record]) -> list[float]:
  """The mean score of each prompt, likewise."""
  return [_numbers(x, [1])[2] for x in _by_prompt(records).values()]


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Lines of a table; the first column is to the left, the others right."""
  first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
  lines = []
  for name, *cells in rows:
    padded = (f"{x:>{w}}" for x, w in zip(cells, widths, strict=True))
    lines.append("  ".join((f"  {name:<{first}}", *padded)))
  return "\n".join(lines)


def bootstrap_means(
  values: Float[np.ndarray, " n"],
  groups: Int[np.ndarray, " n"],
  *,
  draws: int = 2000,
) -> Float[np.ndarray, "draws G"]:
  """The mean of each group when its values are drawn anew, with replacement.

    m[d,g] = mean of v[i], i drawn size(g) times from the members of g

  The percentiles of an average over a row are its interval, for the same
  groups and other members: prompts are a sample, tasks are not (Davison,
  Hinkley 1997, section 3.2). It depends on the values alone: the seed is fixed.
  """
  order, size = np.argsort(groups, kind="stable"), np.bincount(groups)
  values, first = values[order], np.cumsum(size) - size
  begin, sizes = np.repeat(first, size), np.repeat(size, size)
  random = np.random.default_rng(0)
  drawn = (values[begin + random.integers(sizes)] for _ in range(draws))
  return np.stack([np.add.reduceat(x, first) / size for x in drawn])


def _by_prompt(records: Sequence[Record]) -> dict[str, list[Record]]:
  """The records of each prompt; raises ValueError as `summary` does."""
  prompts: dict[str, list[Record]] = {}
  seen = set()
  for record in records:
    key = record["id"], record["sample"]
    if key in seen:
      twice = f"sample {key[1]} of {key[0]!r} occurs twice"
      raise ValueError(f"{twice}; give the records of one evaluation only")
    seen.add(key)
    prompts.setdefault(record["id"], []).append(record)
  if not prompts:
    raise ValueError("there are no records; give those of one evaluation")
  first, *_ = prompts
  for name, of_prompt in prompts.items():
    if len(of_prompt) != len(prompts[first]):
      has = f"{name!r} has {len(of_prompt)} samples"
      other = f"{first!r} has {len(prompts[first])}"
      must = "give all records of one evaluation"
      raise ValueError(f"{has}, but {other}; {must}")
    of_prompt.sort(key=operator.itemgetter("sample"))
  return prompts


def _numbers(records: Sequence[Record], ks: Sequence[int]) -> list[float]:
  """One prompt's pass@k, majority@k and means, as `summary` reads them."""
  votes = [
    (r["answer"], r["pass"]) for r in records if r["status"] != "invalid"
  ]
  v, right = len(votes), sum(passed for _, passed in votes)
  score = sum(r["score"] for r in records if r["status"] != "invalid")
  tokens = np.array([r["tokens"] for r in records])
  passed = np.array([r["pass"] for r in records])
  means = tokens, [r["truncated"] for r in records]
  means += passed * tokens, passed, ~passed * tokens, ~passed
  return [
    *(float(_pass_at_k(v, right, min(k, v))) if v else 0.0 for k in ks),
    *(_majority(votes, min(k, v)) if v else 0.0 for k in ks),
    score / max(v, 1),
    *(float(np.mean(x)) for x in means),
    float(len(records) - v),
  ]


# One count at a time: a table of all counts would have n x k numbers.
_pass_at_k = functools.cache(jax.jit(pass_at_k, static_argnums=(0, 2)))


def _majority(votes: Sequence[tuple[str, bool]], k: int) -> float:
  """Mean correctness of the winning answer, over blocks of k votes."""
  blocks = [votes[i : i + k] for i in range(0, len(votes) - k + 1, k)]
  return sum(map(_won, blocks)) / len(blocks)


def _won(block: Sequence[tuple[str, bool]]) -> float:
  """1 if the most frequent answer is right, 0 if not; the mean over ties."""
  passed = collections.defaultdict[str, list[bool]](list)
  for answer, right in block:
    if answer:
      passed[answer].append(right)
  most = max(map(len, passed.values()), default=0)
  # One answer may pass in one response and fail in another.
  right = [sum(p) / most for p in passed.values() if len(p) == most]
  return sum(right) / max(len(right), 1)
