"""--mode=prepare: public training sets as files of a run."""

import json
import pathlib
from collections.abc import Sequence

from brorl_jax.config import Config
from brorl_jax.configs.public import SETS
from brorl_jax.data import dataset, files, schema
from brorl_jax.errors import as_user_error
from brorl_jax.runs.lines import write_whole
from brorl_jax.stages import examples
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.strict_json import MAX_LINE, did_you_mean


@as_user_error(ValueError)
def run(
  sets: Sequence[str], folder: pathlib.Path, c: Config | None = None
) -> None:
  """Writes folder/NAME.jsonl for each NAME or NAME=FILES, one of `SETS`.

  Each reference answer is tried by its verifier. Prompts of the held-out files
  of `c` are left out. What is left out is counted by reason. Nothing is written
  before all files are there, and none is replaced.
  """
  given = [one.partition("=") for one in sets]
  outputs = {name: folder / f"{name}.jsonl" for name, *_ in given}
  for name, path in outputs.items():
    if name not in SETS:
      remedy = did_you_mean(name, SETS, f"use some of {', '.join(SETS)}")
      raise ValueError(f"--set={name!r} is unknown; {remedy}")
    if path.exists():
      raise ValueError(f"{path} exists; remove it, or leave {name} out")
  if len(outputs) < len(sets):
    raise ValueError(f"--set={','.join(sets)} has a set twice; keep one")
  found = {n: files.find(at or SETS[n].place) for n, _, at in given}
  held = examples.read_files(c.data, own=False)[1].examples if c else ()
  asked = {*map(dataset.worded, held)}
  folder.mkdir(parents=True, exist_ok=True)
  for name, some in found.items():
    form = schema.form(f"{SETS[name].record.__module__}:{name}", (), ())
    how = {"form": form, "domains": DOMAINS, "skip_bad": True}
    data = dataset.read([file.path for file in some], **how)
    data = dataset.without(data, asked)
    lines, dropped = [], [*data.skipped]
    for e, place in zip(data.examples, data.places, strict=True):
      line = {"domain": e.domain, "source": e.task, "messages": e.messages}
      lines.append(json.dumps({**line, **e.entry}) + "\n")
      if len(lines[-1]) > MAX_LINE:
        long = f"longer than {MAX_LINE:,} bytes"
        dropped.append(dataset.Skipped(place, "", long))
        lines.pop()
    write_whole(outputs[name], "".join(lines))  # half would be taken for a set
    counts = f"{len(lines):,} kept, {len(dropped):,} dropped"
    said = f"{name} ({SETS[name].licence}): {counts}"
    print("\n  ".join((said, *dataset.by_reason(dropped))))
  quoted = ",".join(f"'{path}'" for path in outputs.values())
  print("train on them, with generated puzzles, and no prompt too long, by")
  print(f'  --config.data.files="{quoted},"', end=" ")
  print("--config.data.puzzles=True --config.data.skip_bad=True")
