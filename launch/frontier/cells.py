"""Tables whose cells refer to numbers of frontier.json.

A cell holds the path and the format of a number, not the number itself, so that
text and page always show what the JSON has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.report import page

KINDS: Mapping[str, Callable[[Any], str]] = {
  "count": page.number,
  "rate": page.short,
  "mean": "{:,.1f}".format,
  "percent1": page.percent,
  "decimal": "{:.3f}".format,
  "signed": "{:+.4f}".format,
  "value": str,
}


class Number(NamedTuple):
  """A number of the JSON."""

  path: tuple[str | int, ...]  # keys and indices that lead to it
  kind: str  # its format, a key of `KINDS`


Cell = Sequence[str | Number] | str | Number


class Table(NamedTuple):
  """A table with a head and rows of cells."""

  title: str  # one line
  caption: Cell  # units and rules
  head: Sequence[str]
  rows: Sequence[Sequence[Cell]]
  labels: int  # number of columns of text, before those of numbers


def plain(cell: Cell, data: Any) -> str:
  """A cell as text."""
  parts = [cell] if isinstance(cell, str | Number) else cell
  out = ""
  for part in parts:
    if isinstance(part, Number):
      x = data
      for key in part.path:
        x = x[key]
      part = "n/a" if x is None else KINDS[part.kind](x)
    out += part
  return out


def filled(table: Table, data: Any) -> Table:
  """The table with text for its numbers."""
  rows = [[plain(cell, data) for cell in row] for row in table.rows]
  return table._replace(caption=plain(table.caption, data), rows=rows)


def text(table: Table, data: Any) -> str:
  """The table for the terminal."""
  rows = [table.head, *filled(table, data).rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  line = lambda row: "  ".join(
    f"{cell:<{width}}" if i < table.labels else f"{cell:>{width}}"
    for i, (cell, width) in enumerate(zip(row, widths, strict=True))
  )
  return "\n".join(f"  {line(row)}".rstrip() for row in rows)
