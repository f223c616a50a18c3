"""Whether the lines of a run are still those that it wrote.

A line of which one digit changed is still a line. `sums.json` has, as of the
last save, the number of lines of each file and a SHA-256 of them. It is written
after those lines and before the checkpoint; a resume first writes that of the
lines that it keeps. A kill at any moment therefore leaves sums of lines that
are there. A folder without the file is not checked.
"""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from brorl_jax.runs import events, lines

NAME = "sums.json"
_METRICS, _EVENTS = "metrics.jsonl", "events.jsonl"
# Of these nobody else knows how many lines there were. Unreadable ones are left
# out and told of, see `recorder`.
_ALONE = ("samples.jsonl", "visits.jsonl", _EVENTS)
_MOST = 2**48  # lines: numbers of JSON have no bound
_NAMES = (_METRICS, *_ALONE, "eval/curve.jsonl", "eval/records.jsonl")


def of(some: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Number and SHA-256 of lines, as `lines.JsonLines.sum` has them."""
  count, total = 0, hashlib.sha256()
  for line in some:
    count += 1
    total.update(lines.text(line))
  return {"lines": count, "sha256": total.hexdigest()}


def write(workdir: pathlib.Path, sums: Mapping[str, Any]) -> None:
  """Writes the sums of files, by their names below the folder.

  Those of events are taken from the file, which is short: of training alone.
  """
  sums = {_EVENTS: of(_read(workdir, _EVENTS)), **sums}
  lines.write_whole(workdir / NAME, json.dumps(sums, indent=2) + "\n")


def shorten(workdir: pathlib.Path, after: int) -> None:
  """Writes the sums of the lines up to a step; those after it may go then."""
  if (workdir / NAME).exists():
    kept = lambda name: (x for x in _read(workdir, name) if x["step"] <= after)
    write(workdir, {name: of(kept(name)) for name in _NAMES})


def check(workdir: pathlib.Path) -> None:
  """Compares the lines with their sums; changes nothing.

  Missing lines of metrics and evaluations are those of a power loss; `covered`
  tells which steps remain.

  Raises:
    Damaged: A line is another one, or samples or events are missing.
  """
  path = workdir / NAME
  if not path.exists():
    return
  try:
    sums = json.loads(path.read_text())
    wanted = {name: _sum(sums[name]) for name in _NAMES}
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    raise lines.Damaged(
      f"{path} cannot be read ({type(e).__name__}); restore it, or remove it "
      "to take the lines as they are"
    ) from None
  for name, (count, total) in wanted.items():
    found = of(itertools.islice(_read(workdir, name), count))
    if found["lines"] < count and name == _METRICS:
      return
    cut = found["lines"] < count
    if cut and name not in _ALONE:
      continue
    if cut or found["sha256"] != total:
      what = f"{found['lines']} of" if cut else "others than"
      raise lines.Damaged(
        f"{workdir / name} has {what} the {count} lines that were saved; "
        f"restore it, or remove {path} to take the lines as they are"
      )


def _sum(entry: Any) -> tuple[int, str]:
  """Number of lines and SHA-256; raises TypeError or KeyError for others."""
  count, total = entry["lines"], entry["sha256"]
  if type(count) is not int or not 0 <= count < _MOST or type(total) is not str:
    raise TypeError(entry)
  return count, total


def _read(workdir: pathlib.Path, name: str) -> Iterable[dict[str, Any]]:
  each = lines.each_readable if name in _ALONE else lines.each_whole
  found = each(path) if (path := workdir / name).exists() else ()
  if name == _EVENTS:
    return (x for x in found if not events.of_process(x))
  return found
