"""What a run writes to config.json, field by field."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from brorl_jax.runs import sections


def _texts(x: Any) -> bool:
  return isinstance(x, dict) and all(isinstance(v, str) for v in x.values())


def _functions(x: Any) -> bool:
  """Whether it is the user's own functions: field -> name and digest."""
  named = lambda f: _texts(f) and {"name", "digest"} <= f.keys()
  return isinstance(x, dict) and all(map(named, x.values()))


def _phases(x: Any) -> bool:
  since = lambda phase: type(phase.get("from_step")) is int
  return isinstance(x, list | tuple) and all(
    isinstance(p, dict) and since(p) for p in x
  )


# What an entry is where it is neither missing nor null.
_ENTRIES: Mapping[str, Callable[[Any], bool]] = {
  "run": lambda x: isinstance(x, str),
  "mode": lambda x: isinstance(x, str),
  "data": _texts,
  "functions": _functions,
  "machine": lambda x: isinstance(x, dict) and _texts(x.get("flags", {})),
  "versions": _texts,
  "files": _texts,
  "chat_template": lambda x: isinstance(x, str),
  "began_with": lambda x: isinstance(x, str),
  "evaluated": lambda x: isinstance(x, dict),
  "earlier": lambda x: isinstance(x, list),
}
_NEVER_NULL = ("versions", "evaluated", "mode")
_EVALUATED: Mapping[str, type] = {"run": str, "source": str, "weights": str}


def wrong(record: Mapping[str, Any]) -> str | None:
  """The first entry of a record that no run writes, or None.

  Entries that it lacks are right: older versions did not write them.

  Args:
    record: The object in config.json; of its earlier starts all are checked.
  """
  return next(_wrong(record), None)


def _wrong(record: Mapping[str, Any]) -> Iterator[str]:
  for name, good in _ENTRIES.items():
    value = record.get(name)
    null = value is None and name not in _NEVER_NULL
    if name in record and not null and not good(value):
      yield name
      return
  evaluated = record.get("evaluated") or {}
  for name, kind in _EVALUATED.items():
    if not isinstance(evaluated.get(name), kind | None):
      yield f"evaluated.{name}"
  if type(evaluated.get("step")) not in (int, type(None)):
    yield "evaluated.step"
  if not isinstance(record.get("config"), dict):
    yield "config"
    return
  config = record["config"]
  if (name := sections.mistyped(config)) is not None:
    yield f"config.{name}"
  elif not _phases(config.get("run", {}).get("phases", [])):
    yield "config.run.phases"
  for start in record.get("earlier") or []:
    if not isinstance(start, dict) or next(_wrong(start), None) is not None:
      yield "earlier"
