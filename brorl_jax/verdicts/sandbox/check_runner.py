"""check(candidate): tests that call the program, in a separate process.

Two pipes join two processes that cannot see each other's memory. One has the
program; the other has the tests and decides. Only plain data crosses the pipes.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import Any

from brorl_jax.verdicts.sandbox import codec, program_runner, seccomp_landlock
from brorl_jax.verdicts.sandbox.protocol import BEFORE, FRAME, Limits

_LENGTH = struct.Struct("=I")


class _Lost(BaseException):
  """The other process ended or sent malformed data."""


def check(job: dict[str, Any], results: int, limits: Limits, tests: int) -> int:
  """Forks the process of the program, then runs the tests in this one."""
  ask, asked = os.pipe()
  answered, answer = os.pipe()
  ban_forks = seccomp_landlock.fork_ban(threads=limits.threads > 0)
  pid = os.fork()
  if pid == 0:
    status = 1
    try:
      ban_forks()
      program_runner.keep((ask, answer))
      status = _serve(job, ask, answer)
    finally:
      os._exit(status)
  os.close(ask)
  os.close(answer)
  ban_forks()
  source = program_runner.contents(tests).decode()
  os.close(tests)
  return _run_tests(job["function"], source, asked, answered, results)


def _serve(job: dict[str, Any], ask: int, answer: int) -> int:
  """The program's side; its first frame reports a missing function."""
  function = program_runner.load(job, answer, "submission", BEFORE)
  if function is None:
    return 0
  program_runner.send(answer, 0, 0, b"", b"")
  while True:
    args, kwargs = codec.rebuild(codec.decode(codec.loads(_receive(ask))))
    payload = why = b""
    try:
      value = function(*args, **kwargs)
      payload = codec.dumps(codec.encode([value, args]))
    except BaseException as error:
      payload = codec.dumps(codec.encode([None, args]))
      why = program_runner.name_of(error)
    program_runner.send(answer, 1, 0, payload, why)


def _run_tests(
  function: str, source: str, asked: int, answered: int, results: int
) -> int:
  """The tests' side; sends one frame, with a reason unless all passed."""
  why, lost = b"", []
  try:
    _, _, why = _receive_frame(answered)
  except (_Lost, Exception) as error:  # the program may send anything
    lost.append(str(error))

  def candidate(*args: Any, **kwargs: Any) -> Any:
    try:
      return _ask(asked, answered, list(args), kwargs)
    except _Lost as error:
      # Tests may catch this; the verdict must not depend on it.
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
      why = b"runtime error: " + program_runner.name_of(error)
  if lost:
    why = b"runtime error: " + lost[0].encode()
  program_runner.send(results, 0, 0, b"", why)
  return 0


def _ask(
  asked: int, answered: int, args: list[Any], kwargs: dict[str, Any]
) -> Any:
  request = codec.dumps(codec.encode([args, kwargs]))
  program_runner.write(asked, _LENGTH.pack(len(request)) + request)
  index, payload, why = _receive_frame(answered)
  try:
    value = codec.decode(codec.loads(payload))
    if index != 1 or _is_opaque(value):
      raise _Lost("not plain data")
    got, after = codec.rebuild(value)
  except (ValueError, TypeError):
    raise _Lost("not plain data") from None
  for argument, changed in zip(args, after):  # noqa: B905
    if type(argument) is type(changed) and isinstance(argument, list):
      argument[:] = changed
    elif type(argument) is type(changed) and isinstance(argument, (dict, set)):
      argument.clear()
      argument.update(changed)
  if why:
    raise _raised(why.decode("utf-8", "replace"))
  return got


def _raised(name: str) -> Exception:
  """The builtin exception of that name; tests may expect it."""
  kind = vars(sys.modules["builtins"]).get(name)
  if isinstance(kind, type) and issubclass(kind, Exception):
    try:
      return kind("raised by the candidate")
    except TypeError:
      pass
  return RuntimeError(f"candidate raised {name}")


def _is_opaque(value: Any) -> bool:
  if isinstance(value, codec.Keyed):
    return any(map(_is_opaque, value.items.values()))
  if isinstance(value, (list, tuple)):
    return any(map(_is_opaque, value))
  return isinstance(value, codec.Opaque)


def _receive(fd: int) -> bytes:
  return _read(fd, _LENGTH.unpack(_read(fd, _LENGTH.size))[0])


def _receive_frame(fd: int) -> tuple[int, bytes, bytes]:
  index, *_, size, more = FRAME.unpack(_read(fd, FRAME.size))
  return index, _read(fd, size), _read(fd, more)


def _read(fd: int, size: int) -> bytes:
  if size > codec.MAX_BYTES:
    raise _Lost("too much data")
  data = b""
  while len(data) < size:
    more = os.read(fd, size - len(data))
    if not more:
      raise _Lost("the program ended")
    data += more
  return data
