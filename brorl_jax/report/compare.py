"""Runs that were measured on the same prompts -> every number of the report.

What comes out is plain JSON, and the only source of tables, figures and page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.report import cost, paired

# Runs are compared where all of them have spent, or generated, as much.
EQUAL = {
  "net_hours": "equal time",
  "cpu_hours": "equal CPU time",
  "samples": "equal samples",
}
# An evaluation before this share of what is equal shows another policy.
EARLIEST = 0.9
MOST_PANELS = 12  # tasks of which trajectories are drawn


class Evaluation(NamedTuple):
  """What the held-out prompts showed at one step.

  Attributes:
    step: 0 is the start.
    summary: Of `evaluate.summary`.
    rates: Pass@1 of each prompt by its id.
  """

  step: int
  summary: Mapping[str, Any]
  rates: Mapping[str, float]


class Run(NamedTuple):
  """A training run, or an evaluation of one policy if it has no metrics.

  Attributes:
    name: What it is called in the report.
    folder: Where it lies.
    config: Field -> value, nested fields as "data.files".
    metrics: Lines of metrics.jsonl.
    evaluations: By step.
    evaluated: Which policy, of a folder that has no metrics.
  """

  name: str
  folder: str
  config: Mapping[str, Any]
  metrics: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Evaluation]
  evaluated: str | None


def numbers(
  runs: Sequence[Run],
  tasks: Mapping[str, str],
  *,
  category: Callable[[str], str | None],
) -> dict[str, Any]:
  """Everything that the report says.

  Args:
    runs: Measured on the same prompts.
    tasks: Id of each prompt -> its domain and task, in one text.
    category: Task of the gym -> its category, if it has one.
  """
  told = [_run(run) for run in runs]
  at = _comparisons(told)
  domains = told[0]["evaluations"][0]["summary"]["by_domain"]
  for run in told:
    for one in run["evaluations"]:
      one["categories"] = _categories(one["summary"], category)
  of = lambda which: runs[which["run"]].evaluations[which["evaluation"]]
  out = {
    "runs": told,
    "domains": list(domains),
    "tasks": {name: list(d["by_task"]) for name, d in domains.items()},
    "categories": sorted(told[0]["evaluations"][0]["categories"]),
    "prompts": len(tasks),
    "samples_per_prompt": told[0]["evaluations"][0]["summary"]["all"][
      "samples"
    ],
    "comparisons": at,
    "rows": list(_rows(runs, told, at)),
    "tests": list(paired.tests(lambda x: of(x).rates, tasks, at)),
    "paper": paired.PAPER,
    "leaders": list(_leaders(told, at)),
    "differences": _differences(runs),
  }
  out["panels"] = _panels(out)
  return out


def _run(run: Run) -> dict[str, Any]:
  spent = cost.spent(run.metrics)
  last = run.evaluations[-1].step
  config = _at(run.config, last)
  wanted = run.config.get("steps")
  done = run.metrics[-1]["step"] if run.metrics else 0
  training = run.evaluated is None
  n, samples = config.get("n"), config.get("samples")
  return {
    "name": run.name,
    "folder": run.folder,
    "training": training,
    "evaluated": run.evaluated,
    "method": _method(config) if training else f"evaluated: {run.evaluated}",
    "n": n if training else None,
    "samples_per_step": samples if training else None,
    "prompts_per_step": samples // n if training and n and samples else None,
    "steps": done if training else None,
    "steps_wanted": wanted if training else None,
    "finished": done == wanted == last if training else True,
    "throughput": cost.throughput(run.metrics),
    "evaluations": [
      {
        "step": one.step if training else None,
        **(spent[one.step] if training else dict.fromkeys(_UNKNOWN)),
        "summary": one.summary,
      }
      for one in run.evaluations
    ],
  }


_UNKNOWN = ("hours", *EQUAL, "tokens")


def _at(config: Mapping[str, Any], step: int) -> dict[str, Any]:
  """The config with the phases that have begun by a step."""
  out = dict(config)
  for phase in config.get("phases") or ():
    if phase["from_step"] <= step:
      out |= phase
  return out


def _method(config: Mapping[str, Any]) -> str:
  """The recipe in a few words; all that differs has a table of its own."""
  words = [config.get("loss"), config.get("advantage")]
  credit = config.get("credit")
  words += [f"{credit} credit"] if credit else []
  return ", ".join(str(word) for word in words if word)


def _comparisons(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Where runs are compared: where all spent as much, and at their ends.

  Runs that are "early" there have no evaluation near it, and are not compared.
  """
  out, training = [], [i for i, run in enumerate(told) if run["training"]]
  for key, label in EQUAL.items():
    last = [told[i]["evaluations"][-1][key] for i in training]
    if len(training) < 2 or None in last:
      continue
    reach = min(last)
    chosen, early = [], []
    for i in training:
      before = [e[key] for e in told[i]["evaluations"] if e[key] <= reach]
      chosen.append({"run": i, "evaluation": len(before) - 1})
      early += [i] if before[-1] < EARLIEST * reach else []
    one = {"key": key, "at": label, "reach": reach, "chosen": chosen}
    out.append(one | {"early": early})
  ends = [
    {"run": i, "evaluation": len(run["evaluations"]) - 1}
    for i, run in enumerate(told)
  ]
  end = {"key": None, "at": "end", "reach": None, "chosen": ends, "early": []}
  return [*out, end]


