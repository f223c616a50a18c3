"""The numbers of a comparison -> the paper's tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.report import cells, events
from brorl_jax.report.cells import Cell, Number, Part, Table

_WIDE = 70  # characters of column names above which a table is transposed


def main(data: Mapping[str, Any]) -> Table:
  """Table 1: the settings of each run and its score in each domain."""
  several = len(data["domains"]) > 1
  domains = [*data["domains"], *(["all prompts"] if several else [])]
  head = ["run", "at", "method", "N", "prompts", "steps", "samples (k)"]
  head += ["time", "CPU time", *domains]
  rows = []
  for i, row in enumerate(data["rows"]):
    run, at = ("runs", row["run"]), _at(data, i)
    trained = lambda key, kind: Number((*run, key), kind)
    spent = lambda key, kind: Number((*at, key), kind)
    scores = [
      score(data, (*at, "summary", "by_domain", domain))
      for domain in data["domains"]
    ]
    scores += [score(data, (*at, "summary", "all"))] if several else []
    shared = len(row["names"]) > 1  # a start that several runs share
    method = data["runs"][row["run"]]["method"]
    rows.append(
      [
        *_label(row),
        "" if shared else method,
        "" if shared else trained("n", "count"),
        "" if shared else trained("prompts_per_step", "count"),
        spent("step", "count"),
        spent("samples", "thousands"),
        spent("net_hours", "time"),
        spent("cpu_hours", "time"),
        *scores,
      ]
    )
  caption = [
    "Scores are pass@1 in percent, the mean over all samples of a prompt "
    "(mean@k), with their 95 % bootstrap intervals over prompts; a domain is "
    "the mean over its tasks. Prompts are those that a "
    "step trains on; samples, in thousands, all that were generated. Time is "
    "that of steps and saving, CPU time that of the process, both without "
    "compiling and without evaluations.",
    *reached(data),
  ]
  title = "Table 1. Cost and score of each run"
  return Table(title, caption, head, rows, 3)


def _at(data: Mapping[str, Any], i: int) -> tuple[str | int, ...]:
  """Path of the evaluation that row i shows."""
  row = data["rows"][i]
  return ("runs", row["run"], "evaluations", row["evaluation"])


def _label(row: Mapping[str, Any]) -> list[str]:
  return [", ".join(row["names"]), ", ".join(row["at"])]


def score(data: Any, path: tuple[str | int, ...]) -> Cell:
  """Pass@1 and its interval, if it has one."""
  low, high = (Number((*path, end), "percent1") for end in ("low", "high"))
  score = Number((*path, "pass_at_k", "1"), "percent")
  if cells.value(low.path, data) is None:
    return score
  return [score, "\n[", low, ", ", high, "]"]


def reached(data: Mapping[str, Any]) -> list[Part]:
  """Where runs are compared, and which are left out there."""
  parts: list[Part] = []
  early: list[Part] = []
  for i, comparison in enumerate(data["comparisons"]):
    key, at = comparison["key"], comparison["at"]
    if key is None:
      continue
    parts += ["; " if parts else " Compared are last evaluations by "]
    parts += [*_amount(key, ("comparisons", i, "reach")), f" ({at})"]
    some = [x for x in comparison["chosen"] if x["run"] in comparison["early"]]
    for j, which in enumerate(some):
      name = data["runs"][which["run"]]["name"]
      path = ("runs", which["run"], "evaluations", which["evaluation"], key)
      early += [" and " if j else f" At {at} "]
      early += [f"{name} was last evaluated after ", *_amount(key, path)]
    early += [" and is not compared."] if some else []
  return [*parts, ", which all runs reached.", *early] if parts else []


def _amount(key: str, path: tuple[str | int, ...]) -> list[Part]:
  """A cost with its unit; `key` is one of `compare.EQUAL`."""
  unit = {"cpu_hours": " of the processor", "samples": " samples"}.get(key, "")
  return [Number(path, "count" if key == "samples" else "time"), unit]


def throughput(data: Mapping[str, Any]) -> Table:
  """Table 2: speed of generation, and the share of useful samples."""
  columns = (
    ("pass rate, %", "pass_rate", "percent1"),
    ("samples/s, generation", "generated_per_generation_s", "rate"),
    ("samples/s, overall", "generated_per_s", "rate"),
    ("tokens/s, generation", "tokens_per_generation_s", "rate"),
    ("kept samples/s, overall", "kept_per_s", "rate"),
    ("generation, % of time", "generation_share", "percent1"),
    ("reward std in a group", "reward_std_within_group", "decimal"),
  )
  rows = [
    [
      run["name"],
      Number(("runs", i, "n"), "count"),
      Number(("runs", i, "throughput", "steps"), "count"),
      *(Number(("runs", i, "throughput", key), k) for _, key, k in columns),
    ]
    for i, run in enumerate(data["runs"])
    if run["throughput"]
  ]
  caption = (
    "Sums over the steps of a run but the first, which compiles. Pass rate: "
    "samples kept by dynamic sampling among those generated. Generation: the "
    "time of rollouts alone; overall: all of a step, and saving. Kept samples "
    "are what training sees. A group that is kept may teach little: the last "
    "column is the mean over steps and groups, rejected ones included."
  )
  title = "Table 2. Throughput and dynamic sampling"
  head = ["run", "N", "steps", *(name for name, _, _ in columns)]
  return Table(title, caption, head, rows, 1)


def tasks(data: Mapping[str, Any], domain: str, number: int) -> Table:
  """Tables 3 and following: the tasks of a domain."""
  names = data["tasks"][domain]
  path = lambda i, task: (
    *_at(data, i),
    *("summary", "by_domain", domain, "by_task", task, "pass_at_k", "1"),
  )
  title = f"Table {number}. Tasks of the domain {domain}"
  caption = "Pass@1 in percent, mean over the prompts of the task."
  return _of_rows(data, title, caption, names, path)


def categories(data: Mapping[str, Any], number: int) -> Table:
  """The paper's Table 5: puzzles by category of reasoning-gym."""
  title = f"Table {number}. Puzzles by category"
  caption = (
    "Pass@1 in percent, mean over the evaluated tasks of each category of "
    "reasoning-gym."
  )
  path = lambda i, name: (*_at(data, i), "categories", name)
  return _of_rows(data, title, caption, data["categories"], path)


