"""Files as records: lines of JSON, or rows of parquet.

What is wrong with one line is handed out in the line's place; what is wrong
with a whole file (missing, not the data, unreadable) is raised.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from brorl_jax.tasks import strict
from brorl_jax.tasks.strict import MAX_LINE, Refused, show

_BATCH = 64  # rows of parquet in memory at a time

_LFS = b"version https://git-lfs"


class DataError(ValueError):
  """Data that cannot be used, in one line: file, line, field, remedy."""


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a record was found; lines and rows count from 1."""

  file: str
  line: int

  def __str__(self) -> str:
    unit = "row" if self.file.endswith(".parquet") else "line"
    return f"{self.file}, {unit} {self.line}"


def files(paths: str | Sequence[str]) -> list[str]:
  """The files that are meant, each once, in order.

  Args:
    paths: Files, or patterns such as "data/*.jsonl", whose matches are sorted.

  Raises:
    DataError: If a path does not exist, a pattern matches nothing, a file is
      named twice, or its name does not end in .jsonl or .parquet.
  """
  paths = [paths] if isinstance(paths, str) else list(paths)
  if not paths:
    raise DataError("no data files are named; name at least one")
  found: dict[str, str] = {}
  for path in map(os.fspath, paths):
    if glob.has_magic(path) and not os.path.exists(path):
      matches = sorted(glob.glob(path, recursive=True))
      if not matches:
        raise DataError(f"{path}: no file matches this pattern")
    else:
      matches = [path]
    for match in matches:
      _refuse_file(match)
      same = os.path.realpath(match)
      if same in found:
        raise DataError(f"{match}: the file is named twice; name it once")
      found[same] = match
  return list(found.values())


def _refuse_file(path: str) -> None:
  if not os.path.exists(path):
    raise DataError(f"{path}: there is no such file")
  if not os.path.isfile(path):
    raise DataError(
      f"{path}: not a file; name the files, such as {path}/*.jsonl"
    )
  if path.endswith((".jsonl", ".parquet")):
    return
  ending = os.path.splitext(path)[1]
  remedy = {
    ".json": "write one object per line into a .jsonl",
    ".gz": "unpack it",
    ".zst": "unpack it",
  }.get(ending, "use .jsonl or .parquet")
  raise DataError(f"{path}: {ending or 'no ending'} is not read; {remedy}")


def read(path: str) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
  """The records of a file with their line or row numbers.

  A line that is no record comes as the reason why. A file is never held in
  memory, nor a line longer than `strict.MAX_LINE`.

  Args:
    path: A file that ends in .jsonl or .parquet.

  Raises:
    DataError: If the file as a whole cannot be read, or has no records.
  """
  empty = True
  found = _rows(path) if path.endswith(".parquet") else _lines(path)
  for number, text in found:
    empty = False
    try:
      if isinstance(text, Refused):
        raise text
      yield number, strict.parse(text)
    except Refused as refused:
      yield number, refused
  if empty:
    raise DataError(f"{path}: the file has no records")


def _lines(path: str) -> Iterator[tuple[int, bytes | Refused]]:
  try:
    with open(path, "rb") as file:
      number = 0
      # Two more than the limit: "\r\n" ends the longest line.
      while line := file.readline(MAX_LINE + 2):
        number += 1
        if number == 1 and line.startswith(_LFS):
          raise DataError(
            f"{path}, line 1: a git-lfs pointer, not the data; git lfs pull"
          )
        if len(line.rstrip(b"\r\n")) <= MAX_LINE:
          yield number, line
          continue
        while line and not line.endswith(b"\n"):
          line = file.readline(MAX_LINE)
        yield number, _too_long()
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _rows(path: str) -> Iterator[tuple[int, bytes | Refused]]:
  # Here because the library is large and optional.
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError as error:
    raise DataError(
      f"{path}: parquet needs pyarrow ({error}); pip install pyarrow"
    ) from error
  broken = (OSError, ValueError, pyarrow.ArrowException)
  try:
    file = parquet.ParquetFile(path)
  except broken as error:
    raise DataError(f"{path}: not parquet: {show(str(error))}") from error
  with file:
    names = file.schema_arrow.names
    for name in names:
      if names.count(name) > 1:
        raise DataError(f"{path}: column {show(name)} is there twice")
    batches = file.iter_batches(batch_size=_BATCH)
    number = 0
    while True:
      try:
        batch = next(batches, None)
      except broken as error:
        raise DataError(
          f"{path}, row {number + 1}: cannot be read: {show(str(error))}"
        ) from error
      if batch is None:
        return
      for i in range(batch.num_rows):
        number += 1
        yield number, _row(dict(zip(names, batch.columns, strict=True)), i)


def _row(columns: dict[str, Any], i: int) -> bytes | Refused:
  """A row as the line that would have held it."""
  values = {}
  for name, column in columns.items():
    try:
      value = _without_nulls(column[i].as_py())
      if value is not None:
        values[name] = value
        json.dumps(value)
    except UnicodeDecodeError:
      return Refused(name, "not UTF-8; write the column as text")
    except TypeError as error:
      return Refused(name, f"no JSON: {error}; write the column as text")
  text = json.dumps(values, ensure_ascii=False).encode()
  return text if len(text) <= MAX_LINE else _too_long()


def _without_nulls(value: Any) -> Any:
  """A column exists in every row: null says that the field is not there."""
  if isinstance(value, dict):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_without_nulls(v) for v in value]
  return value


def _too_long() -> Refused:
  return Refused("", f"longer than {MAX_LINE:,} bytes; shorten the example")