def _rows(
  runs: Sequence[Run],
  told: Sequence[Mapping[str, Any]],
  comparisons: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
  """The rows of Table 1: starts, each once, then what is compared."""
  starts: list[tuple[Any, list[int]]] = []
  for i, run in enumerate(runs):
    if told[i]["training"] and run.evaluations[0].step == 0:
      rates = run.evaluations[0].rates
      same = [who for seen, who in starts if seen == rates]
      if same:
        same[0].append(i)
      else:
        starts.append((rates, [i]))
  for _, who in starts:
    names = [told[i]["name"] for i in who]
    yield {"run": who[0], "evaluation": 0, "at": ["start"], "names": names}
  for i, run in enumerate(told):
    labels: dict[int, list[str]] = {}
    for one in comparisons:
      if one["key"] == "samples":  # it would be a row more for each run
        continue
      for chosen in one["chosen"]:
        if chosen["run"] == i:
          at = f"before {one['at']}" if i in one["early"] else one["at"]
          labels.setdefault(chosen["evaluation"], []).append(at)
    for j, at in sorted(labels.items()):
      at = at if run["training"] else ["evaluation"]
      yield {"run": i, "evaluation": j, "at": at, "names": [run["name"]]}


def _leaders(
  told: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
  """Which run has the highest pass@1, in each domain, if none is early."""
  for one in comparisons if len(told) > 1 else ():
    if one["early"]:
      continue
    for domain in told[0]["evaluations"][0]["summary"]["by_domain"]:
      score = lambda which: told[which["run"]]["evaluations"][
        which["evaluation"]
      ]["summary"]["by_domain"][domain]["pass_at_k"]["1"]
      best = max(map(score, one["chosen"]))
      who = [which for which in one["chosen"] if score(which) == best]
      yield {"at": one["at"], "domain": domain, "who": who}


def _categories(
  summary: Mapping[str, Any], category: Callable[[str], str | None]
) -> dict[str, float]:
  """Category of the gym's tasks -> mean pass@1 over its tasks here."""
  scores: dict[str, list[float]] = {}
  gym = summary["by_domain"].get("gym", {"by_task": {}})
  for task, s in gym["by_task"].items():
    scores.setdefault(category(task) or "other", []).append(s["pass_at_k"]["1"])
  return {name: float(np.mean(x)) for name, x in scores.items()}


def _panels(out: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Tasks to draw: all, or those that differ most where runs are compared."""
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
  """Fields in which training runs differ, with the value of each."""
  trained = [run.config for run in runs if run.evaluated is None]
  fields = sorted({field for config in trained for field in config})
  values = [(f, [config.get(f) for config in trained]) for f in fields]
  return [
    {"field": field, "values": each}
    for field, each in values
    if any(value != each[0] for value in each)
  ]
