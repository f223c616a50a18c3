"""Reads folders of runs and evaluations for a report."""

import collections
import dataclasses
import itertools
import json
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import config, evaluate
from brorl_jax.errors import UserError, first_line
from brorl_jax.runs import lines

Json = Mapping[str, Any]
Value = float | int | None  # None: it was not measured

MOST_SAMPLES = 200  # rollouts on a page, of all runs together
# Metrics without which no cost can be told.
_METRICS = (
  "step time/step_s time/checkpoint_s time/rollout_s data/samples_total "
  "data/tokens_total sampling/pass_rate reward/std_within_group time/cpu_s "
  "time/compile_s"
).split()
# Types of values with which the report computes, or that the page shows.
_CONFIG: Json = {
  **dict.fromkeys(("versions", "data", "functions", "evaluated"), dict),
  **dict.fromkeys(("evaluated.run", "evaluated.source"), str | None),
  **dict.fromkeys(("config.sampling.n", "config.sampling.samples"), int),
  "config.run.steps": int,
  "config.run.phases": list,
}
_SAMPLE: Json = {
  **dict.fromkeys(("task", "prompt", "response", "verdict", "reason"), str),
  **dict.fromkeys(("step", "tokens"), int),
  "reward": int | float,
  "gold": object,  # None for tests and constraints
}
_EVENT: Json = {"step": int, "event": str, "time": str}
# Above any count or time: numbers of JSON have no bound, and a sum of the
# largest floats is infinite.
_LIMIT = 1e18
_REMEDY = "restore the file, or leave this folder out"


class LoadedEvaluation(NamedTuple):
  """One evaluation on the held-out prompts."""

  step: int  # of the run; 0 is before training
  summary: Json  # from `evaluate.summary`
  rates: Mapping[str, float]  # pass@1 of each prompt, by id
  responses: Sequence[Json] = ()  # the records that have one as text


@dataclasses.dataclass(frozen=True)
class LoadedRun:
  """A training run, or an evaluation of one policy if it has no metrics."""

  name: str  # name in the report
  folder: str  # its path
  config: Json  # values by dotted field name, such as "data.files"
  metrics: Sequence[Json]  # lines of metrics.jsonl
  evaluations: Sequence[LoadedEvaluation]  # ordered by step
  evaluated: str | None  # name of the evaluated policy; None for a training run
  prompts: Mapping[str, tuple[str, str]]  # id -> domain and task
  about: Json = dataclasses.field(default_factory=dict)  # config.json
  events: Sequence[Json] = ()  # lines of events.jsonl
  samples: Sequence[Json] = ()  # the newest of samples.jsonl

  @property
  def seed(self) -> int | None:
    """The seed of the run."""
    return self.config.get("run.seed")

  @property
  def generated(self) -> set[str]:
    """Tasks with generated puzzles, which have numbered ids."""
    named = self.prompts.items()
    return {
      task for id, (_, task) in named if id.startswith(f"{task}/heldout/")
    }

  @property
  def puzzle_seed(self) -> int | None:
    """The seed of its held-out puzzles; None if it has none."""
    return self.seed if self.generated else None

  @property
  def samples_per_prompt(self) -> int:
    """Samples of each held-out prompt."""
    return self.evaluations[0].summary["all"]["samples"]


class Folder(NamedTuple):
  """A checked folder whose records have not been read yet."""

  path: pathlib.Path  # as the user gave it
  about: Json  # config.json
  metrics: Sequence[Json]  # none for --mode=evaluate
  steps: Sequence[int]  # steps of the complete evaluations, ascending
  evaluated: str | None  # name of the evaluated policy; None for a training run


def check_folder(path: pathlib.Path) -> Folder:
  """Checks a folder without reading its records.

  Raises:
    UserError: It is not a run or an evaluation, has no complete evaluation, or
      cannot be read.
  """
  about = _about(path)
  records, curve = (path / "eval" / f"{x}.jsonl" for x in ("records", "curve"))
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
    policy = about.get("evaluated") or {}
    source = policy.get("run") or policy.get("source") or "a policy"
    name, step = pathlib.Path(source).name, policy.get("step")
    name = name if step is None else f"{name}, step {step}"
    return Folder(path, about, (), [first["step"]], name)
  if not (curve.exists() and records.exists()):
    raise UserError(f"workdir {path} has no evaluation; leave it out")
  # curve.jsonl is written last and read first, so that its steps are also in
  # the records and metrics of a run that is still training.
  steps = [x["step"] for x in _each(curve, _check_numbers(("step",)))]
  if not steps:
    raise UserError(f"workdir {path} has no finished evaluation; leave it out")
  metrics = [*_each(path / "metrics.jsonl", _check_numbers(_METRICS))]
  there = [x["step"] for x in metrics]
  if there != [*range(1, len(there) + 1)]:
    raise UserError(f"{path / 'metrics.jsonl'}: steps are missing; {_REMEDY}")
  if len(there) < max(steps):
    raise UserError(
      f"{path / 'metrics.jsonl'} ends with step {len(there)}, but step "
      f"{max(steps)} was evaluated; {_REMEDY}"
    )
  return Folder(path, about, metrics, steps, None)


