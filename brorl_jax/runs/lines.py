"""JSON lines files that survive a kill or a power loss.

Those of a run tell which of its steps they cover.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Check = Callable[[Any], object]  # raises ValueError if a line is not right


class Damaged(ValueError):
  """A file of the run was changed or cut."""


class JsonLines:
  """A file with one JSON object per line, each with a "step"."""

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    after: int,
    warn: Callable[[str], None] | None = None,
    keep: Callable[[Mapping[str, Any]], bool] = lambda line: False,
  ):
    """Opens the file, or makes it, and drops lines of steps past `after`.

    An unreadable line is dropped and `warn` called with one line; without
    `warn` it raises `Damaged`. A line that `keep` accepts stays.
    """
    self._path = path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in _read(path, has_step) if path.exists() else ():
      if not isinstance(line, Damaged):
        kept += [line] if line["step"] <= after or keep(line) else []
      elif warn is None:
        raise line
      else:
        warn(f"{line}; the line is left out")
    if path.exists():
      write_whole(path, b"".join(map(_text, kept)).decode())
    self._file = path.open("ab", buffering=0)

  def write(self, *lines: Mapping[str, Any]) -> None:
    """Appends lines, which survive a kill; an OSError names the file."""
    rest = b"".join(map(_text, lines))
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


def _text(line: Mapping[str, Any]) -> bytes:
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
  """So that new files survive a power loss."""
  at = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(at)
  finally:
    os.close(at)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, e.strerror, str(path)) from e


def read_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The objects of a JSON lines file; an incomplete last line is skipped."""
  return list(each_line(path))


def each_line(
  path: str | pathlib.Path, check: Check = bool
) -> Iterator[dict[str, Any]]:
  """Like `read_lines`, one by one; a ValueError of `check` raises `Damaged`."""
  for line in _read(path, check):
    if isinstance(line, Damaged):
      raise line
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


def _read(path: str | pathlib.Path, check: Check) -> Iterator[dict | Damaged]:
  with pathlib.Path(path).open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.endswith(b"\n"):  # cut: every whole line ends with it
        return
      try:
        value = json.loads(line[:-1].decode())
        check(value)
      except (ValueError, RecursionError) as e:
        value = Damaged(f"{path}, line {number}: {e}")
      yield value


class Covered(NamedTuple):
  """The contents of metrics.jsonl and eval/ of a run."""

  workdir: pathlib.Path
  steps: int  # number of lines of metrics.jsonl
  # From the step of each evaluation to whether it has all records.
  evaluations: Mapping[int, bool]
  every: int  # steps between the evaluations that all starts of the run share
  # Last step of the newest start, which ends with an evaluation.
  last: int | None

  def lacks(self, step: int) -> str | None:
    """Why the files do not cover the steps up to this one, None if they do."""
    if step > self.steps:
      path = self.workdir / "metrics.jsonl"
      return f"{path} has no step {step}: it ends with step {self.steps}"
    wanted = {*range(0, step + 1, self.every), *self.evaluations}
    wanted |= {step} if step == self.last else set()
    for at in sorted(wanted):
      if at <= step and not self.evaluations.get(at):
        return f"{self.workdir / 'eval'} has no whole evaluation of step {at}"
    return None


def covered(workdir: pathlib.Path, starts: Sequence[Mapping]) -> Covered:
  """Reads the files of a run and changes nothing.

  `starts` has the config of each start, the newest first. Raises Damaged if a
  line is unreadable, missing or another one, and later lines exist.
  """
  evaluations, count, path = {}, 0, workdir / "metrics.jsonl"
  records = Counter(x["step"] for x in _whole(workdir / "eval/records.jsonl"))
  for line in _whole(workdir / "eval/curve.jsonl", _size):
    evaluations[line["step"]] = records[line["step"]] == _size(line)
  for count, line in enumerate(_whole(path, has_scalars), 1):
    if line["step"] != count:
      step = line["step"]
      raise Damaged(f"{path}, line {count}: the step is {step}, not {count}")
  # Starts with different values of eval.every share only these steps.
  evals = (config.get("eval", {}) for config in starts)
  every = math.lcm(*(max(1, x.get("every") or 1) for x in evals))
  last = starts[0].get("run", {}).get("steps") if starts else None
  return Covered(workdir, count, evaluations, every, last)


def _whole(path: pathlib.Path, check: Check = has_step) -> Iterator[dict]:
  """Lines up to the end, which a power loss may have cut; none without a file.

  An unreadable line that is followed by a readable one raises `Damaged`.
  """
  bad = None
  for line in _read(path, check) if path.exists() else ():
    if isinstance(line, Damaged):
      bad = bad or line
    elif bad is not None:
      raise bad
    else:
      yield line


def _size(line: Any) -> int:
  """How many records an evaluation has; ValueError if it does not say."""
  has_step(line)
  try:
    total = line["summary"]["all"]
    return int(total["prompts"]) * int(total["samples"])
  except (KeyError, TypeError, ValueError, OverflowError):
    raise ValueError("'summary' is not what a run writes") from None
