"""One JSON object per line, in files that a kill or a power loss may cut."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Damaged(ValueError):
  """A file of the run is not as it was written."""


class JsonLines:
  """A file with one JSON object per line, each with a "step".

  Attributes:
    steps: Of the lines that were there and stay.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    after: int,
    warn: Callable[[str], None] | None = None,
  ):
    """Opens it for appending, without what a killed run wrote past `after`.

    Args:
      path: Made if missing.
      after: Last step whose lines stay.
      warn: Receives one line for each line that cannot be read, which is then
        left out; without it the first of them is `Damaged`.
    """
    self._path = path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    self.steps = []
    if path.exists():
      kept = []
      for number, line in _numbered(path, has_step):
        if not isinstance(line, ValueError):
          kept += [line] if line["step"] <= after else []
        elif warn is None:
          raise _damaged(path, number, line)
        else:
          warn(f"{path}, line {number} is left out: {line}")
      self.steps = [line["step"] for line in kept]
      replace(path, "".join(json.dumps(line) + "\n" for line in kept))
    self._file = path.open("ab", buffering=0)

  def write(self, *lines: Mapping[str, Any]) -> None:
    """Appends; a process that is killed afterwards does not lose them.

    Raises:
      OSError: Naming the file: it cannot be written, or was removed.
    """
    if not self._path.exists():  # it would go on into a file that is gone
      gone = "was removed while it was written"
      raise FileNotFoundError(errno.ENOENT, gone, str(self._path))
    rest = "".join(json.dumps(dict(x)) + "\n" for x in lines).encode()
    with _naming(self._path):
      while rest:
        rest = rest[self._file.write(rest) :]

  def sync(self) -> None:
    """Returns when a loss of power does not lose them either."""
    with _naming(self._path):
      os.fsync(self._file.fileno())
      _sync_folder(self._path.parent)

  def close(self) -> None:
    self._file.close()


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a file that is whole whenever the process or the power ends."""
  part = path.with_name(f"{path.name}.part")
  with _naming(path):
    with part.open("w") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
  """A file is found after a loss of power if its folder was written."""
  at = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(at)
  finally:
    os.close(at)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """Errors of the system say which file it is."""
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, e.strerror, str(path)) from e


def read_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The objects of a JSON lines file; a last line cut short is left out."""
  return list(each_line(path))


def each_line(
  path: str | pathlib.Path, check: Callable[[Any], object] = bool
) -> Iterator[dict[str, Any]]:
  """The same, one by one; what `check` raises as ValueError is `Damaged`."""
  for number, line in _numbered(path, check):
    if isinstance(line, ValueError):
      raise _damaged(path, number, line)
    yield line


def each_whole(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
  """Lines with a step, up to where a loss of power left something else.

  Raises:
    Damaged: A line that cannot be read has one after it that can.
  """
  bad = None
  for number, line in _numbered(path, has_step):
    if isinstance(line, ValueError):
      bad = bad or _damaged(path, number, line)
    elif bad is not None:
      raise bad
    else:
      yield line


def has_step(line: Any) -> None:
  """Raises ValueError if a line is not an object with a step."""
  if not isinstance(line, dict) or type(line.get("step")) is not int:
    raise ValueError("there is no step")


def _numbered(
  path: str | pathlib.Path, check: Callable[[Any], object]
) -> Iterator[tuple[int, Any]]:
  """Number and object of each line, or the ValueError that it gives."""
  with pathlib.Path(path).open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.endswith(b"\n"):  # as every whole one does
        return
      try:
        check(found := json.loads(line[:-1].decode()))
      except (ValueError, RecursionError) as e:
        found = e if isinstance(e, ValueError) else ValueError(str(e))
      yield number, found


def _damaged(path: Any, number: int, error: ValueError) -> Damaged:
  return Damaged(f"{path}, line {number}: {error}")
