"""A zygote: a warm interpreter that forks one process per job.

    main(control, readable=["/usr/lib"], namespaces=True)

zygote.py starts it and sends orders over a socket. The byte `JOB` comes with
descriptors: a memory file with the job, a pipe for the results and, for a
check, a memory file with the tests. The interpreter reads none of them. It
forks, waits until the job's process and all its descendants have ended, and
replies with the wait status and their CPU seconds. When the socket closes, it
kills the job and ends. A job has one of three modes:

  call    one process calls the function on one input after the other
  stdio   each input is the stdin of a process; the results are its stdout. The
          processes are forked from one that compiled the program and never
          runs it. A process takes up to "together" inputs, each with new
          standard streams and a new __main__, unless it ends or uses threads
  check   one process has the program, another the tests that call it. Two
          pipes join them; neither sees the other's memory

No process that runs the program holds an expected value. A program can forge
the frames and seconds of its own calls. That gains it nothing: it could return
the same values, and the host measures the total.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from brorl_jax.verdicts.sandbox import codec, seccomp_landlock
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

# To and from a zygote.
JOB = b"j"
STATUS = struct.Struct("=id")  # wait status and CPU-seconds of a job
BROKEN = 5  # exit status of a job's process that failed by itself
LENGTH = struct.Struct("=I")  # of a message, which follows

# Results start with a byte, sent before the program is compiled. Frames follow:
# `FRAME` and two byte strings, the value and, without a value, the reason.
BEGUN = b"+"
# Index, wait status, CPU seconds, two lengths.
FRAME = struct.Struct("=iidII")
OVERFLOW = -1  # as a status: more output than the limit
BEFORE = -1  # as an index: failed before the first test
KILLED = 9  # exit status of a stdio job: a process of it was killed

_OPEN_FILES = 256  # descriptors of a zygote
# The end of a test: exit status, CPU seconds and name of the error.
_END = struct.Struct("=Bd40s")
_STOPPED = b"."  # the process ended between two tests

_TMP = "/tmp"
# 32 MB, and inputs and outputs of the tests of a process; see code.py.
_TMP_OPTIONS = "size=96m,nr_inodes=4096,mode=700"
_TMP_FLAGS = 2 | 4 | 8  # no setuid, no devices, no programs
# Modules that solutions import most, loaded once. The list is short because a
# fork costs more in a larger interpreter. threading and random are left out:
# each runs code in every forked process.
_WARM = """
  bisect collections copy dataclasses functools heapq itertools json math
  operator re string
