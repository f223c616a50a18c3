"""Reads folders of runs and evaluations for a report."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import config, evaluate
from brorl_jax.errors import UserError, first_line
from brorl_jax.evaluate import COUNT, NUMBER
from brorl_jax.runs import lines

Json = Mapping[str, Any]
Value = float | int | None  # None: it was not measured

MOST_SAMPLES = 200  # rollouts on a page, of all runs together
# Metrics without which no cost can be computed.
_METRICS = (
  "step time/step_s time/checkpoint_s time/rollout_s data/samples_total "
  "data/tokens_total sampling/pass_rate reward/std_within_group time/cpu_s "
  "time/compile_s"
).split()
# What the page shows of a sample, beside its numbers.
_TEXTS = ("task", "prompt", "response", "gold", "verdict", "reason")
_REMEDY = "restore the file, or leave this folder out"


class LoadedEvaluation(NamedTuple):
  """One evaluation on the held-out prompts."""

  step: int  # of the run; 0 is before training
  summary: Json  # from `evaluate.summary`
  rates: Mapping[str, float]  # pass@1 of each prompt, by id
  responses: Sequence[Json] = ()  # the records that have one as text
  scores: Mapping[str, float] = {}  # mean score of each prompt, by id


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
  # Of visits.jsonl the first and the last of each prompt.
  visits: Sequence[tuple[Json, Json]] = ()

  @property
  def seed(self) -> int | None:
    return self.config.get("run.seed")

  @property
  def generated(self) -> set[str]:
    """Tasks with generated puzzles, which have numbered ids."""
    named = self.prompts.items()
    return {t for id, (_, t) in named if id.startswith(f"{t}/heldout/")}

  @property
  def puzzle_seed(self) -> int | None:
    """The seed of its held-out puzzles; None if it has none."""
    return self.seed if self.generated else None

  @property
  def samples_per_prompt(self) -> int:
    return self.evaluations[0].summary["all"]["samples"]


def read(path: pathlib.Path, name: str) -> LoadedRun:
  """Reads a folder of a run or of `--mode=evaluate`, called `name`.

  A run may still be training: its last complete evaluation ends it. Raises
  UserError if it is neither, has no complete evaluation, is damaged, or its
  evaluations have different prompts.
  """
  about = _about(path)
  records, curve = (path / "eval" / f"{x}.jsonl" for x in ("records", "curve"))
  if not records.exists():
    raise UserError(f"workdir {path} has no evaluation; leave it out")
  metrics, evaluated, steps = [], None, None
  if (path / "metrics.jsonl").exists():
    # curve.jsonl is written last and read first, so that its steps are also in
    # the records and metrics of a run that is still training.
    check = _line(("step",))
    steps = [x["step"] for x in _each(curve, check)] if curve.exists() else []
    if not steps:
      none = f"workdir {path} has no finished evaluation"
      raise UserError(f"{none}; leave it out")
    metrics = [*_each(path / "metrics.jsonl", _line(_METRICS))]
    there = [x["step"] for x in metrics]
    last = max(len(there), *steps)
    if there != [*range(1, last + 1)]:
      gap = f"steps of 1 to {last} are missing"
      raise UserError(f"{path / 'metrics.jsonl'}: {gap}; {_REMEDY}")
  else:
    if not (path / "eval" / "summary.json").exists():
      why = "the evaluation is not finished; run its command again"
      raise UserError(f"workdir {path}: {why}")
    policy = about.get("evaluated") or {}
    source = policy.get("run") or policy.get("source") or "a policy"
    step = "" if policy.get("step") is None else f", step {policy['step']}"
    evaluated = f"{pathlib.Path(source).name}{step}"
  evaluations, prompts = _evaluations(records, steps)
  some = lambda at, check: _each(at, check) if at.exists() else ()
  check = _line(("step", "tokens", "reward"), _TEXTS)
  samples = some(path / "samples.jsonl", check)
  events = some(path / "events.jsonl", _line(("step",), ("event", "time")))
  check = _line(("step", "drawn", "right"), ("id",))
  visits = some(path / "visits.jsonl", check)
  versions = about.get("versions", {}).items()
  ends = dict[str, tuple[Json, Json]]()  # a long run has half a million visits
  for one in visits:
    ends[one["id"]] = ends.get(one["id"], (one,))[0], one
  return LoadedRun(
    name=name,
    folder=str(path),
    config={
      **config.flat(about["config"]),
      **{key: about.get(key) for key in ("git_commit", "python")},
      **{f"version of {library}": version for library, version in versions},
    },
    metrics=metrics,
    evaluations=evaluations,
    evaluated=evaluated,
    prompts=prompts,
    about=about,
    events=[*events],
    samples=[*collections.deque(samples, maxlen=MOST_SAMPLES)],
    visits=[*ends.values()],
  )


def _about(path: pathlib.Path) -> Json:
  if not (file := path / "config.json").exists():
    why = f"{file.name} is missing; choose another"
    raise UserError(f"workdir {path} is not a run: {why}")
  with _naming(file):
    about = json.loads(file.read_text())
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
      raise ValueError("it was not written by a run")
  return about


def _evaluations(
  path: pathlib.Path, steps: Sequence[int] | None
) -> tuple[list[LoadedEvaluation], dict[str, tuple[str, str]]]:
  """The evaluations of these steps, or all; and each prompt's place."""
  out: list[LoadedEvaluation] = []
  prompts: dict[str, tuple[str, str]] = {}
  every = _each(path, evaluate.check_record)
  for step, group in itertools.groupby(every, operator.itemgetter("step")):
    if steps is not None and step not in steps:
      continue
    records = list(group)
    now = {r["id"]: (r["domain"], r["task"]) for r in records}
    with _naming(path):
      summary = evaluate.summary(records)
    counts = {x["all"]["samples"] for x in (summary, *(e.summary for e in out))}
    if out and (now != prompts or len(counts) > 1):
      what = "held-out prompts" if now != prompts else "samples per prompt"
      both = f"{step} and {out[0].step}; the run cannot be compared"
      raise UserError(f"{path}: {what} differ between steps {both}")
    prompts = now
    rates = dict(zip(prompts, evaluate.rates(records), strict=True))
    scores = dict(zip(prompts, evaluate.scores(records), strict=True))
    shown = [r for r in records if "response" in r]
    out.append(LoadedEvaluation(step, summary, rates, shown, scores))
  found = [x.step for x in out]
  if not found or (steps is not None and found != steps):
    has = f"{path} has the steps {found}"
    raise UserError(f"{has}, but evaluated were {steps}; {_REMEDY}")
  return out, prompts


def _line(
  numbers: Sequence[str], others: Sequence[str] = ()
) -> Callable[[Any], None]:
  """Checks that a line has finite numbers, a whole step, and other fields."""
  fields = dict.fromkeys(numbers, NUMBER) | {"step": COUNT}
  fields |= dict.fromkeys(others, ("there", lambda x: True))
  return functools.partial(evaluate.check_fields, fields)


def _each(path: pathlib.Path, check: Callable[[Any], None]) -> Iterator[Any]:
  with _naming(path):
    yield from lines.each_line(path, check)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except (OSError, ValueError) as e:
    line = first_line(e)
    line = line if str(path) in line else f"{path}: {line}"
    raise UserError(f"{line}; {_REMEDY}") from None


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
  """The shortest endings of paths that are all different."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    out = ["/".join(names[-count:]) for names in parts]
    if len({*out}) == len(out):
      return out
  raise UserError(f"workdir {paths[0]} is given more than once; give it once")