def _about(path: pathlib.Path) -> Json:
  """The content of config.json."""
  file = path / "config.json"
  try:
    about = json.loads(file.read_text(), parse_constant=_refuse_constant)
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
      raise ValueError("it was not written by a run")
    _check_types(config.flat(about), _CONFIG, complete=False)
    for phase in config.flat(about).get("config.run.phases", ()):
      _check_types(phase, {"from_step": int})
    return about
  except FileNotFoundError:
    raise UserError(
      f"workdir {path} is not a run: {file.name} is missing; choose another"
    ) from None
  except (OSError, ValueError, RecursionError) as e:
    raise UserError(_one_line(file, e)) from None


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


def read(
  folder: Folder, name: str, on_evaluation: Callable[[int], None]
) -> LoadedRun:
  """Reads the records, one evaluation at a time.

  Args:
    name: Name in the report.
    on_evaluation: Called with the step of each evaluation after reading it.

  Raises:
    UserError: Records are missing or damaged, or evaluations have different
      prompts.
  """
  path = folder.path / "eval" / "records.jsonl"
  out: list[LoadedEvaluation] = []
  prompts: dict[str, tuple[str, str]] = {}
  every = _each(path, evaluate.check_record)
  for step, group in itertools.groupby(every, operator.itemgetter("step")):
    if step not in folder.steps:
      continue
    records = list(group)
    now = {r["id"]: (r["domain"], r["task"]) for r in records}
    try:
      summary = evaluate.summary(records)
    except ValueError as e:
      raise UserError(_one_line(path, e)) from None
    counts = [x["all"]["samples"] for x in (summary, *(e.summary for e in out))]
    if out and (now != prompts or counts[0] != counts[1]):
      what = "held-out prompts" if now != prompts else "samples per prompt"
      raise UserError(
        f"{path}: {what} differ between steps {step} and {out[0].step}; the "
        "run cannot be compared"
      )
    prompts = now
    rates = dict(zip(prompts, evaluate.rates(records), strict=True))
    said = [r for r in records if "response" in r]
    out.append(LoadedEvaluation(step, summary, rates, said))
    on_evaluation(step)
  if [x.step for x in out] != list(folder.steps):
    raise UserError(
      f"{path} has the steps {[x.step for x in out]}, but the run was "
      f"evaluated at {list(folder.steps)}; {_REMEDY}"
    )
  samples, events = (
    _each(file, lambda line, types=types: _check_types(line, types))
    if (file := folder.path / source).exists()
    else ()
    for source, types in (("samples.jsonl", _SAMPLE), ("events.jsonl", _EVENT))
  )
  about = folder.about
  versions = about.get("versions", {}).items()
  return LoadedRun(
    name=name,
    folder=str(folder.path),
    config={
      **config.flat(about["config"]),
      **{key: about.get(key) for key in ("git_commit", "python")},
      **{f"version of {library}": version for library, version in versions},
    },
    metrics=folder.metrics,
    evaluations=out,
    evaluated=folder.evaluated,
    prompts=prompts,
    about=about,
    events=[*events],
    samples=[
      {key: line[key] for key in _SAMPLE}
      for line in collections.deque(samples, maxlen=MOST_SAMPLES)
    ],
  )


def _check_types(line: Any, types: Json, *, complete: bool = True) -> None:
  """Raises ValueError for a value that no run writes."""
  for name, kind in types.items():
    there = isinstance(line, dict) and name in line
    value = line[name] if there else None
    large = isinstance(value, int | float) and not abs(value) < _LIMIT
    if (complete or there) and not (
      there and isinstance(value, kind) and not large
    ):
      raise ValueError(f"{name!r} is missing or not what a run writes")


def _check_numbers(fields: Sequence[str]) -> Callable[[Any], None]:
  """Checks that fields are finite numbers, and that the step is an integer."""

  def check(line: Any) -> None:
    for name in fields:
      if not isinstance(line, dict) or line.get(name) is None:
        raise ValueError(f"{name!r} is missing")
      kind = (int,) if name == "step" else (int, float)
      if type(line[name]) not in kind or not abs(line[name]) < _LIMIT:
        shown = json.dumps(line[name])[:40]
        raise ValueError(f"{name!r} is {shown}; it must be a finite number")

  return check


def _each(path: pathlib.Path, check: Callable[[Any], None]) -> Iterator[Any]:
  try:
    yield from lines.each_line(path, check)
  except (OSError, ValueError) as e:
    raise UserError(_one_line(path, e)) from None


def _one_line(path: pathlib.Path, error: Exception) -> str:
  """An error as one line that names the file and the remedy."""
  line = first_line(error)
  line = line if str(path) in line else f"{path}: {line}"
  return f"{line}; {_REMEDY}"


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
  """The shortest endings of paths that are all different."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    out = ["/".join(names[-count:]) for names in parts]
    if len({*out}) == len(out):
      return out
  raise UserError(f"workdir {paths[0]} is given more than once; give it once")
