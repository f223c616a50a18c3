"""Runs a program in a job's process: function calls, or standard streams.

A program can forge the frames and seconds of its own calls. That gains it
nothing: it could return the same values, and the host measures the total.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import sys
import time
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from brorl_jax.verdicts.sandbox import codec, seccomp_landlock
from brorl_jax.verdicts.sandbox.protocol import (
  BEFORE,
  FRAME,
  KILLED,
  OVERFLOW,
  Limits,
)

OPEN_FILES = 256  # descriptors of the zygote
# The end of a test: exit status, CPU seconds and name of the error.
END = struct.Struct("=Bd40s")
STOPPED = b"."  # the process ended between two tests


def keep(fds: Sequence[int]) -> None:
  """Closes all other descriptors."""
  low = 3
  for fd in [*sorted(fds), OPEN_FILES]:
    os.closerange(low, fd)
    low = fd + 1


def contents(fd: int) -> bytes:
  """The contents of a file from its position on."""
  with open(fd, "rb", closefd=False) as file:
    return file.read()


def send(
  results: int,
  index: int,
  status: int,
  payload: bytes,
  why: bytes,
  *,
  first: bool = True,
  cpu_s: float = 0.0,
) -> None:
  """Writes a frame."""
  sizes = len(payload), len(why)
  write(results, FRAME.pack(index, status, first, cpu_s, *sizes))
  write(results, payload)
  write(results, why)


def write(fd: int, data: bytes) -> None:
  """Writes all the data."""
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def name_of(error: BaseException) -> bytes:
  """The name of the error's class, which the program may have defined."""
  return type(error).__name__[:80].encode("utf-8", "replace")


def load(
  job: dict[str, Any], results: int, module_name: str, index: int
) -> Callable[..., Any] | None:
  """The program's function, or None after a frame with the reason."""
  code = _compile(job["program"], results, index)
  if code is None:
    return None
  module = types.ModuleType(module_name)
  # Online judges import typing, so solutions leave the import out.
  vars(module).update({n: getattr(typing, n) for n in typing.__all__})
  sys.modules[module_name] = module
  try:
    exec(code, vars(module))
  except BaseException as error:
    send(results, index, 0, b"", b"runtime error: " + name_of(error))
    return None
  name = job["function"]
  if callable(vars(module).get(name)):
    return vars(module)[name]
  solution: Any = vars(module).get("Solution")
  if callable(getattr(solution, name, None)):
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)
  send(results, index, 0, b"", b"no function: " + name.encode())
  return None


def _compile(program: str, results: int, index: int) -> types.CodeType | None:
  try:
    # Do not inherit the future statements of this file.
    return compile(program, "<program>", "exec", dont_inherit=True)
  except BaseException as error:
    line = getattr(error, "lineno", None)
    where = f" in line {line}".encode() if type(line) is int else b""
    send(results, index, 0, b"", b"syntax error: " + name_of(error) + where)
    return None


# Function calls.


def calls(job: dict[str, Any], results: int) -> int:
  """Calls the function on one list of arguments after the other."""
  function = load(job, results, "submission", BEFORE)
  if function is None:
    return 0
  for index, node in enumerate(job["calls"]):
    payload = why = b""
    began = time.process_time()
    try:
      payload = _call(function, node)
    except BaseException as error:
      why = b"runtime error: " + name_of(error)
    send(results, index, 0, payload, why, cpu_s=time.process_time() - began)
  return 0


def _call(function: Callable[..., Any], node: Any) -> bytes:
  value = function(*codec.rebuild(codec.decode(node)))
  return codec.dumps(codec.encode(value))


# Standard input and output.


def stdio(job: dict[str, Any], results: int, limits: Limits) -> int:
  """Forks one process after the other; each runs the next few tests."""
  code = _compile(job["program"], results, BEFORE)
  if code is None:
    return 0
  ban_forks = seccomp_landlock.fork_ban(threads=limits.threads > 0)
  texts, most = job["inputs"], job["together"]
  killed = done = 0
  while done < len(texts):
    # Files, not pipes: no process has to move bytes.
    files = [_files(text) for text in texts[done : done + most]]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
      ban_forks()
      os.close(reader)
      os.close(results)
      _programs(code, files, writer)
    os.close(writer)
    count, end = 0, b""
    while (
      count < len(files) and len(end := _read(reader, END.size)) == END.size
    ):
      exit_status, cpu_s, name = END.unpack(end)
      output = files[count][1], limits.output_bytes
      status = exit_status << 8
      _tell(results, done + count, status, name, output, count == 0, cpu_s)
      count += 1
    status = os.waitpid(pid, 0)[1]
    os.close(reader)
    killed |= os.WIFSIGNALED(status)
    if count < len(files) and not (count and len(end) == len(STOPPED)):
      # The process ended during a test.
      output = files[count][1], limits.output_bytes
      _tell(results, done + count, status, b"", output, count == 0, 0.0)
      count += 1
    done += count
    for fd in sum(files, ()):
      os.close(fd)
  return KILLED if killed else 0


def _tell(
  results: int,
  index: int,
  status: int,
  name: bytes,
  output: tuple[int, int],
  first: bool,
  cpu_s: float,
) -> None:
  """Sends the end of a test; `output` is a file and its limit in bytes."""
  fd, most = output
  written = os.pread(fd, most + 1, 0)
  if len(written) > most:
    status, written = OVERFLOW, b""
  name = name.rstrip(b"\0")
  send(results, index, status, written, name, first=first, cpu_s=cpu_s)


def _read(fd: int, size: int) -> bytes:
  """Reads `size` bytes, or fewer at the end."""
  data = b""
  while len(data) < size and (more := os.read(fd, size - len(data))):
    data += more
  return data


def _files(text: str) -> tuple[int, int]:
  """Files for the input and the output of a test."""
  files = os.memfd_create("stdin"), os.memfd_create("stdout")
  write(files[0], text.encode())
  os.lseek(files[0], 0, os.SEEK_SET)
  return files


def _programs(
  code: types.CodeType, files: Sequence[tuple[int, int]], say: int
) -> NoReturn:
  """Runs a program on one test after the other."""
  status = 1
  try:
    folder, depth = os.getcwd(), sys.getrecursionlimit()
    for stdin, stdout in files:
      os.dup2(stdin, 0)
      os.dup2(stdout, 1)
      os.chdir(folder)
      sys.setrecursionlimit(depth)
      began = time.process_time()
      status, name = _run_program(code)
      os.write(say, END.pack(status, time.process_time() - began, name))
      # Threads that remain could disturb the next test.
      if "threading" in sys.modules:
        break
    os.write(say, STOPPED)
  finally:
    os._exit(status)


def _run_program(code: types.CodeType) -> tuple[int, bytes]:
  """Runs a program as a fresh interpreter would."""
  sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
  ours = sys.stdout = sys.__stdout__ = open(
    1, "w", encoding="utf-8", closefd=False
  )
  sys.argv = ["program.py"]
  sys.modules["__main__"] = module = types.ModuleType("__main__")
  status, name = 0, b""
  try:
    exec(code, vars(module))
  except SystemExit as end:
    status = 0 if end.code is None else 1
    if isinstance(end.code, int):
      status = end.code & 0xFF
  except BaseException as error:
    status, name = 1, name_of(error)
  threading: Any = sys.modules.get("threading")
  if threading:
    threading._shutdown()  # joins the remaining threads
  atexit._run_exitfuncs()
  for stream in (sys.stdout, ours):  # the program may have replaced it
    with contextlib.suppress(AttributeError):
      if not stream.closed:
        stream.flush()
  return status, name
