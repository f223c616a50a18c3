"""Runs with the same held-out prompts -> all numbers of the report.

The result is plain JSON. Tables, figures and page are made from it alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.report import events, stats

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
_HOUR = 3600.0  # seconds


class Evaluation(NamedTuple):
  """One evaluation on the held-out prompts."""

  step: int  # of the run; 0 is before training
  summary: Mapping[str, Any]  # from `evaluate.summary`
  rates: Mapping[str, float]  # pass@1 of each prompt, by id


class Run(NamedTuple):
  """A training run, or an evaluation of one policy if it has no metrics."""

  name: str  # name in the report
  folder: str  # its path
  config: Mapping[str, Any]  # values by dotted field name, such as "data.files"
  metrics: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
  evaluations: Sequence[Evaluation]  # ordered by step
  evaluated: str | None  # name of the evaluated policy; None for a training run
  events: Sequence[Mapping[str, Any]] = ()  # lines of events.jsonl


def numbers(
  runs: Sequence[Run],
  tasks: Mapping[str, str],
  *,
  category: Callable[[str, str], str | None],
) -> dict[str, Any]:
  """All numbers of the report.

  Args:
    runs: Runs with the same held-out prompts.
    tasks: From the id of each prompt to its domain and task, as one text.
    category: From a domain and a task to a category; None for no category.
  """
  summaries = [_run(run) for run in runs]
  at = _comparisons(summaries)
  domains = summaries[0]["evaluations"][0]["summary"]["by_domain"]
  for run in summaries:
    for evaluation in run["evaluations"]:
      evaluation["categories"] = _categories(evaluation["summary"], category)
  out = {
    "runs": summaries,
    "domains": list(domains),
    "tasks": {name: list(d["by_task"]) for name, d in domains.items()},
    "categories": sorted(summaries[0]["evaluations"][0]["categories"]),
    "prompts": len(tasks),
    "samples_per_prompt": summaries[0]["evaluations"][0]["summary"]["all"][
      "samples"
    ],
    "comparisons": at,
    "rows": list(_rows(runs, summaries, at)),
    "tests": list(_tests(runs, tasks, at)),
    "paper": PAPER,
    "differences": _differences(runs),
  }
  out["panels"] = _panels(out)
  return out


def _run(run: Run) -> dict[str, Any]:
  spent, last = _spent(run.metrics), run.evaluations[-1].step
  config = _at(run.config, last)
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
    "n": n if training else None,
    "prompts_per_step": prompts if training else None,
    "steps": done if training else None,
    "steps_wanted": wanted if training else None,
    "finished": done == wanted == last if training else True,
    "throughput": _throughput(run.metrics),
    "events": events.folded(run.events),
    "evaluations": [
      {
        "step": one.step if training else None,
        **(spent[one.step] if training else dict.fromkeys(EQUAL)),
        "summary": one.summary,
      }
      for one in run.evaluations
    ],
  }


def deeper(run: Run) -> dict[str, Any]:
  """An evaluation with more samples per prompt; only pass@k is drawn."""
  return {
    "name": run.name,
    "n": None,
    "evaluations": [{"summary": run.evaluations[-1].summary}],
  }


def _spent(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
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


def _throughput(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
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


def _at(config: Mapping[str, Any], step: int) -> dict[str, Any]:
  """The config at a step, after the phases that started before it."""
  out = dict(config)
  for phase in config.get("run.phases") or ():
    if phase["from_step"] <= step:
      out |= phase
  return out


def _method(config: Mapping[str, Any]) -> str:
  """The method in a few words; another table lists all differences."""
  words = [config.get("loss.kind"), config.get("advantage.kind")]
  if rounds := config.get("sampling.rounds"):
    words += [f"N from {rounds[0]} in rounds"]
  return ", ".join(str(word) for word in words if word)


def _comparisons(
  summaries: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
  """The points at which runs are compared: equal cost, and their ends.

  Runs that are "early" at a point have no evaluation near it and are left out.
  """
  out, training = [], [i for i, run in enumerate(summaries) if run["training"]]
  for key, label in EQUAL.items():
    last = [summaries[i]["evaluations"][-1][key] for i in training]
    if len(training) < 2:
      continue
    reach = min(last)
    chosen, early = [], []
    for i in training:
      before = [e[key] for e in summaries[i]["evaluations"] if e[key] <= reach]
      chosen.append({"run": i, "evaluation": len(before) - 1})
      early += [i] if before[-1] < EARLIEST * reach else []
    comparison = {"key": key, "at": label, "reach": reach, "chosen": chosen}
    out.append(comparison | {"early": early})
  ends = [
    {"run": i, "evaluation": len(run["evaluations"]) - 1}
    for i, run in enumerate(summaries)
  ]
  end = {"key": None, "at": "end", "reach": None, "chosen": ends, "early": []}
  return [*out, end]


def _rows(
  runs: Sequence[Run],
  summaries: Sequence[Mapping[str, Any]],
  comparisons: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
  """The rows of Table 1: each start once, then the compared evaluations."""
  starts: list[tuple[Any, list[int]]] = []
  for i, run in enumerate(runs):
    if summaries[i]["training"] and run.evaluations[0].step == 0:
      rates = run.evaluations[0].rates
      same = [who for seen, who in starts if seen == rates]
      if same:
        same[0].append(i)
      else:
        starts.append((rates, [i]))
  for _, who in starts:
    names = [summaries[i]["name"] for i in who]
    yield {"run": who[0], "evaluation": 0, "at": ["start"], "names": names}
  for i, run in enumerate(summaries):
    labels: dict[int, list[str]] = {}
    for comparison in comparisons:
      if comparison["key"] == "samples":  # would add a row for each run
        continue
      for chosen in comparison["chosen"]:
        if chosen["run"] == i:
          at = (
            f"before {comparison['at']}"
            if i in comparison["early"]
            else comparison["at"]
          )
          labels.setdefault(chosen["evaluation"], []).append(at)
    for j, at in sorted(labels.items()):
      at = at if run["training"] else ["evaluation"]
      yield {"run": i, "evaluation": j, "at": at, "names": [run["name"]]}


def _tests(
  runs: Sequence[Run],
  tasks: Mapping[str, str],
  comparisons: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
  """Tests of the first run against each other run, paired by prompt.

  One prompt has no variance and gives no test; neither does an early run.
  Prompts are clustered by task.
  """
  index = {name: i for i, name in enumerate(sorted(set(tasks.values())))}
  cluster = np.array([index[task] for task in tasks.values()])
  for comparison in comparisons if len(tasks) > 1 else ():
    first, *others = comparison["chosen"]
    for other in others:
      if {first["run"], other["run"]} & {*comparison["early"]}:
        continue
      seen = [
        runs[x["run"]].evaluations[x["evaluation"]] for x in (other, first)
      ]
      a, b = (np.array([one.rates[id] for id in tasks]) for one in seen)
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
        "plain": _measured(plain),
        "by_task": None if by_task is None else _measured(by_task),
      }


def _measured(result: stats.PairedT) -> dict[str, Any]:
  names = ("standard_error", "t", "p_one_sided", "p_two_sided", "dof")
  out = {name: _finite(getattr(result, name)) for name in names}
  return out | {"clusters": result.dof + 1}


def _finite(value: Any) -> float | None:
  """None for an infinite t (no variance): JSON has no infinities."""
  return float(value) if np.isfinite(value) else None


def _categories(
  summary: Mapping[str, Any], category: Callable[[str, str], str | None]
) -> dict[str, float]:
  """Mean pass@1 over the tasks of each category."""
  scores: dict[str, list[float]] = {}
  for domain, numbers in summary["by_domain"].items():
    for task, s in numbers["by_task"].items():
      if (name := category(domain, task)) is not None:
        scores.setdefault(name, []).append(s["pass_at_k"]["1"])
  return {name: float(np.mean(x)) for name, x in scores.items()}


def _panels(out: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Tasks to draw: those with the largest differences between runs."""
  chosen = next(c["chosen"] for c in out["comparisons"] if not c["early"])

  def spread(domain: str, task: str) -> float:
    scores = [
      out["runs"][c["run"]]["evaluations"][c["evaluation"]]["summary"][
        "by_domain"
      ][domain]["by_task"][task]["pass_at_k"]["1"]
      for c in chosen
    ]
    return max(scores) - min(scores)

  every = [(d, task) for d in out["domains"] for task in out["tasks"][d]]
  most = sorted(every, key=lambda one: -spread(*one))[:MOST_PANELS]
  return [
    {"domain": d, "task": task, "spread": spread(d, task)}
    for d, task in every
    if (d, task) in most
  ]


def _differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
  """Config fields in which training runs differ, with their values."""
  trained = [run.config for run in runs if run.evaluated is None]
  fields = sorted({field for config in trained for field in config})
  values = [(f, [config.get(f) for config in trained]) for f in fields]
  return [
    {"field": field, "values": each}
    for field, each in values
    if any(value != each[0] for value in each)
  ]
