"""check(candidate): tests that call the program, in a process of their own.

Two processes joined by two pipes, of which neither can see the other's memory:
one has the program, the other the tests, and gives the verdict. What crosses
the pipes is plain data.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import Any

from brorl_jax.tasks.sandbox import plain, running, walls

_LENGTH = struct.Struct("=I")


class _Lost(BaseException):
  """The other process is gone, or says what it should not."""


def check(
  job: dict[str, Any], results: int, limits: walls.Limits, tests: int
) -> int:
  """Forks the program's process, then becomes the one with the tests."""
  ask, asked = os.pipe()
  answered, answer = os.pipe()
  last_wall = walls.last_wall(threads=limits.threads > 0)
  pid = os.fork()
  if pid == 0:
    status = 1
    try:
      last_wall()
      running.keep((ask, answer))
      status = _serve(job, ask, answer)
    finally:
      os._exit(status)
  os.close(ask)
  os.close(answer)
  last_wall()
  source = running.contents(tests).decode()
  os.close(tests)
  return _run_tests(job["function"], source, asked, answered, results)


def _serve(job: dict[str, Any], ask: int, answer: int) -> int:
  """The program's side: the first frame says whether there is a function."""
  function = running.load(job, answer, "submission", running.BEFORE)
  if function is None:
    return 0
  running.send(answer, 0, 0, b"", b"")
  while True:
    args, kwargs = plain.rebuild(plain.decode(plain.loads(_receive(ask))))
    payload = why = b""
    try:
      value = function(*args, **kwargs)
      payload = plain.dumps(plain.encode([value, args]))
    except BaseException as error:
      payload = plain.dumps(plain.encode([None, args]))
      why = running.name_of(error)
    running.send(answer, 1, 0, payload, why)


def _run_tests(
  function: str, source: str, asked: int, answered: int, results: int
) -> int:
  """The tests' side; one frame, without a reason if they all hold."""
  why, lost = b"", []
  try:
    _, _, why = _receive_frame(answered)
  except (_Lost, Exception) as error:  # whatever the program has sent
    lost.append(str(error))

  def candidate(*args: Any, **kwargs: Any) -> Any:
    try:
      return _ask(asked, answered, list(args), kwargs)
    except _Lost as error:
      # Tests may catch anything; the verdict does not hang on them then.
      lost.append(str(error))
      raise

  if not why and not lost:
    names = {"__name__": "tests", "candidate": candidate, function: candidate}
    try:
      exec(compile(source, "<tests>", "exec", dont_inherit=True), names)
      names["check"](candidate)
    except AssertionError:
      why = b"wrong answer"
    except BaseException as error:
      why = b"runtime error: " + running.name_of(error)
  if lost:
    why = b"runtime error: " + lost[0].encode()
  running.send(results, 0, 0, b"", why)
  return 0


def _ask(
  asked: int, answered: int, args: list[Any], kwargs: dict[str, Any]
) -> Any:
  request = plain.dumps(plain.encode([args, kwargs]))
  running.write(asked, _LENGTH.pack(len(request)) + request)
  index, payload, why = _receive_frame(answered)
  try:
    value = plain.decode(plain.loads(payload))
    if index != 1 or _is_opaque(value):
      raise _Lost("no plain data")
    got, after = plain.rebuild(value)
  except (ValueError, TypeError):
    raise _Lost("no plain data") from None
  for mine, theirs in zip(args, after):  # noqa: B905
    if type(mine) is type(theirs) and isinstance(mine, list):
      mine[:] = theirs
    elif type(mine) is type(theirs) and isinstance(mine, (dict, set)):
      mine.clear()
      mine.update(theirs)
  if why:
    raise _raised(why.decode("utf-8", "replace"))
  return got


def _raised(name: str) -> Exception:
  """Tests may want a builtin exception."""
  kind = vars(sys.modules["builtins"]).get(name)
  if isinstance(kind, type) and issubclass(kind, Exception):
    try:
      return kind("raised by the candidate")
    except TypeError:
      pass
  return RuntimeError(f"candidate raised {name}")


def _is_opaque(value: Any) -> bool:
  if isinstance(value, plain.Keyed):
    return any(map(_is_opaque, value.items.values()))
  if isinstance(value, (list, tuple)):
    return any(map(_is_opaque, value))
  return isinstance(value, plain.Opaque)


def _receive(fd: int) -> bytes:
  return _read(fd, _LENGTH.unpack(_read(fd, _LENGTH.size))[0])


def _receive_frame(fd: int) -> tuple[int, bytes, bytes]:
  index, *_, size, more = running.FRAME.unpack(_read(fd, running.FRAME.size))
  return index, _read(fd, size), _read(fd, more)


def _read(fd: int, size: int) -> bytes:
  if size > plain.MAX_BYTES:
    raise _Lost("too much data")
  data = b""
  while len(data) < size:
    more = os.read(fd, size - len(data))
    if not more:
      raise _Lost("it ended")
    data += more
  return data
