"""Reads folders of runs and evaluations for a report."""

import collections
import itertools
import json
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import config, evaluate
from brorl_jax.errors import UserError, first_line
from brorl_jax.report import samples
from brorl_jax.report.compare import Evaluation, Run
from brorl_jax.runs import metrics
from brorl_jax.runs.lines import has_step

# Metrics that the report reads from metrics.jsonl.
_METRICS = (
  "step time/step_s time/checkpoint_s time/rollout_s data/samples_total "
  "data/tokens_total sampling/pass_rate reward/std_within_group time/cpu_s "
  "time/compile_s"
).split()
# Fields of samples.jsonl that the page shows.
_SAMPLE: Mapping[str, Any] = {
  **dict.fromkeys(("task", "prompt", "response", "verdict", "reason"), str),
  **dict.fromkeys(("step", "tokens"), int),
  "reward": int | float,
  "gold": object,  # None for tests and constraints
}
# Types of values of config.json with which the report computes.
_KINDS: Mapping[str, Any] = {
  **dict.fromkeys(("versions", "data", "functions", "evaluated"), dict),
  **dict.fromkeys(("evaluated.run", "evaluated.source"), str | None),
  **dict.fromkeys(("config.sampling.n", "config.sampling.samples"), int),
  "config.run.steps": int,
  "config.run.phases": list,
}
# Above any count or time: numbers of JSON have no bound, and a sum of the
# largest floats is infinite.
_MOST = 1e18
_REMEDY = "restore the file, or leave this folder out"


class Folder(NamedTuple):
  """A checked folder whose records have not been read yet."""

  path: pathlib.Path  # as the user gave it
  about: Mapping[str, Any]  # config.json
  # Lines of metrics.jsonl; empty for --mode=evaluate.
  metrics: Sequence[Mapping[str, Any]]
  steps: Sequence[int]  # steps of the complete evaluations, ascending
  evaluated: str | None  # name of the evaluated policy; None for a training run


class Read(NamedTuple):
  """A run with its prompts and samples."""

  run: Run
  # Domain and task of each held-out prompt, by id.
  prompts: Mapping[str, tuple[str, str]]
  about: Mapping[str, Any]  # config.json
  samples: Sequence[Mapping[str, Any]]  # the newest lines of samples.jsonl


def look(path: pathlib.Path) -> Folder:
  """Checks a folder without reading its records.

  Raises:
    UserError: It is not a run or an evaluation, has no complete evaluation, or
      cannot be read.
  """
  about = _json(path / "config.json", path)
  if not isinstance(about.get("config"), dict):
    raise UserError(
      f"{path / 'config.json'} was not written by a run; leave this folder out"
    )
  for name, value in config.flat(about).items():
    if not _is_kind(value, _KINDS.get(name, object)):
      raise UserError(
        f"{path / 'config.json'}: {name!r} is not what a run writes; {_REMEDY}"
      )
  records = path / "eval" / "records.jsonl"
  if not (path / "metrics.jsonl").exists():
    if not records.exists():
      raise UserError(
        f"workdir {path} is not a run or an evaluation; choose another"
      )
    if not (path / "eval" / "summary.json").exists():
      raise UserError(
        f"workdir {path}: the evaluation is not finished; run its command again"
      )
    first = next(_each(records, evaluate.check_record), None)
    if first is None:
      raise UserError(f"{records} is empty; {_REMEDY}")
    return Folder(path, about, (), [first["step"]], _source(about))
  curve = path / "eval" / "curve.jsonl"
  if not (curve.exists() and records.exists()):
    raise UserError(f"workdir {path} has no evaluation; leave it out")
  # curve.jsonl is written last and read first, so that its steps are also in
  # the records and metrics even if the run is going on.
  steps = [x["step"] for x in _each(curve, _numbers(("step",)))]
  if not steps:
    raise UserError(f"workdir {path} has no finished evaluation; leave it out")
  lines = [*_each(path / "metrics.jsonl", _numbers(_METRICS))]
  _check_steps(path / "metrics.jsonl", [x["step"] for x in lines], max(steps))
  return Folder(path, about, lines, steps, None)


def _is_kind(value: Any, kind: Any) -> bool:
  """Whether a value has a type; the values of a list are phases of a run."""
  return isinstance(value, kind) and (
    kind is not list
    or all(
      isinstance(one, dict) and isinstance(one.get("from_step"), int)
      for one in value
    )
  )


def _check_steps(
  path: pathlib.Path, there: Sequence[int], evaluated: int
) -> None:
  """Raises UserError if a step up to the evaluated one is missing."""
  if there != [*range(1, len(there) + 1)]:
    raise UserError(f"{path}: some steps are missing; {_REMEDY}")
  if len(there) < evaluated:
    raise UserError(
      f"{path} ends with step {len(there)}, but step {evaluated} was "
      f"evaluated; {_REMEDY}"
    )


def _source(about: Mapping[str, Any]) -> str:
  """Name of the policy of an evaluation."""
  policy = about.get("evaluated") or {}
  source = policy.get("run") or policy.get("source") or "a policy"
  name, step = pathlib.Path(source).name, policy.get("step")
  return name if step is None else f"{name}, step {step}"


