"""--mode=report: compares runs on one page of tables and curves."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from brorl_jax import errors
from brorl_jax.errors import UserError
from brorl_jax.report import compare, load_runs, page, paper
from brorl_jax.report.load_runs import LoadedRun
from brorl_jax.runs import intact, metrics

_NAMED = 3  # differing prompts that are named


def run(workdirs: Sequence[pathlib.Path], *, tables: bool = False) -> None:
  """Compares runs, or makes the paper's `tables`, in the first folder."""
  # Tables need no accelerator, which the run itself may be using.
  jax.config.update("jax_platforms", "cpu")
  names = load_runs.short_names([path.resolve() for path in workdirs])
  read = list[LoadedRun]()
  progress = metrics.Progress(after=0, steps=len(names), unit="folder")
  for folder, name in zip(workdirs, names, strict=True):
    one = load_runs.read(folder, name)
    progress.step(len(read) + 1, name)
    # At once: reading the next run may take minutes.
    against = paper.sharing(read, one) if tables else read[:1]
    for other, why in ((x, y) for x in against for y in _differences(x, one)):
      both = f"{other.name} and {name} cannot be compared"
      raise UserError(f"{both}: {why}; leave one out")
    read.append(one)
  publish(read, workdirs[0], tables=tables)


def publish(
  read: Sequence[LoadedRun], workdir: pathlib.Path, *, tables: bool = False
) -> None:
  """Writes the report into a run folder, and prints the results. Raises
  UserError or StorageError if it cannot be written.
  """
  data = paper.numbers(read) if tables else compare.numbers(read)
  out = workdir / "report"
  try:
    out.mkdir(exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (out / "report.json").write_text(text)
    (out / "index.html").write_text(text := page.page(data))
  except OSError as e:
    why = f"{out} cannot be written: {intact.one_line(e)}; {errors.AGAIN}"
    why += ", or report a copy of the folder"
    raise errors.of_system(e, why) from None
  if tables:
    print(page.as_text(text))
  for arm in data.get("arms", ()):
    end = arm["at"]["end"]
    names = ", ".join(data["runs"][i]["name"] for i in arm["runs"])
    score = f"{page.percent(end['after'])} %"
    if end["gains"] is not None:
      gain = page.gain(end).replace("±", "+-")
      score = f"{page.percent(end['before'])} -> {score}, gain {gain} points"
    print(f"  {names}: held-out pass@1 {score}")
  print(f"  {out / 'index.html'}")


def _differences(first: LoadedRun, other: LoadedRun) -> Iterator[str]:
  """What forbids a comparison: other prompts, or otherwise measured."""
  both = (first, other)
  counts = [one.samples_per_prompt for one in both]
  if counts[0] != counts[1]:
    yield f"they have {counts[0]} and {counts[1]} samples per prompt"
  yield from _sets("task", *({*one.prompts.values()} for one in both))
  # Another seed makes other puzzles of the same tasks, whose ids say nothing.
  same = first.puzzle_seed == other.puzzle_seed
  stored = lambda one, at: same or at[1] not in one.generated
  of = lambda x: {k: at for k, at in x.prompts.items() if stored(x, at)}
  asked = [of(one) for one in both]
  yield from _sets("held-out prompt", *map(set, asked))
  for id, where in asked[0].items():
    if asked[1][id] != where:
      there = ["/".join(one[id]) for one in asked]
      yield f"prompt {id} belongs to {there[0]} and to {there[1]}"
  measured = [_measured(one) for one in both]
  shown = lambda value: "not recorded" if value is None else repr(value)
  for name in measured[0] | measured[1]:
    a, b = (values.get(name) for values in measured)
    if a != b:
      yield f"{name} is {shown(a)} and {shown(b)}"


def _measured(run: LoadedRun) -> dict[str, Any]:
  """What the responses to its prompts depend on, beside the policy."""
  data, domains = run.about.get("data") or {}, run.prompts.values()
  # Generated puzzles depend on these settings, the seed and their index.
  settings = tuple(f"data.families.{t}.settings." for t in run.generated)
  fields = ["eval.temperature", "eval.top_p", "eval.max_new_tokens"]
  fields += sorted({f"data.domains.{d}.instruction" for d, _ in domains})
  fields += [name for name in sorted(run.config) if name.startswith(settings)]
  fields += ["version of reasoning-gym"] * bool(run.generated)
  out = {name: run.config.get(name) for name in fields}
  out["data.system"] = run.config.get("data.system") or ""
  out["the chat template"] = data.get("chat template") or "the checkpoint's"
  if len(run.generated) < len({task for _, task in domains}):
    out["the digest of held-out examples of files"] = data.get("held out")
  functions = sorted((run.about.get("functions") or {}).items())
  own = [x for field, x in functions if field.startswith("reward.verifier")]
  judges = [f"{x['name']} (digest {x['digest']})" for x in own]
  out["what scored the responses"] = ", ".join(judges) or "the verifiers"
  return out


def _sets(what: str, a: set[Any], b: set[Any]) -> Iterator[str]:
  only = []
  for which, every, extra in (("first", a, a - b), ("second", b, b - a)):
    names = sorted("/".join(x) if isinstance(x, tuple) else x for x in extra)
    few = ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
    if names:
      count = f"{len(names)} of {len(every)}"
      only.append(f"{count} only in the {which} ({few})")
  if only:
    yield f"{what}s differ: {', '.join(only)}"
