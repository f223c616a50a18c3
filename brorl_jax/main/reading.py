"""Folders of runs and evaluations -> what a report compares."""

import itertools
import json
import math
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import evaluate, metrics
from brorl_jax.main.settings import UserError, flatten
from brorl_jax.report.compare import Evaluation, Run

# What the report takes from each line of metrics.jsonl.
_METRICS = (
  "step time/step_s time/checkpoint_s time/rollout_s data/samples_total "
  "data/tokens_total sampling/pass_rate reward/std_within_group"
).split()
_OPTIONAL = ("time/cpu_s", "time/compile_s")  # older runs have none
_REMEDY = "bring it back as it was written, or leave its folder out"


class Folder(NamedTuple):
  """A folder that was looked at, its records still to be read.

  Attributes:
    path: As the user gave it.
    about: config.json.
    metrics: Lines of metrics.jsonl; none of an evaluation.
    steps: Those of its whole evaluations, ascending.
    evaluated: Which policy, of a folder that is no training run.
  """

  path: pathlib.Path
  about: Mapping[str, Any]
  metrics: Sequence[Mapping[str, Any]]
  steps: Sequence[int]
  evaluated: str | None


class Read(NamedTuple):
  """A run, and what its prompts are.

  Attributes:
    run: For the comparison.
    prompts: Id of each held-out prompt -> its domain and task.
    about: config.json.
  """

  run: Run
  prompts: Mapping[str, tuple[str, str]]
  about: Mapping[str, Any]


def look(path: pathlib.Path) -> Folder:
  """What a folder is, without its records.

  Raises:
    UserError: It is neither a run nor an evaluation, has no whole evaluation,
      or cannot be read.
  """
  about = _json(path / "config.json", path)
  if not isinstance(about.get("config"), dict):
    raise UserError(f"{path / 'config.json'} is not that of a run")
  for field in _wrong(about):
    raise UserError(
      f"{path / 'config.json'}: {field!r} is not as a run writes it; {_REMEDY}"
    )
  records = path / "eval" / "records.jsonl"
  if not (path / "metrics.jsonl").exists():
    if not records.exists():
      raise UserError(f"workdir {path} holds no run and no evaluation")
    if not (path / "eval" / "summary.json").exists():
      raise UserError(
        f"the evaluation in {path} has not ended; its command goes on with it"
      )
    first = [
      one["step"] for one in _read(records, evaluate.check_record, most=1)
    ]
    if not first:
      raise UserError(f"{records} is empty; {_REMEDY}")
    return Folder(path, about, (), first, _source(about))
  curve = path / "eval" / "curve.jsonl"
  if not (curve.exists() and records.exists()):
    raise UserError(f"workdir {path} has no evaluation")
  # What it names is in the records and in the metrics, which are written
  # before, and read after it: the run may go on meanwhile.
  steps = [x["step"] for x in _read(curve, _numbers(("step",)))]
  if not steps:
    raise UserError(f"workdir {path} has no evaluation that has ended")
  lines = _read(path / "metrics.jsonl", _numbers(_METRICS))
  _check_steps(path / "metrics.jsonl", [x["step"] for x in lines], max(steps))
  return Folder(path, about, lines, steps, None)


def _wrong(about: Mapping[str, Any]) -> Iterator[str]:
  """Fields of config.json that the report needs and cannot read."""
  for field in ("versions", "data", "evaluated"):
    if not isinstance(about.get(field, {}), dict):
      yield field
  for field in ("run", "source"):
    if not isinstance(
      (about.get("evaluated") or {}).get(field, ""), str | None
    ):
      yield f"evaluated.{field}"
  config = about["config"]
  for field in ("n", "samples", "steps"):
    if type(config.get(field, 1)) is not int:
      yield f"config.{field}"
  phases = config.get("phases", [])
  if not isinstance(phases, list) or not all(
    isinstance(one, dict) and type(one.get("from_step")) is int
    for one in phases
  ):
    yield "config.phases"


def _check_steps(
  path: pathlib.Path, there: Sequence[int], evaluated: int
) -> None:
  """Raises UserError if a step up to the evaluated one is not there."""
  if there != [*range(1, len(there) + 1)]:
    raise UserError(f"{path} lacks some of its steps; {_REMEDY}")
  if len(there) < evaluated:
    raise UserError(
      f"{path} ends with step {len(there)}, but step {evaluated} was "
      f"evaluated; {_REMEDY}"
    )