def _of_rows(
  data: Mapping[str, Any],
  title: str,
  caption: str,
  names: Sequence[str],
  path: Callable[[int, str], tuple[str | int, ...]],
) -> Table:
  """A table with the rows of Table 1 and a column per name, or transposed."""
  every = range(len(data["rows"]))
  labels = [_label(row) for row in data["rows"]]
  cell = lambda i, name: Number(path(i, name), "percent")
  if len(" ".join(names)) > _WIDE and len(names) > len(every):
    head = ["task", *(f"{who} ({at})" for who, at in labels)]
    rows = [[name, *(cell(i, name) for i in every)] for name in names]
    return Table(title, caption, head, rows, 1)
  rows = [[*labels[i], *(cell(i, name) for name in names)] for i in every]
  return Table(title, caption, ["run", "at", *names], rows, 2)


def tokens(data: Mapping[str, Any], number: int) -> Table:
  """Average output and score of each domain, before and after."""
  rows = []
  for i, run in enumerate(data["runs"]):
    if not run["training"]:
      continue
    last = len(run["evaluations"]) - 1
    for domain in data["domains"]:
      at = lambda j, *what: (
        *("runs", i, "evaluations", j, "summary", "by_domain", domain),
        *what,
      )
      change = lambda *what, kind: [
        Number(at(0, *what), kind),
        " → ",
        Number(at(last, *what), kind),
      ]
      rows.append(
        [
          run["name"],
          domain,
          change("tokens_mean", kind="mean"),
          change("pass_at_k", "1", kind="percent"),
          change("truncated_fraction", kind="percent1"),
        ]
      )
  caption = (
    "At the first evaluation of each run → at its last. Tokens: mean over "
    "responses, the end token included. Truncated: responses cut at the limit."
  )
  title = f"Table {number}. Output tokens and score, before and after"
  head = ["run", "domain", "output tokens", "pass@1, %", "truncated, %"]
  return Table(title, caption, head, rows, 2)