def read(
  folder: Folder, name: str, on_evaluation: Callable[[int], None]
) -> Read:
  """Reads the records, one evaluation at a time.

  Args:
    folder: From `look`.
    name: Name in the report.
    on_evaluation: Called with the step of each evaluation after reading it.

  Raises:
    UserError: Records are missing or damaged, or evaluations have different
      prompts.
  """
  path = folder.path / "eval" / "records.jsonl"
  out: list[Evaluation] = []
  prompts: dict[str, tuple[str, str]] = {}
  lines = metrics.each_line(path, evaluate.check_record)
  try:
    for step, step_lines in itertools.groupby(
      lines, operator.itemgetter("step")
    ):
      if step not in folder.steps:
        continue
      records = list(step_lines)
      of_step = {r["id"]: (r["domain"], r["task"]) for r in records}
      if out and of_step != prompts:
        raise UserError(
          f"{path}: held-out prompts differ between steps {step} and "
          f"{out[0].step}; the run cannot be compared"
        )
      prompts = of_step
      summary = evaluate.summary(records)
      count = summary["all"]["samples"]
      if out and count != out[0].summary["all"]["samples"]:
        raise UserError(
          f"{path}: step {step} has {count} samples per prompt, but step "
          f"{out[0].step} has {out[0].summary['all']['samples']}; the run "
          "cannot be compared"
        )
      rates = dict(zip(prompts, evaluate.rates(records), strict=True))
      out.append(Evaluation(step, summary, rates))
      on_evaluation(step)
  except (OSError, ValueError) as e:
    raise UserError(_one_line(path, e)) from None
  if [one.step for one in out] != list(folder.steps):
    raise UserError(
      f"{path} has the steps {[one.step for one in out]}, but the run was "
      f"evaluated at {list(folder.steps)}; {_REMEDY}"
    )
  run = Run(
    name=name,
    folder=str(folder.path),
    config=_about(folder.about),
    metrics=folder.metrics,
    evaluations=out,
    evaluated=folder.evaluated,
    events=_events(folder.path),
  )
  return Read(run, prompts, folder.about, _samples(folder.path))


def _samples(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The newest samples, for the page; an evaluation has none."""
  path = folder / "samples.jsonl"
  if not path.exists():
    return []
  lines = collections.deque(_each(path, _has_sample), maxlen=samples.MOST)
  return [{name: line[name] for name in _SAMPLE} for line in lines]


def _events(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The events of a run; an evaluation has none."""
  path = folder / "events.jsonl"
  return [*_each(path, _has_event)] if path.exists() else []


def _has_event(line: Any) -> None:
  """Raises ValueError if a line is not an event of a run."""
  has_step(line)
  for name in ("event", "time"):
    if not isinstance(line.get(name), str):
      raise ValueError(f"{name!r} is missing or not what a run writes")


def _has_sample(line: Any) -> None:
  """Raises ValueError if a line is not a sample of a run."""
  for name, kind in _SAMPLE.items():
    there = isinstance(line, dict) and name in line
    value = line[name] if there else None
    right = there and isinstance(value, kind)
    if not right or (isinstance(value, int | float) and not abs(value) < _MOST):
      raise ValueError(f"{name!r} is missing or not what a run writes")


def _about(about: Mapping[str, Any]) -> dict[str, Any]:
  """The config's fields, plus the git commit and library versions."""
  versions = {
    f"version of {k}": v for k, v in about.get("versions", {}).items()
  }
  more = {"git_commit": about.get("git_commit"), "python": about.get("python")}
  return config.flat(about["config"]) | more | versions


def names(paths: Sequence[pathlib.Path]) -> list[str]:
  """The shortest endings of paths that are all different."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    out = ["/".join(one[-count:]) for one in parts]
    if len({*out}) == len(out):
      return out
  raise UserError(f"workdir {paths[0]} is given more than once; give it once")


def _json(path: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
  try:
    about = json.loads(path.read_text(), parse_constant=_no_number)
    if isinstance(about, dict):
      return about
    raise ValueError("it is not a JSON object")
  except FileNotFoundError:
    raise UserError(
      f"workdir {folder} is not a run: {path.name} is missing; choose another"
    ) from None
  except (OSError, ValueError, RecursionError) as e:
    raise UserError(_one_line(path, e)) from None


def _no_number(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


def _each(
  path: pathlib.Path, check: Callable[[Any], None]
) -> Iterator[dict[str, Any]]:
  try:
    yield from metrics.each_line(path, check)
  except (OSError, ValueError) as e:
    raise UserError(_one_line(path, e)) from None


def _numbers(fields: Sequence[str]) -> Callable[[Any], None]:
  """Checks that fields are finite numbers, and that the step is an integer."""

  def check(line: Any) -> None:
    for name in fields:
      if not isinstance(line, dict) or line.get(name) is None:
        raise ValueError(f"{name!r} is missing")
      kind, of = ("an integer", int) if name == "step" else ("a number", float)
      if type(line[name]) not in (int, of) or not abs(line[name]) < _MOST:
        shown = json.dumps(line[name])[:40]
        raise ValueError(f"{name!r} is {shown}; it must be {kind}")

  return check


def _one_line(path: pathlib.Path, error: Exception) -> str:
  """An error as one line that names the file and the remedy."""
  line = first_line(error)
  line = line if str(path) in line else f"{path}: {line}"
  return f"{line}; {_REMEDY}"
