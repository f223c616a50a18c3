"""Runs -> all numbers of the report, as plain JSON.

Tables, figures and page are made from it alone. An *arm* is a method: runs that
differ in nothing but their seed.
"""

import collections
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import numpy as np

from brorl_jax.report import stats
from brorl_jax.report.load_runs import MOST_SAMPLES, Json, LoadedRun, Value

# Runs are compared at the largest cost that all of them reached.
EQUAL = {
  "net_hours": "equal time",
  "cpu_hours": "equal CPU time",
  "samples": "equal samples",
}
# An evaluation below this fraction of that cost is too early to compare.
EARLIEST = 0.9
MOST_PANELS = 12  # tasks whose curves are drawn
# The test of the paper: unclustered, over more than 10,000 instances.
PAPER = {"difference": 0.0033, "t": 4.84, "p_one_sided": 6.5e-7}
# Curves of training: name -> metric.
CURVES = {
  "reward": "reward/mean",
  "entropy": "policy/entropy",
  "length": "rollout/length_mean",
  "kl": "policy/kl_ref",
  "kept": "sampling/pass_rate",
  "alive": "sampling/rate_share/none",  # 1 minus it
}
_HOUR = 3600.0  # seconds
_LARGEST = 1e18  # a larger value of a curve is none
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SHAPES = 5  # rows of events of one kind; where there are more, they are one
_LONGEST = 300  # characters of an event
# Which process it was; columns of their own.
_ASIDE = ("step", "time", "event", "why", "pid", "host")
# Config entries that do not make another method.
_SEED = ("run.seed", "git_commit")


class Chosen(TypedDict):
  """An evaluation of a run, by their indices."""

  run: int
  evaluation: int


class Comparison(TypedDict):
  """A point at which runs are compared."""

  key: str | None  # of EQUAL; None for the ends of the runs
  at: str
  reach: Value  # the cost that all runs reached
  chosen: list[Chosen]
  early: list[int]  # runs without an evaluation near it


