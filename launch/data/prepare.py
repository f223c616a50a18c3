"""The public sets of the recipe, from their own files to this one's schema.

    python -m launch.data.prepare eurus2 train.parquet --output=eurus2.jsonl

Nothing is downloaded. Inputs are .jsonl, .parquet, or .json with one list or
with one object per line; `public` says what is read of each set. Prompts stay
as they are, but for line ends: \\r\\n becomes \\n. Every example is checked as
the run will check it, its gold by its verifier. What cannot be used is counted
by reason, with the first place where it was met.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.data import dataset, files
from brorl_jax.data.files import DataError, Place
from brorl_jax.runs.lines import write_whole
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.strict_json import Refused
from launch.data.public import SETS, Unusable


def convert(
  name: str,
  paths: Sequence[str],
  *,
  domains: Mapping[str, Domain] = DOMAINS,
) -> tuple[list[dict[str, Any]], dict[str, tuple[int, str]]]:
  """The examples of a set's files, as records of `dataset`.

  Ids are the set's name and the row's number over all the files, so dropped
  rows leave gaps and a stricter check renames nothing.

  Args:
    name: One of `public.SETS`.
    paths: The set's own files.
    domains: As `dataset.read` takes it.

  Returns:
    The records, and for each reason why rows were dropped how many, and the
    first of them with the details.

  Raises:
    DataError: If a file cannot be read at all.
  """
  reader = dataset.Reader(domains)
  kept: list[dict[str, Any]] = []
  counts: collections.Counter[str] = collections.Counter()
  first: dict[str, str] = {}
  number = 0
  for path in paths:
    for line, row in _rows(path):
      number += 1
      place = Place(path, line)
      try:
        if isinstance(row, Refused):
          raise row
        row = {k: v for k, v in row.items() if not isinstance(v, Refused)}
        record = {"id": f"{name}-{number:06d}", **SETS[name](row)}
        # As a line, so that what is written can be read.
        record = strict_json.parse(json.dumps(record).encode())
        reader.add(record, place, name)
      except (Unusable, Refused) as error:
        field = error.field if isinstance(error, Refused) else ""
        # Details differ between rows: count by field and show the first.
        field = re.sub(r"\[\d+\]", "[]", field)
        reason = f"{field} refused" if field else str(error)
        counts[reason] += 1
        first.setdefault(reason, f"{place}: {error}")
        continue
      kept.append(record)
  return kept, {r: (n, first[r]) for r, n in counts.most_common()}


def _rows(path: str) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
  if not os.path.isfile(path):
    raise DataError(f"{path}: there is no such file")
  if not path.endswith((".json", ".jsonl", ".parquet")):
    raise DataError(f"{path}: use a .json, .jsonl or .parquet")
  if not path.endswith(".json"):
    yield from files.read(path)
    return
  with open(path, "rb") as file:
    begin = file.read(100).lstrip()
  if not begin.startswith(b"["):
    yield from files.read(path)
    return
  try:
    rows = json.loads(pathlib.Path(path).read_bytes())
  except (ValueError, RecursionError) as error:
    raise DataError(
      f"{path}: not JSON: {strict_json.show(str(error))}"
    ) from error
  for i, row in enumerate(rows):
    try:
      # Through text, so that a list of objects is checked as lines are.
      yield i + 1, strict_json.parse(json.dumps(row).encode())
    except Refused as refused:
      yield i + 1, refused


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m launch.data.prepare",
    description="Converts a public set to the schema of data/dataset.py.",
  )
  parser.add_argument("set", choices=sorted(SETS))
  parser.add_argument("input", nargs="+", help="the set's own files")
  parser.add_argument("--output", required=True, help="a .jsonl to be written")
  args = parser.parse_args(argv)
  try:
    return _run(args.set, args.input, pathlib.Path(args.output))
  except DataError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _run(name: str, paths: Sequence[str], output: pathlib.Path) -> int:
  if output.suffix != ".jsonl":
    raise DataError(f"--output={output}: must end in .jsonl")
  if output.exists():
    raise DataError(f"--output={output}: exists; remove it or name another")
  if not output.parent.is_dir():
    raise DataError(f"--output={output}: there is no folder {output.parent}")
  kept, dropped = convert(name, paths)
  total = sum(count for count, _ in dropped.values())
  for reason, (count, where) in dropped.items():
    print(f"{count:8,} dropped: {reason}; the first: {where}")
  print(f"{total:8,} dropped of {total + len(kept):,}")
  if not kept:
    raise DataError(f"nothing is left of {', '.join(paths)}; is this {name}?")
  lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
  write_whole(output, lines)  # half a file would be taken for a set
  print(f"{len(kept):8,} written to {output}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
