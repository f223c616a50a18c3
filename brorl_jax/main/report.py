"""--mode=report: compares runs on one page of tables and curves."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from brorl_jax import errors
from brorl_jax.errors import UserError
from brorl_jax.report import compare, load_runs, page
from brorl_jax.report.load_runs import LoadedRun
from brorl_jax.runs import intact, metrics

_NAMED = 3  # differing prompts that are named


def run(workdirs: Sequence[pathlib.Path]) -> None:
  """Compares runs; the report is written into the first folder."""
  # Tables need no accelerator, which the run itself may be using.
  jax.config.update("jax_platforms", "cpu")
  names = load_runs.short_names([path.resolve() for path in workdirs])
  read = list[LoadedRun]()
  progress = metrics.Progress(after=0, steps=len(names), unit="folder")
  with contextlib.closing(progress) as bar:
    for folder, name in zip(workdirs, names, strict=True):
      read.append(load_runs.read(folder, name))
      bar.step(len(read), name)
      # At once: reading the next run may take minutes.
      refuse_differences(read[0], read[-1])
  publish(read, workdirs[0])


def publish(read: Sequence[LoadedRun], workdir: pathlib.Path) -> None:
  """Writes the report into a run folder, and prints the results."""
  data = compare.numbers(read)
  out = workdir / "report"
  write(data, out)
  for arm in data["arms"]:
    end = arm["at"]["end"]
    names = ", ".join(data["runs"][i]["name"] for i in arm["runs"])
    before, gain = "", ""
    if end["gains"] is not None:
      before = f"{page.percent(end['before'])} -> "
      gain = f", gain {page.gain(end).replace('±', '+-')} points"
    after = f"{before}{page.percent(end['after'])} %{gain}"
    print(f"  {names}: held-out pass@1 {after}")
  print(f"  {out / 'index.html'}")


def write(data: compare.Json, out: pathlib.Path) -> None:
  """Writes the report; raises UserError or StorageError if that fails."""
  try:
    out.mkdir(exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (out / "report.json").write_text(text)
    (out / "index.html").write_text(page.page(data))
  except OSError as e:
    raise errors.of_system(
      e,
      f"{out} cannot be written: {intact.one_line(e)}; fix this and run the "
      "same command again, or report a copy of the folder",
    ) from None


def refuse_differences(first: LoadedRun, other: LoadedRun) -> None:
  """Raises UserError with the first difference that forbids a comparison."""
  for difference in _differences(first, other):
    raise UserError(
      f"{first.name} and {other.name} cannot be compared: {difference}"
    )


def _differences(first: LoadedRun, other: LoadedRun) -> Iterator[str]:
  """Differences in the held-out prompts and in how they were sampled.

  Another seed makes other puzzles of the same tasks, whose ids tell nothing.
  """
  both = (first, other)
  counts = [one.samples_per_prompt for one in both]
  if counts[0] != counts[1]:
    yield f"they have {counts[0]} and {counts[1]} samples per prompt"
  for field in ("eval.temperature", "eval.top_p"):
    yield from _field(first, other, field)
  yield from _sets("task", *({*one.prompts.values()} for one in both))
  seeds = [one.puzzle_seed for one in both]
  asked = [
    {
      id: where
      for id, where in one.prompts.items()
      if seeds[0] == seeds[1] or where[1] not in one.generated
    }
    for one in both
  ]
  yield from _sets("held-out prompt", *map(set, asked))
  for id, where in asked[0].items():
    if asked[1][id] != where:
      there = ["/".join(one[id]) for one in asked]
      yield f"prompt {id} belongs to {there[0]} and to {there[1]}"
      break
  yield from _texts(first, other)
  judges = [_own_rewards(one) for one in both]
  if judges[0] != judges[1]:
    names = " and ".join(", ".join(one) or "the verifiers" for one in judges)
    yield f"their responses were scored by {names}"


def _own_rewards(run: LoadedRun) -> list[str]:
  """The user's own functions that scored its responses, with digests."""
  functions = run.about.get("functions") or {}
  return [
    f"{function['name']} (digest {function['digest']})"
    for field, function in sorted(functions.items())
    if field.startswith("reward.verifier")
  ]


def _texts(first: LoadedRun, other: LoadedRun) -> Iterator[str]:
  """Differences in the texts of prompts with equal ids."""
  both = (first, other)
  a, b = (one.config.get("data.system") or "" for one in both)
  if a != b:
    yield f"data.system is {a!r} and {b!r}"
  about = [one.about.get("data") or {} for one in both]
  templates = [x.get("chat template") for x in about]
  if templates[0] != templates[1]:
    names = " and ".join(t or "the checkpoint's" for t in templates)
    yield f"their chat templates differ: {names}"
  for domain in sorted({domain for domain, _ in first.prompts.values()}):
    yield from _field(first, other, f"data.domains.{domain}.instruction")
  # Generated puzzles depend on these settings, the seed and their index.
  if first.generated:
    yield from _field(first, other, "version of reasoning-gym")
    settings = tuple(f"data.families.{t}.settings." for t in first.generated)
    for field in sorted({*first.config, *other.config}):
      if field.startswith(settings):
        yield from _field(first, other, field)
  if len(first.generated) < len({t for _, t in first.prompts.values()}):
    digests = [x.get("held out") for x in about]
    if None not in digests and digests[0] != digests[1]:
      yield (
        "the held-out examples of their files differ: digests "
        f"{digests[0]} and {digests[1]}"
      )


def _field(first: LoadedRun, other: LoadedRun, field: str) -> Iterator[str]:
  a, b = (one.config.get(field) for one in (first, other))
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