"""


def main(control: int, *, readable: Sequence[str], namespaces: bool) -> None:
  """Forks one process per job until the host closes its end of the socket.

  `control` is our end; jobs may read the `readable` files of the interpreter.
  With `namespaces` each job has new process numbers and an empty folder for
  scratch files: what it could count tells it nothing about other jobs.
  Otherwise jobs can write nothing and start no threads, because the kernel
  would count the threads of all jobs together.
  """
  limit_descriptors()
  if not namespaces:
    seccomp_landlock.drop_capabilities()
  for name in _WARM.split():
    __import__(name)
  if hasattr(os, "eventfd"):  # from Python 3.10; asyncio wakes up by it
    socket.socketpair = lambda *_: [Wakeup()] * 2
  # `site` is not loaded, and many programs end with exit().
  for name in ("exit", "quit"):
    setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
  if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)  # the time of a test is limited
  for forks in (False, True):
    seccomp_landlock.calls_filter(forks, namespaces)
  gc.collect()
  gc.freeze()  # a collection in a program must not touch shared pages
  seccomp_landlock.adopt_orphans()
  sock = socket.socket(fileno=control)
  apart = contextlib.nullcontext
  if namespaces:
    new = seccomp_landlock.new_namespaces
    apart = functools.partial(new, _TMP, _TMP_FLAGS, _TMP_OPTIONS)
  with apart():  # fails before the first job
    pass
  write(control, framed(codec.dumps({"pid": os.getpid()})))
  while True:
    order, fds, _, _ = socket.recv_fds(sock, 1, 3)
    if not order:
      _end([])
    with apart():
      pid = os.fork()
      if pid == 0:
        _job(fds, _TMP if namespaces else None, readable)
      for fd in fds:
        os.close(fd)
      sock.send(STATUS.pack(*_await(sock, pid)))


class Wakeup:
  """What asyncio needs of a pair of sockets, which programs cannot make."""

  def __init__(self):
    self.fd = os.eventfd(0, os.EFD_NONBLOCK)

  def fileno(self) -> int:
    return self.fd

  def setblocking(self, _: bool) -> None:
    """It never waits."""

  def send(self, data: bytes) -> int:
    return os.eventfd_write(self.fd, len(data)) or len(data)

  def recv(self, _: int) -> bytes:
    return b"\0" * min(os.eventfd_read(self.fd), 1 << 12)

  def close(self) -> None:
    if self.fd >= 0:
      os.close(self.fd)
    self.fd = -1


def _await(sock: socket.socket, pid: int) -> tuple[int, float]:
  """Waits for a job; ends with it if the host closes the socket."""
  ended = os.pidfd_open(pid)
  poll = select.poll()
  poll.register(ended, select.POLLIN)
  poll.register(sock, select.POLLIN)
  if ended not in dict(poll.poll()):  # no order comes during a job
    _end([pid])
  os.close(ended)
  return _reap(pid)


def _end(children: Iterable[int]) -> NoReturn:
  """Kills the children and waits for all, so that no zombie remains."""
  try:
    for pid in children:
      os.kill(pid, signal.SIGKILL)
    _reap(0)
  finally:
    os._exit(0)


def _reap(pid: int) -> tuple[int, float]:
  """Waits for all descendants; wait status of `pid`, CPU seconds of all."""
  status, cpu_s = 0, 0.0
  while True:
    try:
      ended, how, used = os.wait4(-1, 0)
    except ChildProcessError:
      return status, cpu_s
    cpu_s += used.ru_utime + used.ru_stime
    if ended == pid:
      status = how


def _job(
  fds: Sequence[int], scratch: str | None, readable: Sequence[str]
) -> NoReturn:
  status = BROKEN
  try:
    seccomp_landlock.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    keep(fds)
    job = json.loads(contents(fds[0]))
    os.close(fds[0])
    os.chdir(scratch or "/")
    limits = Limits(**job["limits"])
    if scratch is None:
      limits = dataclasses.replace(limits, threads=0)
    seccomp_landlock.isolate(
      limits,
      readable=[*readable, "/dev/urandom"],
      writable=[scratch, os.devnull] if scratch else [os.devnull],
      forks=job["mode"] != "call",
    )
    os.write(fds[1], BEGUN)
    if job["mode"] == "call":
      status = calls(job, fds[1])
    elif job["mode"] == "stdio":
      status = stdio(job, fds[1], limits)
    else:
      status = check(job, fds[1], limits, fds[2])
  finally:
    os._exit(status)


def limit_descriptors() -> None:
  """Makes `keep` fast."""
  resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


def keep(fds: Sequence[int]) -> None:
  """Closes all other descriptors."""
  low = 3
  for fd in [*sorted(fds), _OPEN_FILES]:
    os.closerange(low, fd)
    low = fd + 1


def contents(fd: int) -> bytes:
  with open(fd, "rb", closefd=False) as file:
    return file.read()


def send(results: int, index: int, status=0, payload=b"", why=b"", cpu_s=0.0):
  write(results, FRAME.pack(index, status, cpu_s, len(payload), len(why)))
  write(results, payload)
  write(results, why)


def write(fd: int, data: bytes) -> None:
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def framed(data: bytes) -> bytes:
  return LENGTH.pack(len(data)) + data


def name_of(error: BaseException) -> bytes:
  """The name of the error's class, which the program may have defined."""
  return type(error).__name__[:80].encode("utf-8", "replace")


