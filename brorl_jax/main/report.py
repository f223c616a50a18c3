"""--mode=report: compares runs on one page of tables and figures."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from brorl_jax import errors
from brorl_jax.errors import UserError
from brorl_jax.report import (
  cells,
  compare,
  figures,
  load_runs,
  page,
  samples,
  tables,
)
from brorl_jax.report.load_runs import Read
from brorl_jax.runs import intact, metrics
from brorl_jax.verdicts.domains import DRAW
from brorl_jax.verdicts.names import MADE

_NAMED = 3  # differing prompts that are named


def run(workdirs: Sequence[pathlib.Path]) -> None:
  """Writes index.html, report.json and PNGs to report/ of the first folder."""
  # Tables need no accelerator, which the run itself may be using.
  jax.config.update("jax_platforms", "cpu")
  names = load_runs.names([path.resolve() for path in workdirs])
  folders = [load_runs.look(path) for path in workdirs]
  total = sum(len(folder.steps) for folder in folders)
  read, done = [], 0
  progress = metrics.Progress(after=0, steps=total, unit="evaluation")
  with contextlib.closing(progress) as bar:
    for folder, name in zip(folders, names, strict=True):

      def on_evaluation(step: int) -> None:
        nonlocal done
        done += 1
        bar.step(done, f"{name}, step {step}")

      read.append(load_runs.read(folder, name, on_evaluation))
      # At once: reading the next run may take minutes.
      refuse_differences(read[0], read[-1])
  data = numbers(read)
  out = workdirs[0] / "report"
  write(data, out)
  print(cells.text(tables.main(data), data))
  print(f"  {out / 'index.html'}")


def numbers(read: Sequence[Read]) -> dict[str, Any]:
  """All numbers of the report, and how its samples were drawn."""
  tasks = {id: "/".join(where) for id, where in read[0].prompts.items()}
  config = read[0].run.config
  sampling = {
    "temperature": config.get("eval.temperature"),
    "top_p": config.get("eval.top_p"),
  }
  usual = _samples(read[0])
  deeper = [one.run for one in read if _samples(one) != usual]
  read = [one for one in read if _samples(one) == usual]
  runs = [one.run for one in read]
  each = samples.MOST // len(read)
  return {
    "sampling": sampling,
    "samples": [
      {"run": i, **sample}
      for i, one in enumerate(read)
      for sample in one.samples[-each:]
    ],
    **compare.numbers(runs, tasks, category=_category),
    "deeper": [compare.deeper(run) for run in deeper],
  }


def _samples(one: Read) -> int:
  """Samples of each held-out prompt."""
  return one.run.evaluations[0].summary["all"]["samples"]


def _category(domain: str, task: str) -> str | None:
  """Category of a generated task; None for other tasks."""
  return (DRAW.category(task) or "other") if domain == MADE else None


def write(data: Mapping[str, Any], out: pathlib.Path) -> None:
  """Writes the report; raises UserError or StorageError if that fails."""
  try:
    out.mkdir(exist_ok=True)
    drawn = figures.draw(out, data)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (out / "report.json").write_text(text)
    (out / "index.html").write_text(page.page(data, drawn, out))
  except OSError as e:
    raise errors.of_system(
      e,
      f"{out} cannot be written: {intact.one_line(e)}; fix this and run the "
      "same command again, or report a copy of the folder",
    ) from None


def refuse_differences(first: Read, other: Read) -> None:
  """Raises UserError with the first difference that forbids a comparison."""
  for difference in _differences(first, other):
    a, b = first.run.name, other.run.name
    raise UserError(f"{a} and {b} cannot be compared: {difference}")


def _differences(first: Read, other: Read) -> Iterator[str]:
  """Differences in the held-out prompts and in how they were sampled."""
  counts = [_samples(one) for one in (first, other)]
  # An evaluation with more of them continues the curve of pass@k.
  if counts[0] > counts[1] or (counts[0] < counts[1] and _trained(other)):
    yield f"they have {counts[0]} and {counts[1]} samples per prompt"
  for field in ("eval.temperature", "eval.top_p"):
    yield from _field(first, other, field)
  made = [_made(one) for one in (first, other)]
  if all(made):  # another seed makes other prompts: name the cause first
    yield from _field(first, other, "run.seed")
  yield from _sets("task", *({*one.prompts.values()} for one in (first, other)))
  yield from _sets("held-out prompt", {*first.prompts}, {*other.prompts})
  moved = [i for i, where in first.prompts.items() if other.prompts[i] != where]
  if moved:
    i = moved[0]
    yield (
      f"prompt {i} belongs to {'/'.join(first.prompts[i])} and to "
      f"{'/'.join(other.prompts[i])}"
    )
  yield from _texts(first, other, made[0])
  judges = [_own_rewards(one) for one in (first, other)]
  if judges[0] != judges[1]:
    names = " and ".join(", ".join(one) or "the verifiers" for one in judges)
    yield f"their responses were scored by {names}"


def _trained(one: Read) -> bool:
  return one.run.evaluated is None


def _own_rewards(one: Read) -> list[str]:
  """The user's own functions that scored its responses, with digests."""
  functions = one.about.get("functions") or {}
  return [
    f"{function['name']} (digest {function['digest']})"
    for field, function in sorted(functions.items())
    if field.startswith("reward.verifier")
  ]


