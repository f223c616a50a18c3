"""Whether what is read is what was saved, and what an error says about it."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

# What is wrong with the content of a folder, not with the way to it.
_CONTENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_OS_ERROR = re.compile(r"os_error_code=\\*'(\d+)")  # as tensorstore tells it
# Of XLA, of tensorstore and of Python, without a number.
_NO_ROOM = ("RESOURCE_EXHAUSTED", "can't start new thread")


class Damage(ValueError):
  """What is read is not what was saved."""


def describe(state: PyTree) -> dict[str, str]:
  """Dtype and shape of each array, by path: "float32[3, 4]"."""
  return {
    path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves(state)
  }


def digest(state: PyTree) -> dict[str, str]:
  """SHA-256 of each array, by path.

  Arrays that are spread over several processes are left out: no process sees
  all of such an array.
  """
  out = {}
  for path, leaf in leaves(state):
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      continue
    value = np.ascontiguousarray(np.asarray(leaf))
    out[path] = hashlib.sha256(value.tobytes()).hexdigest()
  return out


def leaves(state: PyTree) -> Iterator[tuple[str, Any]]:
  """Each array with its path: "params/blocks/q"."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    yield name(path), leaf


def name(path: tuple[Any, ...]) -> str:
  """The path of an array as text."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def sealed(record: dict[str, Any]) -> dict[str, Any]:
  """The record as JSON gives it back, and a seal of just that."""
  record = json.loads(json.dumps(record))
  return {**record, "seal": seal(record)}


def opened(record: Any) -> dict[str, Any]:
  """A sealed record without its seal.

  Raises:
    Damage: It is not what was sealed.
  """
  if not isinstance(record, dict):
    raise Damage("its record is not one")
  record = dict(record)
  found = record.pop("seal", None)
  # Older ones are sealed with numbers as keys, which sort otherwise: 7 is
  # before 30, and "30" before "7".
  if found not in (seal(record), seal(_numbered(record))):
    raise Damage("its record is not what was saved")
  return record


def seal(record: dict[str, Any]) -> str:
  text = json.dumps(record, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _numbered(x: Any) -> Any:
  """Keys that are numbers in a text as numbers."""
  if not isinstance(x, dict):
    return x
  numbers = bool(x) and all(key.isdecimal() for key in x)
  return {int(k) if numbers else k: _numbered(v) for k, v in x.items()}


def unreachable(error: BaseException | None) -> str | None:
  """Why something could not be read or written, if its content is not why."""
  while error is not None:
    if isinstance(error, MemoryError):
      return "there is not enough memory"
    numbers = [*map(int, _OS_ERROR.findall(str(error)))]
    if isinstance(error, OSError) and error.errno is not None:
      numbers.append(error.errno)
    for number in numbers:
      if number not in _CONTENT:
        return os.strerror(number)
    for text in _NO_ROOM:
      if text in str(error):
        return _first_line(error)
    error = error.__cause__ or error.__context__
  return None


def told(error: BaseException) -> str:
  """An error in one short line: the file, and what is wrong with it."""
  if isinstance(error, OSError) and error.strerror:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"
  return unreachable(error) or _first_line(error)


def _first_line(error: BaseException) -> str:
  lines = str(error).splitlines() or [type(error).__name__]
  return lines[0] if len(lines[0]) <= 300 else f"{lines[0][:300]}..."