def _source(about: Mapping[str, Any]) -> str:
  """Which policy an evaluation measured, in words."""
  said = about.get("evaluated") or {}
  name = pathlib.Path(said.get("run") or said.get("source") or "a policy").name
  step = said.get("step")
  return name if step is None else f"{name}, step {step}"


def read(folder: Folder, name: str, told: Callable[[int], None]) -> Read:
  """Reads the records, one evaluation in memory at a time.

  Args:
    folder: Of `look`.
    name: What it is called in the report.
    told: Called with the step of each evaluation that is read.

  Raises:
    UserError: Records are missing, damaged, or of other prompts at other steps.
  """
  path = folder.path / "eval" / "records.jsonl"
  out: list[Evaluation] = []
  prompts: dict[str, tuple[str, str]] = {}
  lines = metrics.each_line(path, evaluate.check_record)
  try:
    for step, some in itertools.groupby(lines, operator.itemgetter("step")):
      if step not in folder.steps:
        continue
      records = list(some)
      here = {r["id"]: (r["domain"], r["task"]) for r in records}
      if out and here != prompts:
        raise UserError(
          f"{path}: the held-out prompts of step {step} are others than those "
          f"of step {out[0].step}; nothing compares them"
        )
      prompts = here
      summary = evaluate.summary(records)
      count = summary["all"]["samples"]
      if out and count != out[0].summary["all"]["samples"]:
        raise UserError(
          f"{path}: step {step} has {count} samples per prompt, "
          f"step {out[0].step} has {out[0].summary['all']['samples']}"
        )
      rates = dict(zip(here, evaluate.rates(records), strict=True))
      out.append(Evaluation(step, summary, rates))
      told(step)
  except (OSError, ValueError) as e:
    raise UserError(_one_line(path, e)) from None
  if [one.step for one in out] != list(folder.steps):
    raise UserError(
      f"{path} has the steps {[one.step for one in out]}, the evaluations of "
      f"the run are those of {list(folder.steps)}"
    )
  run = Run(
    name=name,
    folder=str(folder.path),
    config=_about(folder.about),
    metrics=folder.metrics,
    evaluations=out,
    evaluated=folder.evaluated,
  )
  return Read(run, prompts, folder.about)


def _about(about: Mapping[str, Any]) -> dict[str, Any]:
  """The config's fields, with the commit and versions as if they were some."""
  versions = {
    f"version of {k}": v for k, v in about.get("versions", {}).items()
  }
  more = {"git_commit": about.get("git_commit"), "python": about.get("python")}
  return flatten(about["config"]) | more | versions


def names(paths: Sequence[pathlib.Path]) -> list[str]:
  """The last parts of paths, as many as tell them apart."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    out = ["/".join(one[-count:]) for one in parts]
    if len({*out}) == len(out):
      return out
  raise UserError(f"workdir {paths[0]} is given more than once")


def _json(path: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(path.read_text()))
  except FileNotFoundError:
    raise UserError(
      f"workdir {folder} is no run: it has no {path.name}"
    ) from None
  except (OSError, ValueError, TypeError) as e:
    raise UserError(_one_line(path, e)) from None


def _read(
  path: pathlib.Path, check: Callable[[Any], None], *, most: int | None = None
) -> list[dict[str, Any]]:
  try:
    return list(itertools.islice(metrics.each_line(path, check), most))
  except (OSError, ValueError) as e:
    raise UserError(_one_line(path, e)) from None


def _numbers(fields: Sequence[str]) -> Callable[[Any], None]:
  """Checks that a line has them, as finite numbers, a step as a whole one."""

  def check(line: Any) -> None:
    for name in fields:
      if not isinstance(line, dict) or line.get(name) is None:
        raise ValueError(f"there is no {name!r}")
    for name in (*fields, *(name for name in _OPTIONAL if name in line)):
      kind, of = ("an integer", int) if name == "step" else ("a number", float)
      if type(line[name]) not in (int, of) or not math.isfinite(line[name]):
        shown = json.dumps(line[name])[:40]
        raise ValueError(f"{name!r} is {shown}, which is not {kind}")

  return check


def _one_line(path: pathlib.Path, error: Exception) -> str:
  """What is wrong, with the file, once, and what helps."""
  line = (str(error).splitlines() or [type(error).__name__])[0]
  line = line if str(path) in line else f"{path}: {line}"
  return f"{line}; {_REMEDY}"
