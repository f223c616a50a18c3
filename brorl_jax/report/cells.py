"""Tables whose cells refer to numbers of the report's JSON.

A cell holds the path and the format of a number, not the number itself. Text
and page therefore always show the same numbers.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_UNKNOWN = "n/a"


class Number(NamedTuple):
  """A number of the JSON."""

  path: tuple[str | int, ...]  # keys and indices that lead to it
  kind: str  # its format, a key of `_KINDS`


Part = str | Number
Cell = Sequence[Part] | Part


class Table(NamedTuple):
  """A table with a head and rows of cells."""

  title: str  # one line
  caption: Cell  # units and rules
  head: Sequence[str]  # names of the columns
  # Cells; the first `labels` of a row are text, the others numbers.
  rows: Sequence[Sequence[Cell]]
  labels: int  # number of text columns


def time_unit(hours: float) -> tuple[float, str]:
  """Factor and name of a convenient unit for a time in hours."""
  for factor, unit in ((1.0, "hours"), (60.0, "minutes")):
    if hours * factor >= 1.0:
      return factor, unit
  return 3600.0, "seconds"


def _time(hours: float) -> str:
  factor, unit = time_unit(hours)
  x = hours * factor
  short = {"hours": "h", "minutes": "min", "seconds": "s"}[unit]
  return f"{x:,.0f} {short}" if x >= 100 else f"{x:.3g} {short}"


_KINDS: Mapping[str, Callable[[Any], str]] = {
  "count": lambda x: f"{x:,.0f}",
  "thousands": lambda x: f"{x / 1e3:,.1f}",
  "time": _time,  # from hours
  "rate": lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.3g}",
  "mean": lambda x: f"{x:,.1f}",
  "percent": lambda x: f"{100 * x:.2f}",
  "percent1": lambda x: f"{100 * x:.1f}",
  "decimal": lambda x: f"{x:.3f}",
  "signed": lambda x: f"{x:+.4f}",
  "t": lambda x: f"{x:.2f}",
  # float32 has no numbers between 0 and 1e-38.
  "p": lambda x: f"{x:.2g}" if x > 0.0 else "< 1e-38",
  "value": str,  # of a config field
}


def value(path: Sequence[str | int], data: Any) -> Any:
  """The value at a path."""
  for key in path:
    data = data[key]
  return data


def written(number: Number, data: Any) -> str:
  """A number in its format; all numbers are formatted here."""
  x = value(number.path, data)
  return _UNKNOWN if x is None else _KINDS[number.kind](x)


def pointer(path: Sequence[str | int]) -> str:
  """A path as a JSON pointer (RFC 6901)."""
  escape = lambda key: str(key).replace("~", "~0").replace("/", "~1")
  return "".join(f"/{escape(key)}" for key in path)


def as_text(cell: Cell, data: Any) -> str:
  """A cell for the terminal."""
  parts = [cell] if isinstance(cell, str | Number) else cell
  return "".join(
    written(part, data) if isinstance(part, Number) else part.replace("\n", " ")
    for part in parts
  )


def as_html(cell: Cell, data: Any) -> str:
  """A cell for the page; each number has its path in the JSON."""
  parts = [cell] if isinstance(cell, str | Number) else cell
  return "".join(
    f'<span data-path="{html.escape(pointer(part.path))}" '
    f'data-kind="{part.kind}">{html.escape(written(part, data))}</span>'
    if isinstance(part, Number)
    else broken(part)
    for part in parts
  )


def broken(text: str) -> str:
  """Text for the page; lines may break after an underscore."""
  return html.escape(text).replace("_", "_<wbr>").replace("\n", "<br>")


def text(table: Table, data: Any) -> str:
  """The table for the terminal."""
  rows = [table.head, *([as_text(c, data) for c in row] for row in table.rows)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  line = lambda row: "  ".join(
    f"{cell:<{width}}" if i < table.labels else f"{cell:>{width}}"
    for i, (cell, width) in enumerate(zip(row, widths, strict=True))
  )
  return "\n".join(f"  {line(row)}".rstrip() for row in rows)