def numbers(
  runs: Sequence[LoadedRun], *, category: Callable[[str, str], str | None]
) -> dict[str, Any]:
  """All numbers of the report.

  Args:
    runs: Runs with the same held-out prompts, or with puzzles of the same tasks
      and other seeds.
    category: From a domain and a task to a category; None for no category.
  """
  summaries = [_run(run) for run in runs]
  for run in summaries:
    for evaluation in run["evaluations"]:
      evaluation["categories"] = _categories(evaluation["summary"], category)
  first = summaries[0]["evaluations"][0]
  domains = first["summary"]["by_domain"]
  at = _comparisons(summaries)
  out = {
    "runs": summaries,
    "domains": [*domains],
    "tasks": {name: [*d["by_task"]] for name, d in domains.items()},
    "categories": sorted(first["categories"]),
    "prompts": len(runs[0].prompts),
    "samples_per_prompt": first["summary"]["all"]["samples"],
    "comparisons": at,
    "arms": _arms(runs, summaries, at),
    "rows": [*_rows(runs, at)],
    "tests": [*_tests(runs, at)],
    "paper": PAPER,
    "differences": _differences(runs),
    "responses": [x for i, run in enumerate(runs) for x in _responses(i, run)],
    "samples": [
      {"run": i, **sample}
      for i, run in enumerate(runs)
      for sample in run.samples[-(MOST_SAMPLES // len(runs)) :]
    ],
  }
  return out | {"panels": _panels(out)}


def deeper(run: LoadedRun) -> dict[str, Any]:
  """An evaluation with more samples per prompt; only pass@k is drawn."""
  return {
    "name": run.name,
    "n": None,
    "evaluations": [{"summary": run.evaluations[-1].summary}],
  }


# ------------------------------------------------------------------- one run


def _run(run: LoadedRun) -> dict[str, Any]:
  spent, last = _spent(run.metrics), run.evaluations[-1].step
  config = _config_at(run.config, last)
  wanted = run.config.get("run.steps")
  done = run.metrics[-1]["step"] if run.metrics else 0
  training = run.evaluated is None
  n, samples = config.get("sampling.n"), config.get("sampling.samples")
  prompts = samples // n if n and samples else None
  return {
    "name": run.name,
    "folder": run.folder,
    "training": training,
    "evaluated": run.evaluated,
    "method": _method(config) if training else f"evaluated: {run.evaluated}",
    "seed": run.seed,
    "n": n if training else None,
    "prompts_per_step": prompts if training else None,
    "steps": done if training else None,
    "steps_wanted": wanted if training else None,
    "finished": done == wanted == last if training else True,
    "throughput": _throughput(run.metrics),
    "curves": _curves(run.metrics),
    "marks": _marks(run.events),
    "events": folded(run.events),
    "evaluations": [
      {
        "step": e.step if training else None,
        **(spent[e.step] if training else dict.fromkeys(EQUAL)),
        "summary": e.summary,
      }
      for e in run.evaluations
    ],
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
  and saving. None if nothing was sampled, or no time was spent.
  """
  if not lines:
    return None
  first = 1 if len(lines) > 1 else 0
  rest = lines[first:]
  total = lambda name: float(sum(line[name] for line in rest))
  made = lambda name: np.diff([0, *(line[name] for line in lines)])[first:]
  each = made("data/samples_total")
  samples, tokens = float(each.sum()), float(made("data/tokens_total").sum())
  kept = float(each @ [line["sampling/pass_rate"] for line in rest])
  generation = total("time/rollout_s")
  overall = total("time/step_s") + total("time/checkpoint_s")
  if min(samples, generation, overall) <= 0.0:
    return None
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


def _curves(lines: Sequence[Json]) -> dict[str, list[Value]]:
  """Metrics by step, with the cumulative CPU time; without empty ones."""
  out: dict[str, list[Value]] = {
    name: [
      None if x is None else 1 - x if name == "alive" else x
      for x in (_finite(line.get(metric)) for line in lines)
    ]
    for name, metric in CURVES.items()
  }
  out = {name: y for name, y in out.items() if any(x is not None for x in y)}
  cpu_s = np.cumsum([float(line["time/cpu_s"]) for line in lines])
  steps = [x["step"] for x in lines]
  return {"step": steps, "cpu_hours": (cpu_s / _HOUR).tolist(), **out}


def _finite(x: Any) -> Value:
  """None for what is no number, or infinite: JSON has no infinities."""
  number = isinstance(x, int | float) and not isinstance(x, bool)
  return x if number and abs(x) < _LARGEST else None


def _config_at(config: Json, step: int) -> dict[str, Any]:
  """The config at a step, after the phases that started before it."""
  out = dict(config)
  for phase in config.get("run.phases") or ():
    if phase["from_step"] <= step:
      out |= phase
  return out


def _method(config: Json) -> str:
  """The method in a few words; another table lists all differences."""
  words = [config.get("loss.kind"), config.get("advantage.kind")]
  if rounds := config.get("sampling.rounds"):
    words += [f"N from {rounds[0]} in rounds"]
  return ", ".join(str(word) for word in words if word)


def _responses(i: int, run: LoadedRun) -> list[dict[str, Any]]:
  """First responses to the same prompts at the first and last evaluation."""
  first, last = run.evaluations[0], run.evaluations[-1]
  before = {r["id"]: r for r in first.responses} if first is not last else {}
  said = lambda r: {k: r[k] for k in ("response", "status", "reason")}
  out = [
    {
      **{"run": i, "id": r["id"], "task": r["task"], "prompt": r["prompt"]},
      "before": said(before[r["id"]]) if r["id"] in before else None,
      "after": said(r),
    }
    for r in last.responses
  ]
  return out[: MOST_SAMPLES // 4]


# -------------------------------------------------------------------- events


def folded(events: Sequence[Json]) -> list[dict[str, Any]]:
  """Rows by first occurrence; those that differ only in numbers are one."""
  shape = lambda e: (e["event"], _NUMBER.sub("0", _what(e)))
  per_kind = collections.Counter(kind for kind, _ in {shape(e) for e in events})
  rows: dict[Any, dict[str, Any]] = {}
  for event in events:
    key = shape(event)
    key = key if per_kind[key[0]] <= _SHAPES else key[0]
    time = f"{event['time'][:10]} {event['time'][11:19]}"  # to the second
    at = {"step": event["step"], "time": time}
    row = rows.setdefault(
      key, {"event": event["event"], "count": 0, "first": at}
    )
    row |= {"count": row["count"] + 1, "last": at, "what": _what(event)}
  return list(rows.values())


def _what(event: Json) -> str:
  """All that an event says, as one line."""
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


def _marks(events: Sequence[Json]) -> list[dict[str, Any]]:
  """Kinds of events by step, for the curves; start and end mark themselves."""
  marks: dict[int, dict[str, None]] = {}
  for event in events:
    if event["event"] not in ("start", "end"):
      marks.setdefault(event["step"], {})[event["event"]] = None
  return [{"step": step, "events": [*kinds]} for step, kinds in marks.items()]


# --------------------------------------------------------------- comparisons


def _comparisons(summaries: Sequence[Json]) -> list[Comparison]:
  """The points at which runs are compared: equal cost, and their ends.

  Runs that are "early" at a point have no evaluation near it and are left out.
  """
  out = list[Comparison]()
  training = [i for i, run in enumerate(summaries) if run["training"]]
  for key, label in EQUAL.items() if len(training) > 1 else ():
    reach = min(summaries[i]["evaluations"][-1][key] for i in training)
    chosen, early = list[Chosen](), list[int]()
    for i in training:
      before = [e[key] for e in summaries[i]["evaluations"] if e[key] <= reach]
      chosen.append(Chosen(run=i, evaluation=len(before) - 1))
      early += [i] if before[-1] < EARLIEST * reach else []
    at = Comparison(key=key, at=label, reach=reach, chosen=chosen, early=early)
    out.append(at)
  ends = [
    Chosen(run=i, evaluation=len(run["evaluations"]) - 1)
    for i, run in enumerate(summaries)
  ]
  end = Comparison(key=None, at="end", reach=None, chosen=ends, early=[])
  return [*out, end]


def _rows(
  runs: Sequence[LoadedRun], comparisons: Sequence[Comparison]
) -> Iterator[dict[str, Any]]:
  """The rows of Table 1: each start once, then the compared evaluations."""
  starts: list[tuple[Any, list[int]]] = []
  for i, run in enumerate(runs):
    if run.evaluated is None and run.evaluations[0].step == 0:
      start = (run.puzzle_seed, run.evaluations[0].rates)
      same = [members for seen, members in starts if seen == start]
      same[0].append(i) if same else starts.append((start, [i]))
  for _, members in starts:
    names = [runs[i].name for i in members]
    yield {"run": members[0], "evaluation": 0, "at": ["start"], "names": names}
  for i, run in enumerate(runs):
    labels: dict[int, list[str]] = {}
    for comparison in comparisons:
      if comparison["key"] == "samples":  # would add a row for each run
        continue
      early = "before " if i in comparison["early"] else ""
      for chosen in comparison["chosen"]:
        if chosen["run"] == i:
          at = labels.setdefault(chosen["evaluation"], [])
          at.append(f"{early}{comparison['at']}")
    for j, at in sorted(labels.items()):
      at = at if run.evaluated is None else ["evaluation"]
      yield {"run": i, "evaluation": j, "at": at, "names": [run.name]}


def _tests(
  runs: Sequence[LoadedRun], comparisons: Sequence[Comparison]
) -> Iterator[dict[str, Any]]:
  """Tests of the first run against each other run of its prompts.

  One prompt has no variance and gives no test; neither does an early run.
  """
  for comparison in comparisons:
    firsts: dict[int | None, Chosen] = {}
    for other in comparison["chosen"]:
      first = firsts.setdefault(runs[other["run"]].puzzle_seed, other)
      early = {first["run"], other["run"]} & {*comparison["early"]}
      if first is other or early or len(runs[first["run"]].prompts) < 2:
        continue
      at = {"at": comparison["at"], "first": first, "other": other}
      yield at | _paired(runs, [(other, first)])


def _rates(
  runs: Sequence[LoadedRun], pairs: Sequence[tuple[Chosen, Chosen]]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
  """Pass@1 of pairs of evaluations, prompt by prompt, and tasks."""
  a, b, tasks = list[float](), list[float](), list[str]()
  for pair in pairs:
    mine, other = (
      runs[x["run"]].evaluations[x["evaluation"]].rates for x in pair
    )
    prompts = runs[pair[0]["run"]].prompts
    a += [mine[id] for id in prompts]
    b += [other[id] for id in prompts]
    tasks += ["/".join(where) for where in prompts.values()]
  return np.array(a), np.array(b), tasks


def _paired(
  runs: Sequence[LoadedRun], pairs: Sequence[tuple[Chosen, Chosen]]
) -> dict[str, Any]:
  """Tests of pass@1 of evaluations minus that of others, clustered by task."""
  *rates, tasks = _rates(runs, pairs)
  names, cluster = np.unique(tasks, return_inverse=True)
  plain = stats.paired_t(*rates)
  by_task = None
  if len(names) > 1:
    by_task = _measured(stats.paired_t(*rates, cluster=cluster))
  return {
    "n": len(tasks),
    "difference": _finite(plain.difference),
    "effect_size": _finite(plain.effect_size),
    "plain": _measured(plain),
    "by_task": by_task,
  }


def _measured(result: stats.PairedT) -> dict[str, Any]:
  names = ("standard_error", "t", "p_one_sided", "p_two_sided", "dof")
  out = {name: _finite(getattr(result, name)) for name in names}
  return out | {"clusters": result.dof + 1}


# ---------------------------------------------------------------------- arms


def _arms(
  runs: Sequence[LoadedRun],
  summaries: Sequence[Json],
  comparisons: Sequence[Comparison],
) -> list[dict[str, Any]]:
  """Methods with their results: means over the seeds of each."""
  groups: dict[str, dict[Any, int]] = {}
  for i, run in enumerate(runs):
    rest = {k: v for k, v in run.config.items() if k not in _SEED}
    key = json.dumps([run.evaluated, rest], sort_keys=True)
    while run.seed in groups.get(key, ()):  # that is no other seed
      key += "+"
    groups.setdefault(key, {})[run.seed] = i
  members = [[*group.values()] for group in groups.values()]
  # Equal time first; the tables have the other points.
  points = {c["at"]: c for c in (comparisons[0], comparisons[-1])}
  return [
    {
      "runs": arm,
      "seeds": [runs[i].seed for i in arm],
      "training": summaries[arm[0]]["training"],
      "method": summaries[arm[0]]["method"],
      "n": summaries[arm[0]]["n"],
      "at": {
        at: _result(runs, summaries, arm, members[0], point)
        for at, point in points.items()
      },
    }
    for arm in members
  ]


def _result(
  runs: Sequence[LoadedRun],
  summaries: Sequence[Json],
  arm: Sequence[int],
  base: Sequence[int],
  point: Comparison,
) -> dict[str, Any] | None:
  """Score, gain and cost of an arm at a point, and the first arm's score.

  None if a run of it is early there. Intervals are over the prompts of all
  seeds; of several seeds "low" and "high" are the extremes of their scores.
  """
  late = {
    x["run"]: x for x in point["chosen"] if x["run"] not in point["early"]
  }
  if not late.keys() >= {*arm}:
    return None
  starts = [Chosen(run=i, evaluation=0) for i in arm]
  ends = [late[i] for i in arm]
  began, reached = (
    [summaries[x["run"]]["evaluations"][x["evaluation"]] for x in some]
    for some in (starts, ends)
  )
  before, after = (
    [e["summary"]["all"]["pass_at_k"]["1"] for e in some]
    for some in (began, reached)
  )
  mean = lambda values: None if None in values else float(np.mean(values))
  interval = [reached[0]["summary"]["all"][side] for side in ("low", "high")]
  started = all(e["step"] == 0 for e in began)
  a, b, _ = _rates(runs, [*zip(ends, starts, strict=True)])
  pairs = []
  for i in arm:  # with the same seed, or at least the same prompts
    like = lambda j, i=i: runs[j].puzzle_seed == runs[i].puzzle_seed
    same = [j for j in base if j in late and like(j)]
    same.sort(key=lambda j, i=i: runs[j].seed != runs[i].seed)
    pairs += [(late[i], late[j]) for j in same[:1]]
  return {
    "before": mean(before) if started else None,
    "after": mean(after),
    "low": min(after) if len(arm) > 1 else interval[0],
    "high": max(after) if len(arm) > 1 else interval[1],
    "gains": np.subtract(after, before).tolist() if started else None,
    "gain_half": stats.mean_interval(a - b)[1]
    if started and len(a) > 1
    else None,
    **{key: mean([e[key] for e in reached]) for key in ("step", *EQUAL)},
    "against": None
    if arm == base or not pairs or len(a) < 2
    else _paired(runs, pairs),
  }


# -------------------------------------------------------------------- tables


def _categories(
  summary: Json, category: Callable[[str, str], str | None]
) -> dict[str, float]:
  """Mean pass@1 over the tasks of each category."""
  scores: dict[str, list[float]] = {}
  for domain, of_domain in summary["by_domain"].items():
    for task, s in of_domain["by_task"].items():
      if (name := category(domain, task)) is not None:
        scores.setdefault(name, []).append(s["pass_at_k"]["1"])
  return {name: float(np.mean(x)) for name, x in scores.items()}


def _panels(out: Json) -> list[dict[str, Any]]:
  """Tasks to draw: those with the largest differences between runs."""
  chosen = next(c["chosen"] for c in out["comparisons"] if not c["early"])
  some = [
    out["runs"][c["run"]]["evaluations"][c["evaluation"]]["summary"][
      "by_domain"
    ]
    for c in chosen
  ]
  every = []
  for d in out["domains"]:
    for task in out["tasks"][d]:
      scores = [s[d]["by_task"][task]["pass_at_k"]["1"] for s in some]
      spread = max(scores) - min(scores)
      every.append({"domain": d, "task": task, "spread": spread})
  widest = sorted(every, key=lambda x: -x["spread"])[:MOST_PANELS]
  return [x for x in every if x in widest]


def _differences(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
  """Config fields in which training runs differ, with their values."""
  trained = [run.config for run in runs if run.evaluated is None]
  fields = sorted({field for config in trained for field in config})
  every = ((f, [config.get(f) for config in trained]) for f in fields)
  return [
    {"field": field, "values": values}
    for field, values in every
    if any(value != values[0] for value in values)
  ]
