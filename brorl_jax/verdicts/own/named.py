"""Functions by name: from a table, from a package, or from a file.

    find("ppo", LOSSES, what="config.loss.kind")
    find("my_package.losses:mine", LOSSES, what="config.loss.kind")
    find("mine.py:loss", LOSSES, what="config.loss.kind")

A file runs once and may import modules of its own folder. `Named.digest` is a
hash of its bytes, which a run stores.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple


class Named(NamedTuple):
  """The function of a name."""

  name: str
  value: Any  # the value in the table, or the function
  # Hash of the file that defines it, 32 hexadecimal digits; "" for a table
  # entry, which the version of the package determines.
  digest: str


def find(name: str, table: Mapping[str, Any], *, what: str) -> Named:
  """The function that a config names.

  Args:
    name: A key of the table, "package.module:function" or "file.py:function".
    table: Built-in values by name.
    what: The config field, for the message.

  Raises:
    ValueError: The name cannot be resolved; the message is one line.
  """
  if name in table:
    return Named(name, table[name], "")
  place, colon, function = name.rpartition(":")
  if not colon:
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    near = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
      f"{what} = {name!r}: unknown; use {', '.join(table)}, or your own as "
      f"'file.py:function' or 'package.module:function'{near}"
    )
  try:
    module = _file(place) if place.endswith(".py") else _package(place)
  except ValueError as e:
    raise ValueError(f"{what} = {name!r}: {e}") from None
  value = getattr(module, function, None)
  if not callable(value):
    known = [k for k, v in vars(module).items() if callable(v)]
    close = difflib.get_close_matches(function, known, n=1, cutoff=0.5)
    near = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
      f"{what} = {name!r}: {place} has no function {function!r}{near}"
    )
  return Named(name, value, digest(module))


def digest(module: ModuleType) -> str:
  """Hash of a module's file, "" if it has no readable file."""
  try:
    data = pathlib.Path(module.__file__ or "").read_bytes()
  except OSError:
    return ""
  return hashlib.sha256(data).hexdigest()[:32]


def _package(name: str) -> ModuleType:
  if not all(part.isidentifier() for part in name.split(".")):
    raise ValueError(
      f"{name!r} is not a module name; write 'file.py:function' or "
      "'package.module:function'"
    )
  try:
    return importlib.import_module(name)
  except Exception as e:  # a module is code and may raise anything
    raise ValueError(f"{name} cannot be imported: {_last_line(e)}") from None


def _file(place: str) -> ModuleType:
  path = pathlib.Path(place).expanduser().absolute()
  if not path.is_file():
    close = difflib.get_close_matches(
      path.name, [p.name for p in path.parent.glob("*.py")], n=1, cutoff=0.5
    )
    near = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"file {path} does not exist{near}")
  return _run(path)


@functools.cache
def _run(path: pathlib.Path) -> ModuleType:
  """Runs a file as a module; a ValueError names the line that failed."""
  name = f"_brorl_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses and pickle look up their module
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))  # last, so that it hides no other module
  try:
    spec.loader.exec_module(module)
  except BaseException as e:  # SystemExit too
    del sys.modules[name]
    if isinstance(e, KeyboardInterrupt):
      raise
    raise ValueError(f"{path} failed: {_last_line(e, path)}") from None
  return module


def _last_line(error: BaseException, path: pathlib.Path | None = None) -> str:
  """Type and message in one line, with the last line of the file that ran."""
  text = " ".join(str(error).split())
  text = f"{type(error).__name__}: {text}" if text else type(error).__name__
  frames = traceback.extract_tb(error.__traceback__)
  lines = [f.lineno for f in frames if path and f.filename == str(path)]
  return f"line {lines[-1]}: {text}" if lines else text