def tests(data: Mapping[str, Any], number: int) -> Table:
  """Paired t-tests of the first run against each other."""
  names = [run["name"] for run in data["runs"]]
  rows = []
  for i, test in enumerate(data["tests"]):
    path = lambda *keys: ("tests", i, *keys)
    label = [
      names[test["other"]["run"]],
      names[test["first"]["run"]],
      test["at"],
    ]
    for how, words in (("plain", "plain"), ("by_task", "clustered by task")):
      if test[how] is None:
        continue
      rows.append(
        [
          *label,
          words,
          Number(path("difference"), "signed"),
          Number(path(how, "standard_error"), "decimal"),
          Number(path("effect_size"), "decimal"),
          Number(path("n"), "count"),
          Number(path(how, "clusters"), "count"),
          Number(path(how, "t"), "t"),
          Number(path(how, "p_one_sided"), "p"),
          Number(path(how, "p_two_sided"), "p"),
        ]
      )
  paper = lambda key, kind: Number(("paper", key), kind)
  caption = [
    "Difference of pass@1, the first column minus the second, prompt by prompt "
    "(each the mean over its samples); one-sided: the first column is better. "
    "Clustered: prompts of one task may rise and fall together (CR1, clusters "
    "- 1 degrees of freedom). d_z: difference over the standard deviation of "
    "the differences. A run whose evaluation is before 90 % of what is equal "
    "is not tested there. One run each: what another seed would give is in "
    "none of these. For comparison, the paper over its 10,000 instances and "
    "more, plain: mean difference ",
    paper("difference", "signed"),
    ", t ",
    paper("t", "t"),
    ", one-tailed p ",
    paper("p_one_sided", "p"),
    ".",
  ]
  head = ["run", "against", "at", "errors", "difference", "standard error"]
  head += ["d_z", "n", "clusters", "t", "p, one-sided", "p, two-sided"]
  return Table(f"Table {number}. Paired t-tests", caption, head, rows, 4)


def differences(data: Mapping[str, Any], number: int) -> Table:
  """The config fields in which the training runs differ."""
  names = [run["name"] for run in data["runs"] if run["training"]]
  run_places = range(len(names))
  rows = [
    [
      one["field"],
      *(Number(("differences", i, "values", j), "value") for j in run_places),
    ]
    for i, one in enumerate(data["differences"])
  ]
  title = f"Table {number}. Fields in which the training runs differ"
  caption = "Of config.json. What is not here is the same in all of them."
  return Table(title, caption, ["field", *names], rows, len(names) + 1)


def every(data: Mapping[str, Any]) -> list[Table]:
  """The numbered tables of the page, without empty ones."""
  out = [main(data), throughput(data)] if _trained(data) else [main(data)]
  out += [
    tasks(data, d, len(out) + 1 + i) for i, d in enumerate(data["domains"])
  ]
  if len(data["categories"]) > 1:
    out.append(categories(data, len(out) + 1))
  for make, there in (
    (tokens, _trained(data)),
    (tests, data["tests"]),
    (differences, data["differences"]),
    (events.table, any(run["events"] for run in data["runs"])),
  ):
    out += [make(data, len(out) + 1)] if there else []
  return out


def _trained(data: Mapping[str, Any]) -> bool:
  return any(run["training"] for run in data["runs"])
