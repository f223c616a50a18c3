"""JSON lines files that survive a kill or a power loss."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Damaged(ValueError):
  """A file of the run was changed or cut."""


class JsonLines:
  """A file with one JSON object per line, each with a "step".

  Attributes:
    steps: The steps of the lines that were kept on opening.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    after: int,
    warn: Callable[[str], None] | None = None,
    keep: Callable[[Mapping[str, Any]], bool] = lambda line: False,
  ):
    """Opens the file for appending and drops lines of steps past `after`.

    Args:
      path: The file; it is created if it is missing.
      after: Last step whose lines are kept.
      warn: Called with one line for each unreadable line, which is dropped.
        Without it, the first unreadable line raises `Damaged`.
      keep: Whether a line is kept whatever its step.
    """
    self._path = path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    self.steps = []
    if path.exists():
      kept = []
      for number, line in _numbered(path, has_step):
        if not isinstance(line, ValueError):
          kept += [line] if line["step"] <= after or keep(line) else []
        elif warn is None:
          raise _damaged(path, number, line)
        else:
          warn(f"{path}, line {number}: skipped: {line}")
      self.steps = [line["step"] for line in kept]
      write_whole(path, b"".join(map(text, kept)).decode())
    self._file = path.open("ab", buffering=0)

  def write(self, *lines: Mapping[str, Any]) -> None:
    """Appends lines; they survive if the process is killed afterwards.

    Raises:
      OSError: Names the file, which cannot be written or was removed.
    """
    rest = b"".join(map(text, lines))
    with _naming(self._path):
      if not self._path.exists():  # otherwise the lines would be lost
        raise FileNotFoundError(errno.ENOENT, "was removed during the run")
      while rest:
        rest = rest[self._file.write(rest) :]

  def sync(self) -> None:
    """Returns when all lines survive a power loss too."""
    with _naming(self._path):
      os.fsync(self._file.fileno())
      _sync_folder(self._path.parent)

  def close(self) -> None:
    self._file.close()


def text(line: Mapping[str, Any]) -> bytes:
  """A line as it is written."""
  return f"{json.dumps(dict(line))}\n".encode()


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file so that a kill or a power loss leaves the old or the new."""
  part = path.with_name(f"{path.name}.part")
  with _naming(path):
    with part.open("w", encoding="utf-8", newline="\n") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
  """Writes a folder's entries, so that new files survive a power loss."""
  at = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(at)
  finally:
    os.close(at)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """Adds the name of the file to system errors."""
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, e.strerror, str(path)) from e


def read_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The objects of a JSON lines file; an incomplete last line is skipped."""
  return list(each_line(path))


def each_line(
  path: str | pathlib.Path, check: Callable[[Any], object] = bool
) -> Iterator[dict[str, Any]]:
  """Like `read_lines`, one by one; a ValueError of `check` raises `Damaged`."""
  for number, line in _numbered(path, check):
    if isinstance(line, ValueError):
      raise _damaged(path, number, line)
    yield line


def each_whole(
  path: str | pathlib.Path, check: Callable[[Any], object] | None = None
) -> Iterator[dict[str, Any]]:
  """Lines with a step, up to the first unreadable line.

  Args:
    path: The file.
    check: As for `each_line`; by default `has_step`.

  Raises:
    Damaged: An unreadable line is followed by a readable one, so that it is not
      the end of a file that a power loss cut.
  """
  bad = None
  for number, line in _numbered(path, check or has_step):
    if isinstance(line, ValueError):
      bad = bad or _damaged(path, number, line)
    elif bad is not None:
      raise bad
    else:
      yield line


def has_step(line: Any) -> None:
  """Raises ValueError if a line is not an object with a step."""
  step = line.get("step") if isinstance(line, dict) else None
  if type(step) is not int or not is_number(step):
    raise ValueError("'step' is missing")


def has_scalars(line: Any) -> None:
  """Raises ValueError if it is not a step whose values are numbers or null."""
  has_step(line)
  for name, value in line.items():
    if value is not None and not is_number(value):
      raise ValueError(f"{name!r} is not a number")


def is_number(x: Any) -> bool:
  """Whether it is a finite number that can be added up as a float."""
  # JSON has integers of any length, and Python's has NaN and Infinity.
  return type(x) in (int, float) and abs(x) < 1e300


def _numbered(
  path: str | pathlib.Path, check: Callable[[Any], object]
) -> Iterator[tuple[int, Any]]:
  """The number and object of each line, or the ValueError of reading it."""
  with pathlib.Path(path).open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.endswith(b"\n"):  # cut: every whole line ends with it
        return
      try:
        check(value := json.loads(line[:-1].decode()))
      except (ValueError, RecursionError) as e:
        value = e if isinstance(e, ValueError) else ValueError(str(e))
      yield number, value


def _damaged(path: Any, number: int, error: ValueError) -> Damaged:
  return Damaged(f"{path}, line {number}: {error}")