def _made(one: Read) -> set[str]:
  """Tasks with generated puzzles, which have numbered ids."""
  return {
    t for i, (_, t) in one.prompts.items() if i.startswith(f"{t}/heldout/")
  }


def _texts(first: Read, other: Read, made: set[str]) -> Iterator[str]:
  """Differences in the texts of prompts with equal ids."""
  a, b = (one.run.config.get("data.system") or "" for one in (first, other))
  if a != b:
    yield f"data.system is {a!r} and {b!r}"
  templates = [
    (one.about.get("data") or {}).get("chat template") for one in (first, other)
  ]
  if templates[0] != templates[1]:
    names = " and ".join(t or "the checkpoint's" for t in templates)
    yield f"their chat templates differ: {names}"
  for domain in sorted({domain for domain, _ in first.prompts.values()}):
    yield from _field(first, other, f"data.domains.{domain}.instruction")
  # Generated puzzles depend on the seed, on these settings and their index.
  if made:
    yield from _field(first, other, "version of reasoning-gym")
    both = {*first.run.config, *other.run.config}
    for field in sorted(both):
      if field.startswith(tuple(f"data.families.{t}.settings." for t in made)):
        yield from _field(first, other, field)
  if len(made) < len({t for _, t in first.prompts.values()}):
    digests = [
      (one.about.get("data") or {}).get("held out") for one in (first, other)
    ]
    if None not in digests and digests[0] != digests[1]:
      yield (
        "the held-out examples of their files differ: digests "
        f"{digests[0]} and {digests[1]}"
      )


def _field(first: Read, other: Read, field: str) -> Iterator[str]:
  a, b = (one.run.config.get(field) for one in (first, other))
  if a != b:
    yield f"{field} is {_shown(a)} and {_shown(b)}"


def _shown(value: Any) -> str:
  return "not recorded" if value is None else repr(value)


def _sets(what: str, a: set[Any], b: set[Any]) -> Iterator[str]:
  """The difference of two sets: counts and a few names."""
  only = [
    f"{len(extra)} of {len(all)} only in the {which} ({_few(extra)})"
    for which, all, extra in (("first", a, a - b), ("second", b, b - a))
    if extra
  ]
  if only:
    yield f"{what}s differ: {', '.join(only)}"


def _few(keys: set[Any]) -> str:
  names = sorted("/".join(x) if isinstance(x, tuple) else x for x in keys)
  more = ["..."] if len(names) > _NAMED else []
  return ", ".join([*names[:_NAMED], *more])
