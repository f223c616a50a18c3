"""Runs -> all numbers of the report, as plain JSON; the page has no others.

An *arm* is a method: runs that differ in nothing but their seed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from brorl_jax.evaluate import NUMBER
from brorl_jax.report import stats
from brorl_jax.report.load_runs import MOST_SAMPLES, Json, LoadedRun, Value
from brorl_jax.rl import advantages

# Runs are compared at the largest cost that all of them reached.
EQUAL = {
  "net_hours": "equal time",
  "cpu_hours": "equal CPU time",
  "samples": "equal samples",
}
# An evaluation below this fraction of that cost is too early to compare.
EARLIEST = 0.9
# The test of the paper: unclustered, over more than 10,000 instances.
PAPER = {"difference": 0.0033, "t": 4.84, "p_one_sided": 6.5e-7}
# Curves of training: name -> metric, and the title, unit and factor of a plot.
CURVES = {
  "reward": ("reward/mean", "Reward of training prompts", "mean", 1),
  "kept": ("sampling/pass_rate", "Kept prompts", "%", 100),
  # 1 minus this metric.
  "alive": ("sampling/missed", "Prompts with a right answer", "%", 100),
  "entropy": ("policy/entropy", "Entropy", "nats per token", 1),
  "length": ("rollout/length_mean", "Length of responses", "tokens", 1),
  "kl": ("policy/kl_ref", "KL to the reference", "nats per token", 1),
}
_HOUR = 3600.0  # seconds
_LONGEST = 300  # characters of an event
# Keys of an event that are columns, or say which process it was.
_ASIDE = ("step", "time", "event", "why", "pid", "host")
# Config entries that do not make another method.
_SEED = ("run.seed", "git_commit")


class Comparison(TypedDict):
  """A point at which runs are compared."""

  key: str | None  # of EQUAL; None for the ends of the runs
  at: str
  reach: Value  # the cost that all runs reached
  chosen: list[int | None]  # evaluation of each run; None: not compared
  early: list[int]  # runs without an evaluation near it


def numbers(runs: Sequence[LoadedRun]) -> dict[str, Any]:
  """All numbers of the report, of runs that may be compared."""
  summaries = [summary(run) for run in runs]
  first = summaries[0]["evaluations"][0]["summary"]
  points = _comparisons(summaries)
  given = runs[0].config.get
  newest = lambda run: run.samples[-(MOST_SAMPLES // len(runs)) :]
  return {
    "runs": summaries,
    "domains": [*first["by_domain"]],
    "tasks": {name: [*d["by_task"]] for name, d in first["by_domain"].items()},
    "prompts": len(runs[0].prompts),
    "samples_per_prompt": first["all"]["samples"],
    "sampling": {x: given(f"eval.{x}") for x in ("temperature", "top_p")},
    "comparisons": points,
    "arms": _arms(runs, summaries, points),
    "rows": [*_rows(runs, points)],
    "paper": PAPER,
    "differences": _differences(runs),
    "responses": [x for i, run in enumerate(runs) for x in _responses(i, run)],
    "samples": [{"run": i, **x} for i, r in enumerate(runs) for x in newest(r)],
  }


def summary(run: LoadedRun) -> dict[str, Any]:
  spent, last = _spent(run.metrics), run.evaluations[-1].step
  config = {**run.config}  # with the phases that have started
  for phase in config.get("run.phases") or ():
    config |= phase if phase["from_step"] <= last else {}
  method = [config.get("loss.kind"), config.get("advantage.kind")]
  if rounds := config.get("sampling.rounds"):
    method += [f"N from {rounds[0]} in rounds"]
  method = ", ".join(str(word) for word in method if word)
  wanted = config.get("run.steps")
  done = run.metrics[-1]["step"] if run.metrics else 0
  training = run.evaluated is None
  n, samples = config.get("sampling.n"), config.get("sampling.samples")
  prompts = samples // n if n and samples else None
  ran = dict(n=n, prompts_per_step=prompts, steps=done, steps_wanted=wanted)
  unknown = dict.fromkeys(("step", *EQUAL))
  cost = lambda e: {"step": e.step, **spent[e.step]} if training else unknown
  return {
    "name": run.name,
    "folder": run.folder,
    "training": training,
    "evaluated": run.evaluated,
    "method": method if training else f"evaluated: {run.evaluated}",
    "seed": run.seed,
    **(ran if training else dict.fromkeys(ran)),
    "finished": done == wanted == last if training else True,
    "throughput": _throughput(run.metrics),
    "curves": _curves(run.metrics, spent),
    "which_n": _which_n(run, config),
    "events": [
      {**{k: e[k] for k in ("step", "time", "event")}, "what": _what(e)}
      for e in run.events
    ],
    "evaluations": [{**cost(e), "summary": e.summary} for e in run.evaluations],
  }


def _which_n(run: LoadedRun, config: Json) -> dict[str, Any] | None:
  """1,024 prompts at the last visit, and the N they wanted at the first."""
  kind = config.get("advantage.kind")
  if not run.visits or kind not in advantages.ADVANTAGES:
    return None
  first, last = (
    np.array([(x["right"], x["drawn"]) for x in some[-1024:]]).T
    for some in zip(*run.visits, strict=True)
  )
  return {
    "kind": kind,
    "prompts": last.shape[1],
    "drawn": int(last[1].max()),
    "won": int((2 * last[0] > last[1]).sum()),
    "missed": int((last[0] == 0).sum()),
    "lost": int(((last[0] == 0) & (first[0] > 0)).sum()),
    "n": stats.protecting_n(kind, *first),
    "maxrl": stats.protecting_n("maxrl", *first),
  }


def _spent(lines: Sequence[Json]) -> dict[int, dict[str, Any]]:
  """The cumulative cost after each step.

  It includes saving, but not evaluations, whose frequency is a free choice, nor
  compilation, which dominates runs of minutes but not of days.
  """
  net = cpu = 0.0
  out = {0: {"net_hours": net, "cpu_hours": cpu, "samples": 0}}
  for line in lines:
    spent = line["time/step_s"] + line["time/checkpoint_s"]
    net += (spent - line["time/compile_s"]) / _HOUR
    cpu += line["time/cpu_s"] / _HOUR
    samples = line["data/samples_total"]
    out[line["step"]] = {"net_hours": net, "cpu_hours": cpu, "samples": samples}
  return out


def _throughput(lines: Sequence[Json]) -> dict[str, Any] | None:
  """Speeds over all steps but the first, which compiles.

  "generation" counts only the time of rollouts; "overall" counts the whole step
  and saving. None if nothing was sampled then.
  """
  rest = lines[1:]
  total = lambda name: float(sum(line[name] for line in rest))
  made = lambda name: np.diff([line[name] for line in lines])
  each = made("data/samples_total")
  samples, tokens = float(each.sum()), float(made("data/tokens_total").sum())
  generation = total("time/rollout_s")
  overall = total("time/step_s") + total("time/checkpoint_s")
  if min(samples, generation, overall) <= 0.0:
    return None
  kept = float(each @ [line["sampling/pass_rate"] for line in rest])
  return {
    "steps": len(rest),
    "pass_rate": kept / samples,
    "generated_per_generation_s": samples / generation,
    "generated_per_s": samples / overall,
    "tokens_per_generation_s": tokens / generation,
    "kept_per_s": kept / overall,
    "generation_share": generation / overall,
    "reward_std_within_group": total("reward/std_within_group") / len(rest),
  }


def _curves(
  lines: Sequence[Json], spent: Mapping[int, Any]
) -> dict[str, list[Value]]:
  """Metrics by step, with the cumulative CPU time; without empty ones."""
  out = {
    name: [_finite(line.get(metric)) for line in lines]
    for name, (metric, *_) in CURVES.items()
  }
  out["alive"] = [None if x is None else 1 - x for x in out["alive"]]
  return {
    "step": [x["step"] for x in lines],
    "cpu_hours": [spent[x["step"]]["cpu_hours"] for x in lines],
    **{name: y for name, y in out.items() if any(x is not None for x in y)},
  }


def _finite(x: Any) -> Value:
  """None for what is no number, or infinite: JSON has no infinities."""
  return x if NUMBER[1](x) else None


def _responses(i: int, run: LoadedRun) -> list[dict[str, Any]]:
  """First responses to the same prompts at the first and last evaluation."""
  first, last = run.evaluations[0], run.evaluations[-1]
  before = {r["id"]: r for r in first.responses} if first is not last else {}
  said = lambda r: r and {k: r[k] for k in ("response", "status", "reason")}
  return [
    {"run": i, "id": r["id"], "task": r["task"], "prompt": r["prompt"]}
    | {"before": said(before.get(r["id"])), "after": said(r)}
    for r in last.responses[: MOST_SAMPLES // 4]
  ]


def _what(event: Json) -> str:
  parts = [str(event["why"])] if "why" in event else []
  for name, value in event.items():
    if name in _ASIDE or (name == "changed" and parts):
      continue
    if isinstance(value, dict):
      parts += [f"{k} = {v}" for k, v in value.items()]
    else:
      parts.append(f"{name}: {value}")
  text = "; ".join(" ".join(part.split()) for part in parts)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _comparisons(summaries: Sequence[Json]) -> list[Comparison]:
  out = list[Comparison]()
  training = [i for i, run in enumerate(summaries) if run["training"]]
  for key, label in EQUAL.items() if len(training) > 1 else ():
    reach = min(summaries[i]["evaluations"][-1][key] for i in training)
    chosen: list[int | None] = [None] * len(summaries)
    for i in training:
      costs = [e[key] for e in summaries[i]["evaluations"]]
      spent = [cost for cost in costs if cost <= reach]
      if spent and spent[-1] >= EARLIEST * reach:
        chosen[i] = len(spent) - 1
    early = [i for i in training if chosen[i] is None]
    at = Comparison(key=key, at=label, reach=reach, chosen=chosen, early=early)
    out.append(at)
  ends: list[int | None] = [len(run["evaluations"]) - 1 for run in summaries]
  end = Comparison(key=None, at="end", reach=None, chosen=ends, early=[])
  return [*out, end]


def _rows(
  runs: Sequence[LoadedRun], points: Sequence[Comparison]
) -> Iterator[dict[str, Any]]:
  """The evaluations in the tables: different starts, and those compared."""
  starts = []
  for i, run in enumerate(runs):
    labels: dict[int, list[str]] = {}
    start = (run.puzzle_seed, run.evaluations[0].rates)
    if run.evaluated is None and not run.evaluations[0].step:
      labels |= {} if start in starts else {0: ["start"]}
      starts.append(start)
    for point in points:
      chosen = point["chosen"][i]
      # Equal samples would add a row for each run.
      if chosen is not None and point["key"] != "samples":
        labels.setdefault(chosen, []).append(point["at"])
    for j, at in sorted(labels.items()):
      at = at if run.evaluated is None else ["evaluation"]
      yield {"run": i, "evaluation": j, "at": at}


def _arms(
  runs: Sequence[LoadedRun],
  summaries: Sequence[Json],
  points: Sequence[Comparison],
) -> list[dict[str, Any]]:
  groups: dict[str, dict[Any, int]] = {}
  for i, run in enumerate(runs):
    rest = {k: v for k, v in run.config.items() if k not in _SEED}
    key = json.dumps([run.evaluated, rest], sort_keys=True)
    while run.seed in groups.get(key, ()):  # that is no other seed
      key += "+"
    groups.setdefault(key, {})[run.seed] = i
  arms = [[*group.values()] for group in groups.values()]
  at = lambda arm, x: _result(runs, summaries, arm, arms[0], x["chosen"])
  return [
    {
      "runs": arm,
      "seeds": [runs[i].seed for i in arm],
      **{k: summaries[arm[0]][k] for k in ("training", "method", "n")},
      "at": {point["at"]: at(arm, point) for point in points},
    }
    for arm in arms
  ]


def _result(
  runs: Sequence[LoadedRun],
  summaries: Sequence[Json],
  arm: Sequence[int],
  base: Sequence[int],
  chosen: Sequence[int | None],
) -> dict[str, Any] | None:
  """Score, gain and cost of an arm at a point, and the test against `base`.

  None if a run of it is early there. Intervals are over the prompts of all
  seeds; of several seeds "low" and "high" are the extremes of their scores.
  """
  ends = [(i, j) for i in arm if (j := chosen[i]) is not None]
  if len(ends) < len(arm):
    return None
  mean = lambda values: None if None in values else float(np.mean(values))
  score = lambda e: e["summary"]["all"]["pass_at_k"]["1"]
  reached = [summaries[i]["evaluations"][j] for i, j in ends]
  after = [score(e) for e in reached]
  interval = reached[0]["summary"]["all"]
  out: dict[str, Any] = {
    "after": mean(after),
    "low": min(after) if len(arm) > 1 else interval["low"],
    "high": max(after) if len(arm) > 1 else interval["high"],
    **dict.fromkeys(("before", "gains", "gain_half", "against")),
    **{key: mean([e[key] for e in reached]) for key in ("step", *EQUAL)},
  }
  began = [summaries[i]["evaluations"][0] for i in arm]
  # A policy that was measured once gained nothing that was seen.
  if all(e["step"] == 0 for e in began) and all(j for _, j in ends):
    before = [score(e) for e in began]
    out["before"] = mean(before)
    out["gains"] = np.subtract(after, before).tolist()
    a, b, _ = _rates(runs, [(end, (end[0], 0)) for end in ends])
    if len(a) > 1:
      out["gain_half"] = stats.mean_interval(a - b)[1]
  pairs = []
  for i, j in ends if arm is not base else ():
    # With the same seed, or at least the same prompts.
    like = [
      (runs[k].seed != runs[i].seed, k, evaluation)
      for k in base
      if (evaluation := chosen[k]) is not None
      and runs[k].puzzle_seed == runs[i].puzzle_seed
    ]
    pairs += [((i, j), min(like)[1:])] if like else []
  out["against"] = paired(*_rates(runs, pairs))
  return out


def _rates(
  runs: Sequence[LoadedRun], pairs: Sequence[tuple[tuple[int, int], ...]]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
  """Pass@1 of pairs of (run, evaluation), prompt by prompt, and tasks."""
  a, b, tasks = list[float](), list[float](), list[str]()
  for (i, x), (j, y) in pairs:
    other = runs[j].evaluations[y].rates
    for name, rate in runs[i].evaluations[x].rates.items():
      a.append(rate)
      b.append(other[name])
      tasks.append("/".join(runs[i].prompts[name]))
  return np.array(a), np.array(b), tasks


def paired(
  a: np.ndarray, b: np.ndarray, tasks: Sequence[str]
) -> dict[str, Any] | None:
  """Tests of a - b, plain and clustered by task; one prompt gives none."""
  if len(a) < 2:
    return None
  names, cluster = np.unique(tasks, return_inverse=True)
  plain = stats.paired_t(a, b)
  by_task = len(names) > 1 and stats.paired_t(a, b, cluster=cluster)
  fields = ("standard_error", "t", "p_one_sided", "p_two_sided", "dof")
  tested = lambda t: {k: _finite(getattr(t, k)) for k in fields}
  return {
    "n": len(a),
    "difference": _finite(plain.difference),
    "effect_size": _finite(plain.effect_size),
    "plain": tested(plain) | {"clusters": len(a)},
    "by_task": tested(by_task) | {"clusters": len(names)} if by_task else None,
  }


def _differences(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
  trained = [run.config for run in runs if run.evaluated is None]
  fields = sorted({field for config in trained for field in config})
  every = ({"field": f, "values": [c.get(f) for c in trained]} for f in fields)
  differ = lambda values: any(value != values[0] for value in values)
  return [x for x in every if differ(x["values"])]
