"""Reads records from files: lines of JSON, or rows of parquet or arrow.

An error in one line is yielded in its place. An error of the whole file
(missing, unreadable, a git-lfs pointer) is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.strict_json import MAX_LINE, Refused, show

_COLUMNAR = (".parquet", ".arrow")
ENDINGS = (".jsonl", *_COLUMNAR)  # of readable files
_BATCH = 64  # rows of parquet in memory at a time

_LFS = b"version https://git-lfs"


class DataError(ValueError):
  """Unusable data; one line with file, line, field, error and remedy."""


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a record; lines and rows count from 1."""

  file: str
  line: int

  def __str__(self) -> str:
    unit = "row" if self.file.endswith(_COLUMNAR) else "line"
    return f"{self.file}, {unit} {self.line}"


def read(
  path: str, *, nulls: bool = False
) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
  """The records of a file with their line or row numbers.

  A bad line is yielded as its error. Neither the whole file nor a line longer
  than `strict_json.MAX_LINE` is held in memory.

  Args:
    path: A file that ends in one of `ENDINGS`.
    nulls: Keep nulls in columnar files. By default null means that the field is
      missing.

  Raises:
    DataError: The file cannot be read, or has no records.
  """
  empty = True
  lines = _rows(path, nulls) if path.endswith(_COLUMNAR) else _lines(path)
  for number, text in lines:
    empty = False
    try:
      if isinstance(text, Refused):
        raise text
      yield number, strict_json.parse(text)
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
            f"{path}, line 1: a git-lfs pointer, not data; run git lfs pull"
          )
        if len(line.rstrip(b"\r\n")) <= MAX_LINE:
          yield number, line
          continue
        while line and not line.endswith(b"\n"):
          line = file.readline(MAX_LINE)
        yield number, _too_long()
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _rows(path: str, nulls: bool) -> Iterator[tuple[int, bytes | Refused]]:
  # Imported here because the library is large and optional.
  try:
    import pyarrow
  except ImportError as error:
    raise DataError(
      f"{path}: {_ending(path)} needs pyarrow ({error}); pip install "
      "'brorl_jax[parquet]'"
    ) from error
  broken = (OSError, ValueError, pyarrow.ArrowException)
  with contextlib.ExitStack() as stack:
    try:
      names, batches = _opened(path, stack)
    except broken as error:
      raise DataError(
        f"{path}: not {_ending(path)}: {show(str(error))}"
      ) from error
    for name in names:
      if names.count(name) > 1:
        raise DataError(f"{path}: column {show(name)} occurs twice; keep one")
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
        yield (
          number,
          _row(dict(zip(names, batch.columns, strict=True)), i, nulls),
        )


def _ending(path: str) -> str:
  return path.rpartition(".")[2]


def _opened(
  path: str, stack: contextlib.ExitStack
) -> tuple[list[str], Iterator[Any]]:
  """The columns of a file, and its rows in batches."""
  import pyarrow
  from pyarrow import parquet

  if path.endswith(".parquet"):
    file = stack.enter_context(parquet.ParquetFile(path))
    return file.schema_arrow.names, file.iter_batches(batch_size=_BATCH)
  mapped = stack.enter_context(pyarrow.memory_map(path))
  stream = stack.enter_context(pyarrow.ipc.open_stream(mapped))
  return stream.schema.names, iter(stream)


def _row(columns: dict[str, Any], i: int, nulls: bool) -> bytes | Refused:
  """A row as a line of JSON."""
  values = {}
  for name, column in columns.items():
    try:
      value = column[i].as_py()
      value = value if nulls else _without_nulls(value)
      if nulls or value is not None:
        values[name] = value
        json.dumps(value)
    except UnicodeDecodeError:
      return Refused(name, "not UTF-8; write the column as text")
    except TypeError as error:
      return Refused(name, f"not JSON: {error}; write the column as text")
  text = json.dumps(values, ensure_ascii=False).encode()
  return text if len(text) <= MAX_LINE else _too_long()


def _without_nulls(value: Any) -> Any:
  """Removes null fields: a column exists in every row."""
  if isinstance(value, dict):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_without_nulls(v) for v in value]
  return value


def _too_long() -> Refused:
  return Refused("", f"longer than {MAX_LINE:,} bytes; shorten the example")