def load(job: dict[str, Any], results: int) -> Callable[..., Any] | None:
  """The program's function, or None after a frame with the reason."""
  code = _compile(job["program"], results)
  if code is None:
    return None
  module = types.ModuleType("submission")
  # Online judges import typing, so solutions leave the import out.
  vars(module).update({n: getattr(typing, n) for n in typing.__all__})
  sys.modules["submission"] = module
  try:
    exec(code, vars(module))
  except BaseException as error:
    send(results, BEFORE, why=b"runtime error: " + name_of(error))
    return None
  name = job["function"]
  if callable(vars(module).get(name)):
    return vars(module)[name]
  solution: Any = vars(module).get("Solution")
  if callable(getattr(solution, name, None)):
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)
  send(results, BEFORE, why=b"no function: " + name.encode())
  return None


def _compile(program: str, results: int) -> types.CodeType | None:
  try:
    # Do not inherit the future statements of this file.
    return compile(program, "<program>", "exec", dont_inherit=True)
  except BaseException as error:
    line = getattr(error, "lineno", None)
    where = f" in line {line}".encode() if type(line) is int else b""
    send(results, BEFORE, why=b"syntax error: " + name_of(error) + where)
    return None


def calls(job: dict[str, Any], results: int) -> int:
  function = load(job, results)
  if function is None:
    return 0
  for index, node in enumerate(job["calls"]):
    payload = why = b""
    began = time.process_time()
    try:
      given = codec.decode(node)
      payload = codec.dumps(codec.encode(function(*codec.rebuild(given))))
    except BaseException as error:
      why = b"runtime error: " + name_of(error)
    send(results, index, 0, payload, why, cpu_s=time.process_time() - began)
  return 0


def stdio(job: dict[str, Any], results: int, limits: Limits) -> int:
  """Forks one process after the other; each runs the next few tests."""
  code = _compile(job["program"], results)
  if code is None:
    return 0
  ban_forks = seccomp_landlock.fork_ban(threads=limits.threads > 0)
  texts, most = job["inputs"], job["together"]
  killed = done = count = 0

  def tell(status: int, name: bytes, cpu_s: float) -> None:
    """Sends the end of a test, with what it wrote."""
    nonlocal count
    written = os.pread(files[count][1], limits.output_bytes + 1, 0)
    if len(written) > limits.output_bytes:
      status, written = OVERFLOW, b""
    name = name.rstrip(b"\0")
    send(results, done + count, status, written, name, cpu_s=cpu_s)
    count += 1

  while done < len(texts):
    # Files, not pipes: no process has to move bytes.
    try:
      files = [_files(text) for text in texts[done : done + most]]
    except OSError:
      if not done:
        raise
      break  # the program has filled its folder
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
      ban_forks()
      os.close(reader)
      os.close(results)
      _programs(code, files, writer)
    os.close(writer)
    count, end, size = 0, b"", _END.size
    while count < len(files) and len(end := _read(reader, size)) == size:
      exit_status, cpu_s, name = _END.unpack(end)
      tell(exit_status << 8, name, cpu_s)
    status = os.waitpid(pid, 0)[1]
    os.close(reader)
    killed |= os.WIFSIGNALED(status)
    if count < len(files) and not (count and len(end) == len(_STOPPED)):
      tell(status, b"", 0.0)  # the process ended during a test
    done += count
    if os.getcwd() == _TMP:
      _empty(_TMP)
    for fd in sum(files, ()):
      os.close(fd)
  return KILLED if killed else 0


def _empty(folder: str) -> None:
  for place, folders, files in os.walk(folder, topdown=False):
    for remove, names in ((os.unlink, files), (os.rmdir, folders)):
      for name in names:
        with contextlib.suppress(OSError):
          remove(os.path.join(place, name))


def _read(fd: int, size: int) -> bytes:
  data = b""
  while len(data) < size and (more := os.read(fd, size - len(data))):
    data += more
  return data


