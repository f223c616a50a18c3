"""--mode=prepare: public training sets as files of a run."""

import json
import pathlib
from collections.abc import Sequence

from brorl_jax.configs.public import SETS
from brorl_jax.data import dataset, files, schema
from brorl_jax.errors import as_user_error
from brorl_jax.runs.lines import write_whole
from brorl_jax.verdicts.base import Example
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.strict_json import did_you_mean


@as_user_error(ValueError)
def run(sets: Sequence[str], folder: pathlib.Path) -> None:
  """Writes folder/NAME.jsonl for each NAME or NAME=FILES, one of `SETS`.

  Each reference answer is tried by its verifier. What is left out is counted by
  reason. Nothing is written before all files are there, and none is replaced.
  """
  places = dict(_place(one, folder) for one in sets)
  if len(places) < len(sets):
    raise ValueError(f"--set={','.join(sets)} has a set twice; keep one")
  found = {k: [file.path for file in files.find(v)] for k, v in places.items()}
  folder.mkdir(parents=True, exist_ok=True)
  for name, paths in found.items():
    how = f"{SETS[name].record.__module__}:{name}"
    form = schema.form(how, (), ())
    data = dataset.read(paths, form=form, domains=DOMAINS, skip_bad=True)
    kept, dropped = len(data.examples), len(data.skipped)
    print(f"{name} ({SETS[name].licence}): {kept:,} kept, {dropped:,} dropped")
    for reason, (count, first) in dataset.by_reason(data.skipped).items():
      print(f"{count:8,} dropped: {reason}; the first: {first}")
    lines = (
      json.dumps(_line(name, e), ensure_ascii=False) for e in data.examples
    )
    # Half a file would be taken for a set.
    write_whole(_path(folder, name), "".join(f"{line}\n" for line in lines))
  quoted = ",".join(f"'{_path(folder, name)}'" for name in found)
  print("to train on them, with generated puzzles, and no prompt too long:")
  print(f'  --config.data.files="{quoted},"', end=" ")
  print("--config.data.puzzles=True --config.data.skip_bad=True")


def _path(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f"{name}.jsonl"


def _place(one: str, folder: pathlib.Path) -> tuple[str, str]:
  name, _, place = one.partition("=")
  if name not in SETS:
    remedy = did_you_mean(name, SETS, f"use some of {', '.join(SETS)}")
    raise ValueError(f"--set={one}: {name!r} is unknown; {remedy}")
  if (path := _path(folder, name)).exists():
    raise ValueError(f"{path} exists; remove it, or leave {name} out of --set")
  return name, place or SETS[name].place


def _line(name: str, example: Example) -> dict:
  """The record of an example; its id names its file and row."""
  id = f"{name}-{example.id.replace('/', '-')}"[-128:]
  known = {"id": id, "domain": example.domain, "source": example.task}
  return known | {"messages": [*example.messages], **example.entry}
