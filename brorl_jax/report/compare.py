"""Runs with the same held-out prompts -> all numbers of the report.

The result is plain JSON. Tables, figures and page are made from it alone.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.report import answers, cost, events, paired

# Runs are compared at the largest cost that all of them reached.
EQUAL = {
  "net_hours": "equal time",
  "cpu_hours": "equal CPU time",
  "samples": "equal samples",
}
# An evaluation below this fraction of that cost is too early to compare.
EARLIEST = 0.9
MOST_PANELS = 12  # tasks whose curves are drawn


class Evaluation(NamedTuple):
  """One evaluation on the held-out prompts.

  Attributes:
    step: Step of the run; 0 is before training.
    summary: From `evaluate.summary`.
    rates: Pass@1 of each prompt, by id.
    shown: The records that hold a response.
  """

  step: int
  summary: Mapping[str, Any]
  rates: Mapping[str, float]
  shown: Sequence[Mapping[str, Any]] = ()


class Run(NamedTuple):
  """A training run, or an evaluation of one policy if it has no metrics.

  Attributes:
    name: Name in the report.
    folder: Path of the folder.
    config: Values by dotted field name, such as "data.files".
    metrics: Lines of metrics.jsonl.
    evaluations: Ordered by step.
    evaluated: Name of the evaluated policy; None for a training run.
    events: Lines of events.jsonl.
    visits: From `ledger.summary`; empty without a ledger.
  """

  name: str
  folder: str
  config: Mapping[str, Any]
  metrics: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Evaluation]
  evaluated: str | None
  events: Sequence[Mapping[str, Any]] = ()
  visits: Mapping[str, Any] = types.MappingProxyType({})


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
  of = lambda which: runs[which["run"]].evaluations[which["evaluation"]]
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
    "tests": list(paired.tests(lambda x: of(x).rates, tasks, at)),
    "paper": paired.PAPER,
    "leaders": list(_leaders(summaries, at)),
    "differences": _differences(runs),
  }
  out["panels"] = _panels(out)
  return out


def _run(run: Run) -> dict[str, Any]:
  spent = cost.spent(run.metrics)
  first, ending = run.evaluations[0], run.evaluations[-1]
  last = ending.step
  config = _at(run.config, last)
  wanted = run.config.get("run.steps")
  done = run.metrics[-1]["step"] if run.metrics else 0
  training = run.evaluated is None
  n, samples = config.get("sampling.n"), config.get("sampling.samples")
  prompts = config.get("sampling.groups") or (
    samples // n if n and samples else None
  )
  return {
    "name": run.name,
    "folder": run.folder,
    "training": training,
    "evaluated": run.evaluated,
    "method": _method(config) if training else f"evaluated: {run.evaluated}",
    "n": n if training else None,
    "samples_per_step": samples if training else None,
    "prompts_per_step": prompts if training else None,
    "steps": done if training else None,
    "steps_wanted": wanted if training else None,
    "finished": done == wanted == last if training else True,
    "throughput": cost.throughput(run.metrics),
    "rates": answers.rates(run.metrics),
    "visits": dict(run.visits),
    "answers": answers.pairs(
      first.shown, ending.shown, (first.rates, ending.rates)
    )
    if training
    else [],
    "events": events.folded(run.events),
    "marks": events.marks(run.events, spent) if training else [],
    "evaluations": [
      {
        "step": one.step if training else None,
        **(spent[one.step] if training else dict.fromkeys(_UNKNOWN)),
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


_UNKNOWN = ("hours", *EQUAL, "tokens")


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
  credit = config.get("advantage.credit")
  words += [f"{credit} credit"] if credit else []
  if (rule := config.get("sampling.allocation", "fixed")) != "fixed":
    words += [f"N from {config.get('sampling.n_min')} by {rule}"]
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


def _leaders(
  summaries: Sequence[Mapping[str, Any]],
  comparisons: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
  """The run with the highest pass@1 in each domain, if none is early."""
  for comparison in comparisons if len(summaries) > 1 else ():
    if comparison["early"]:
      continue
    for domain in summaries[0]["evaluations"][0]["summary"]["by_domain"]:
      score = lambda which: summaries[which["run"]]["evaluations"][
        which["evaluation"]
      ]["summary"]["by_domain"][domain]["pass_at_k"]["1"]
      best = max(map(score, comparison["chosen"]))
      who = [which for which in comparison["chosen"] if score(which) == best]
      yield {"at": comparison["at"], "domain": domain, "who": who}


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