def _files(text: str) -> tuple[int, int]:
  files = _file(), _file()
  write(files[0], text.encode())
  os.lseek(files[0], 0, os.SEEK_SET)
  return files


def _file() -> int:
  """A file without a name; the kernel counts memory files of all jails."""
  if (folder := os.getcwd()) == _TMP:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
  return os.memfd_create("stream")


def _programs(
  code: types.CodeType, files: Sequence[tuple[int, int]], say: int
) -> NoReturn:
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
      os.write(say, _END.pack(status, time.process_time() - began, name))
      # Threads and files that remain could disturb the next test.
      if "threading" in sys.modules or (folder == _TMP and os.listdir(folder)):
        break
      keep([say, *itertools.chain(*files)])
    os.write(say, _STOPPED)
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
  vars(module)["__file__"] = sys.argv[0]
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
  # Functions hold the names that hold them: the memory of all tests would add
  # up, and a last word of one would be another's.
  sys.modules.pop("__main__", None)
  del module
  gc.collect()
  for stream in (sys.stdout, ours):  # the program may have replaced it
    with contextlib.suppress(AttributeError, ValueError):  # or detached
      if not stream.closed:
        stream.flush()
  return status, name


# check(candidate): two pipes join two processes that cannot see each other's
# memory. One has the program; the other has the tests and decides. Only plain
# data crosses the pipes.


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
      keep((ask, answer))
      status = _serve_calls(job, ask, answer)
    finally:
      os._exit(status)
  os.close(ask)
  os.close(answer)
  ban_forks()
  source = contents(tests).decode()
  os.close(tests)
  return _run_tests(job["function"], source, asked, answered, results)


def _serve_calls(job: dict[str, Any], ask: int, answer: int) -> int:
  """The program's side; its first frame reports a missing function."""
  function = load(job, answer)
  if function is None:
    return 0
  send(answer, 0)
  while True:
    (size,) = LENGTH.unpack(_read_all(ask, LENGTH.size))
    asked = codec.decode(codec.loads(_read_all(ask, size)))
    args, kwargs = codec.rebuild(asked)
    payload = why = b""
    try:
      value = function(*args, **kwargs)
      payload = codec.dumps(codec.encode([value, args]))
    except BaseException as error:
      payload = codec.dumps(codec.encode([None, args]))
      why = name_of(error)
    send(answer, 1, 0, payload, why)


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
      return _call_candidate(asked, answered, list(args), kwargs)
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
      why = b"runtime error: " + name_of(error)
  if lost:
    why = b"runtime error: " + lost[0].encode()
  send(results, 0, why=why)
  return 0


def _call_candidate(
  asked: int, answered: int, args: list[Any], kwargs: dict[str, Any]
) -> Any:
  write(asked, framed(codec.dumps(codec.encode([args, kwargs]))))
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
  kind: Any = vars(sys.modules["builtins"]).get(name)
  # A StopIteration would end a loop of the tests before its last assert.
  ends = "StopIteration", "StopAsyncIteration"
  error = isinstance(kind, type) and issubclass(kind, Exception)
  if error and name not in ends:
    with contextlib.suppress(TypeError):
      return kind("raised by the candidate")
  return RuntimeError(f"candidate raised {name}")


def _is_opaque(value: Any) -> bool:
  if isinstance(value, codec.Keyed):
    return any(map(_is_opaque, value.items.values()))
  if isinstance(value, (list, tuple)):
    return any(map(_is_opaque, value))
  return isinstance(value, codec.Opaque)


def _receive_frame(fd: int) -> tuple[int, bytes, bytes]:
  index, *_, size, more = FRAME.unpack(_read_all(fd, FRAME.size))
  return index, _read_all(fd, size), _read_all(fd, more)


def _read_all(fd: int, size: int) -> bytes:
  if size > codec.MAX_BYTES:
    raise _Lost("too much data")
  if len(data := _read(fd, size)) < size:
    raise _Lost("the program ended")
  return data
