"""Compares runs: one page of tables and figures, and its numbers."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from brorl_jax import metrics
from brorl_jax.main import reading
from brorl_jax.main.reading import Read
from brorl_jax.main.settings import UserError
from brorl_jax.report import cells, compare, figures, page, tables
from brorl_jax.tasks.gym.categories import CATEGORIES

_NAMED = 3  # prompts that differ


def run(workdirs: Sequence[pathlib.Path]) -> None:
  """Writes index.html, report.json and PNGs to report/ of the first folder."""
  # Tables need no accelerator, and the run that they tell of may hold it.
  jax.config.update("jax_platforms", "cpu")
  names = reading.names([path.resolve() for path in workdirs])
  folders = [reading.look(path) for path in workdirs]
  total = sum(len(folder.steps) for folder in folders)
  read, done = [], 0
  progress = metrics.Progress(after=0, steps=total, unit="evaluation")
  with contextlib.closing(progress) as bar:
    for folder, name in zip(folders, names, strict=True):

      def told(step: int) -> None:
        nonlocal done
        done += 1
        bar.step(done, f"{name}, step {step}")

      read.append(reading.read(folder, name, told))
      # As soon as it is known: the next may take minutes.
      refuse_differences(read[0], read[-1])
  data = numbers(read)
  write(data, workdirs[0] / "report")
  print(cells.text(tables.main(data), data))
  print(f"  {workdirs[0] / 'report' / 'index.html'}")


def numbers(read: Sequence[Read]) -> dict[str, Any]:
  """Every number of the report, and how its samples were drawn."""
  tasks = {id: "/".join(where) for id, where in read[0].prompts.items()}
  config = read[0].run.config
  sampling = {
    "temperature": config.get("eval_temperature"),
    "top_p": config.get("eval_top_p"),
  }
  runs = [one.run for one in read]
  return {
    "sampling": sampling,
    **compare.numbers(runs, tasks, category=CATEGORIES.get),
  }


def write(data: Mapping[str, Any], out: pathlib.Path) -> None:
  """The report; raises UserError if it cannot be written."""
  try:
    out.mkdir(exist_ok=True)
    drawn = figures.draw(out, data)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (out / "report.json").write_text(text)
    (out / "index.html").write_text(page.page(data, drawn, out))
  except OSError as e:
    raise UserError(f"{out} cannot be written: {e}") from None


def refuse_differences(first: Read, other: Read) -> None:
  """Raises UserError that names the first difference that forbids it."""
  for difference in _differences(first, other):
    a, b = first.run.name, other.run.name
    raise UserError(f"{a} and {b} cannot be compared: {difference}")


def _differences(first: Read, other: Read) -> Iterator[str]:
  """What the runs were measured on, and how."""
  samples = [
    one.run.evaluations[0].summary["all"]["samples"] for one in (first, other)
  ]
  if samples[0] != samples[1]:
    yield f"they have {samples[0]} and {samples[1]} samples per prompt"
  for field in ("eval_temperature", "eval_top_p"):
    yield from _field(first, other, field)
  made = [_made(one) for one in (first, other)]
  if all(made):  # another seed makes other prompts: its cause comes first
    yield from _field(first, other, "seed")
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


def _made(one: Read) -> set[str]:
  """Tasks whose puzzles are made: their ids say so, and number them."""
  return {
    t for i, (_, t) in one.prompts.items() if i.startswith(f"{t}/heldout/")
  }


def _texts(first: Read, other: Read, made: set[str]) -> Iterator[str]:
  """Where prompts of the same ids have other texts."""
  for domain in sorted({domain for domain, _ in first.prompts.values()}):
    yield from _field(first, other, f"domains.{domain}.instruction")
  # Puzzles that are made are what the seed and these make of their number.
  if made:
    yield from _field(first, other, "version of reasoning-gym")
    both = {*first.run.config, *other.run.config}
    for field in sorted(both):
      if field.startswith(tuple(f"families.{t}.settings." for t in made)):
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
  """How two sets differ, by number and a few names."""
  only = [
    f"{len(some)} of {len(all)} only in the {which} ({_few(some)})"
    for which, all, some in (("first", a, a - b), ("second", b, b - a))
    if some
  ]
  if only:
    yield f"{what}s differ: {', '.join(only)}"


def _few(some: set[Any]) -> str:
  names = sorted("/".join(x) if isinstance(x, tuple) else x for x in some)
  more = ["..."] if len(names) > _NAMED else []
  return ", ".join([*names[:_NAMED], *more])
