"""Maps the columns of a record to the fields of an example."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from brorl_jax.verdicts.base import Domain
from brorl_jax.verdicts.strict_json import Refused, show


@dataclasses.dataclass(frozen=True)
class Form:
  """How a config reads the lines of a file."""

  # Field -> column, see `parse`; other fields keep their names.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Domain of lines that name none; "": every line must name one.
  domain: str = ""
  # The domain of all lines, whatever they name; it gets every column.
  sole: Domain | None = None


PLAIN = Form()  # fields under their own names, a domain in every line

_SHOWN = 100  # characters of column names in a message
_SHORT = 5  # letters; shorter names have too many near matches


def parse(text: str, known: Collection[str]) -> dict[str, str]:
  """The column of each field that is named differently in the files.

  Args:
    text: "field:column,field:column"; "column.inner" reads inside an object.
    known: The names of all fields.

  Raises:
    ValueError: The message is one line that quotes the wrong part.
  """
  out: dict[str, str] = {}
  for pair in filter(None, (part.strip() for part in text.split(","))):
    field, colon, column = (part.strip() for part in pair.partition(":"))
    if not colon or not column:
      raise ValueError(
        f"{pair!r}: not of the form field:column; write prompt:question"
      )
    if field not in known:
      close = difflib.get_close_matches(field, known, n=1)
      remedy = (
        f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
      )
      raise ValueError(f"{pair!r}: unknown field {field!r}; {remedy}")
    if field in out:
      raise ValueError(f"{pair!r}: {field} already has column {out[field]}")
    out[field] = column
  return out


def renamed(
  record: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The renamed fields of a record, and its other columns.

  Args:
    names: Field -> column, from `parse`.

  Returns:
    The values of `names`, and the other columns. An object that holds a field
    stays among the columns as a whole.

  Raises:
    Refused: A column is missing; the message lists the columns.
  """
  values = {
    field: _at(record, column, field) for field, column in names.items()
  }
  read = set(names.values())
  return values, {k: v for k, v in record.items() if k not in read}


def _at(record: Mapping[str, Any], column: str, field: str) -> Any:
  if column in record:
    return record[column]
  value: Any = record
  for part in column.split("."):
    if not isinstance(value, Mapping) or part not in value:
      inside = value if isinstance(value, Mapping) else {}
      raise Refused(
        column,
        f"missing, but config.data.fields reads {field} from it; "
        + there(part, inside),
      )
    value = value[part]
  return value


def missing(field: str, columns: Iterable[str]) -> Refused:
  """The error for a missing field."""
  columns = list(columns)
  if not columns:
    return Refused(field, "missing; add it to every example")
  close = difflib.get_close_matches(field, columns, n=1)
  column = show(close[0])[1:-1] if close else "COLUMN"
  return Refused(
    field,
    f"missing; {there(field, columns)} Add it, or name its column:"
    f" --config.data.fields={field}:{column}",
  )


def there(name: str, columns: Iterable[str]) -> str:
  """A near match among the columns, or a list of them."""
  columns = list(columns)
  close = difflib.get_close_matches(name, columns, n=1)
  if close:
    return f"did you mean {show(close[0])}?"
  listed = ", ".join(show(column)[1:-1] for column in columns)
  cut = listed if len(listed) <= _SHOWN else f"{listed[:_SHOWN]}..."
  return f"columns: {cut or '(none)'}."


def refuse_slips(columns: Iterable[str], optional: Iterable[str]) -> None:
  """Refuses a column that looks like a misspelt optional field.

  Otherwise the column would pass through and the field would count as missing.

  Raises:
    Refused: The message names the column and the field.
  """
  optional = [field for field in optional if len(field) >= _SHORT]
  for column in columns:
    for field in optional:
      if _slip(column.lower(), field):
        raise Refused(
          show(column)[1:-1],
          f"did you mean {field}? If not, rename the column",
        )


def _slip(a: str, b: str) -> bool:
  """Whether they differ by one letter missing, added, wrong or swapped."""
  both = zip(a, b, strict=False)
  same = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], both))
  rest, other = a[same:], b[same:]
  swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
  return swapped or rest[1:] in (other, other[1:]) or rest == other[1:]
