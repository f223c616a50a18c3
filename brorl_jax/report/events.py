"""What happened to the runs, as a table.

Lines of events.jsonl that differ only in numbers are one row, with their count.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.report.cells import Number, Table

_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SHAPES = 5  # rows of one kind; where there are more, all of it are one row
_LONGEST = 300  # characters of a text
# Which process it was; columns of their own.
_ASIDE = ("step", "time", "event", "why", "pid", "host")


def folded(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The rows of a table, by first occurrence in events.jsonl."""
  shape = lambda e: (e["event"], _NUMBER.sub("0", _what(e)))
  shapes = {shape(e) for e in events}
  per_kind = collections.Counter(kind for kind, _ in shapes)
  rows: dict[Any, dict[str, Any]] = {}
  for event in events:
    key = shape(event)
    key = key if per_kind[key[0]] <= _SHAPES else key[0]
    at = {"step": event["step"], "time": _time(event)}
    row = rows.setdefault(
      key, {"event": event["event"], "count": 0, "first": at}
    )
    row |= {"count": row["count"] + 1, "last": at, "what": _what(event)}
  return list(rows.values())


def _time(event: Mapping[str, Any]) -> str:
  """The time to the second."""
  return f"{event['time'][:10]} {event['time'][11:19]}"


def _what(event: Mapping[str, Any]) -> str:
  """All that an event says, as one line."""
  parts = [str(event["why"])] if "why" in event else []
  for name, value in event.items():
    if name in _ASIDE or (name == "changed" and parts):
      continue
    if isinstance(value, dict):
      parts += [f"{k} = {v}" for k, v in value.items()]
    else:
      parts.append(f"{name}: {value}")
  text = "; ".join(" ".join(part.split()) for part in parts)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def table(data: Mapping[str, Any], number: int) -> Table:
  """The events of all runs."""
  rows = []
  for i, run in enumerate(data["runs"]):
    for j, one in enumerate(run["events"]):
      at = lambda *keys: ("runs", i, "events", j, *keys)
      both = lambda key, kind: [
        Number(at("first", key), kind),
        *(
          [" → ", Number(at("last", key), kind)]
          if one["first"][key] != one["last"][key]
          else []
        ),
      ]
      rows.append(
        [
          run["name"],
          one["event"],
          one["what"],
          Number(at("count"), "count"),
          both("step", "count"),
          both("time", "value"),
        ]
      )
  caption = (
    "Of events.jsonl. Events of one kind that differ only in numbers are one "
    "row, with the text of the last. Step: the last that had ended, or the one "
    "in progress. Time in UTC."
  )
  head = ["run", "event", "what", "count", "step", "time"]
  return Table(f"Table {number}. Events", caption, head, rows, 3)
