"""What runs in the code jail: a warm interpreter that forks once per program.

    main(control, readable=["/usr/lib"], namespaces=True)

Started by zygote.py, whose socket brings jobs: the byte `JOB` with descriptors
of a memory file with the job, of the pipe for its results and, for a check, of
a memory file with the tests. The interpreter itself reads neither; it forks,
waits until the job's process and all its descendants are gone, and answers with
the wait status. A job says how it is run:

  call    one process; the function is called with one input after the other
  stdio   each input is a process's stdin; its stdout comes back. They are
          forked from one that has compiled the program and never runs it. A
          process goes on to the next input, up to "together" of them, with new
          standard streams and a new __main__, unless it ended or used threads
  check   one process with the program, one with the tests that call it, joined
          by two pipes; neither can see the other's memory

No expected value enters a process that runs the program. Results are frames:
`FRAME` and two byte strings, what came back and, if nothing did, why. A program
may forge those of its own calls, with values that it might as well return.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from brorl_jax.tasks.sandbox import plain, walls

READY, JOB = b"r", b"j"
STATUS = struct.Struct("=i")
# Index, wait status, whether it was the first of its process, bytes of two
# strings.
FRAME = struct.Struct("=ii?II")
END = struct.Struct("=B40s")  # of a test: exit status and name of the error
STOPPED = b"."  # after the last of a process that was not in a test
OVERFLOW = -1  # a status: more output than is read
BEFORE = -1  # an index: it failed before the first test
KILLED = 9  # exit status of a job whose tests have processes: one was killed

_LENGTH = struct.Struct("=I")
_TMP = "/tmp"
_TMP_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
_TMP_FLAGS = 2 | 4 | 8  # no setuid, no devices, no programs
_OPEN_FILES = 256  # of the interpreter that forks
# What solutions import most: warm, it costs a program nothing. No more than
# that, since a fork pays for the interpreter's size; and neither threading nor
# random, which have work to do in each process that is forked.
_WARM = """
  bisect collections copy dataclasses functools heapq itertools json math
  operator re string
"""

_running: list[int] = []  # the job's process


class _Lost(BaseException):
  """The other process is gone, or says what it should not."""


def main(control: int, *, readable: Sequence[str], namespaces: bool) -> None:
  """Forks one process per job until the host closes its end of the socket.

  Args:
    control: Our end of a socket of packets.
    readable: What programs may read: the interpreter's own files.
    namespaces: Whether there are namespaces around this process, so that it may
      mount a place for scratch files and dies with what is in it. Without, jobs
      have no place to write.
  """
  sock = socket.socket(fileno=control)
  resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
  walls.adopt_orphans()
  if namespaces:
    walls.mount_tmpfs(_TMP, _TMP_FLAGS, _TMP_OPTIONS)
  else:
    walls.die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
  walls.drop_capabilities()
  for name in _WARM.split():
    __import__(name)
  gc.collect()
  gc.freeze()  # collections in a program leave the shared pages alone
  sock.send(READY)
  jobs = 0
  while True:
    _, fds, _, _ = socket.recv_fds(sock, 1, 3)
    if not fds:
      return
    jobs += 1
    scratch = f"{_TMP}/{jobs}" if namespaces else None
    if scratch:
      os.mkdir(scratch, 0o700)
    pid = os.fork()
    if pid == 0:
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      _job(fds, scratch, readable)
    _running.append(pid)
    for fd in fds:
      os.close(fd)
    sock.send(STATUS.pack(_reap(pid)))
    _running.clear()
    if scratch:
      # What cannot be removed ends this interpreter, and the scratch with it.
      shutil.rmtree(scratch)


def _stop(*_: Any) -> NoReturn:
  """Ends with all descendants, which leave no zombie to anyone else."""
  try:
    for pid in _running:
      os.kill(pid, signal.SIGKILL)
    _reap(0)
  finally:
    os._exit(0)


def _reap(pid: int) -> int:
  """Waits for all descendants; the wait status of one of them."""
  status = 0
  while True:
    try:
      ended, how = os.waitpid(-1, 0)
    except ChildProcessError:
      return status
    if ended == pid:
      status = how


def _job(
  fds: Sequence[int], scratch: str | None, readable: Sequence[str]
) -> NoReturn:
  """A job's process. 5: it could not do what it should."""
  status = 5
  try:
    walls.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    _keep(fds)
    job = json.loads(_contents(fds[0]))
    os.close(fds[0])
    os.chdir(scratch or "/")
    limits = walls.Limits(**job["limits"])
    walls.raise_walls(
      limits,
      readable=[*readable, "/dev/urandom"],
      writable=[scratch, os.devnull] if scratch else [os.devnull],
      forks=job["mode"] != "call",
    )
    if job["mode"] == "call":
      status = _calls(job, fds[1])
    elif job["mode"] == "stdio":
      status = _stdio(job, fds[1], limits)
    else:
      status = _check(job, fds[1], fds[2])
  finally:
    os._exit(status)


def _keep(fds: Sequence[int]) -> None:
  """Closes all other descriptors."""
  low = 3
  for fd in [*sorted(fds), _OPEN_FILES]:
    os.closerange(low, fd)
    low = fd + 1


def _contents(fd: int) -> bytes:
  with open(fd, "rb", closefd=False) as file:
    return file.read()


def _send(
  results: int,
  index: int,
  status: int,
  payload: bytes,
  why: bytes,
  *,
  first: bool = True,
) -> None:
  _write(results, FRAME.pack(index, status, first, len(payload), len(why)))
  _write(results, payload)
  _write(results, why)


def _write(fd: int, data: bytes) -> None:
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def _name(error: BaseException) -> bytes:
  return type(error).__name__[:80].encode("utf-8", "replace")


def _load(
  job: dict[str, Any], results: int, module_name: str, index: int
) -> Callable[..., Any] | None:
  """The program's function, or None after a frame that says why not."""
  code = _compile(job["program"], results, index)
  if code is None:
    return None
  module = types.ModuleType(module_name)
  # As the judges of such programs do, which are written without the import.
  vars(module).update({n: getattr(typing, n) for n in typing.__all__})
  sys.modules[module_name] = module
  try:
    exec(code, vars(module))
  except BaseException as error:
    _send(results, index, 0, b"", b"runtime error: " + _name(error))
    return None
  name = job["function"]
  if callable(vars(module).get(name)):
    return vars(module)[name]
  solution: Any = vars(module).get("Solution")
  if callable(getattr(solution, name, None)):
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)
  _send(results, index, 0, b"", b"no function: " + name.encode())
  return None


def _compile(program: str, results: int, index: int) -> types.CodeType | None:
  try:
    # Without the future statements of this file.
    return compile(program, "<program>", "exec", dont_inherit=True)
  except BaseException as error:
    line = getattr(error, "lineno", None)
    where = f" in line {line}".encode() if type(line) is int else b""
    _send(results, index, 0, b"", b"syntax error: " + _name(error) + where)
    return None


# Function calls.


def _calls(job: dict[str, Any], results: int) -> int:
  function = _load(job, results, "submission", BEFORE)
  if function is None:
    return 0
  for index, node in enumerate(job["calls"]):
    payload = why = b""
    try:
      payload = _call(function, node)
    except BaseException as error:
      why = b"runtime error: " + _name(error)
    _send(results, index, 0, payload, why)
  return 0


def _call(function: Callable[..., Any], node: Any) -> bytes:
  value = function(*plain.rebuild(plain.decode(node)))
  return plain.dumps(plain.encode(value))


# Standard input and output.


def _stdio(job: dict[str, Any], results: int, limits: walls.Limits) -> int:
  """Forks processes, one after the other, that run the next tests each."""
  code = _compile(job["program"], results, BEFORE)
  if code is None:
    return 0
  last_wall = walls.last_wall()
  texts, most = job["inputs"], job["together"]
  killed = done = 0
  while done < len(texts):
    # Files rather than pipes: nobody has to stand by and move bytes.
    files = [_files(text) for text in texts[done : done + most]]
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
      last_wall()
      os.close(said)
      os.close(results)
      _programs(code, files, say)
    os.close(say)
    status = os.waitpid(pid, 0)[1]
    killed |= os.WIFSIGNALED(status)
    ends = _ends(_contents(said), status)
    os.close(said)
    for k, (end, name) in enumerate(ends[: len(files)]):
      output = os.pread(files[k][1], limits.output_bytes + 1, 0)
      if len(output) > limits.output_bytes:
        end, output = OVERFLOW, b""
      _send(results, done, end, output, name, first=k == 0)
      done += 1
    for fd in sum(files, ()):
      os.close(fd)
  return KILLED if killed else 0


def _files(text: str) -> tuple[int, int]:
  """A test's input and output."""
  files = os.memfd_create("stdin"), os.memfd_create("stdout")
  _write(files[0], text.encode())
  os.lseek(files[0], 0, os.SEEK_SET)
  return files


def _ends(said: bytes, status: int) -> list[tuple[int, bytes]]:
  """Wait status and name of the error of each test that a process ran."""
  ends = []
  for at in range(0, len(said) - END.size + 1, END.size):
    code, name = END.unpack_from(said, at)
    ends.append((code << 8, name.rstrip(b"\0")))
  if not ends or len(said) % END.size != len(STOPPED):
    ends.append((status, b""))  # it ended in the middle of a test
  return ends


def _programs(
  code: types.CodeType, files: Sequence[tuple[int, int]], say: int
) -> NoReturn:
  """Runs a program on one test after the other; see the module."""
  status = 1
  try:
    here, depth = os.getcwd(), sys.getrecursionlimit()
    for stdin, stdout in files:
      os.dup2(stdin, 0)
      os.dup2(stdout, 1)
      os.chdir(here)
      sys.setrecursionlimit(depth)
      status, name = _run_program(code)
      os.write(say, END.pack(status, name))
      # What is left of threads may disturb the next test.
      if "threading" in sys.modules:
        break
    os.write(say, STOPPED)
  finally:
    os._exit(status)


def _run_program(code: types.CodeType) -> tuple[int, bytes]:
  """Runs it as an interpreter would, from its first line to its end."""
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
    status, name = 1, _name(error)
  threading: Any = sys.modules.get("threading")
  if threading:
    threading._shutdown()  # joins what was not joined
  atexit._run_exitfuncs()
  for stream in (sys.stdout, ours):  # perhaps one of the program's own making
    with contextlib.suppress(AttributeError):
      if not stream.closed:
        stream.flush()
  return status, name


# check(candidate): two processes.


def _check(job: dict[str, Any], results: int, tests: int) -> int:
  """Forks the program's process, then becomes the one with the tests."""
  ask, asked = os.pipe()
  answered, answer = os.pipe()
  last_wall = walls.last_wall()
  pid = os.fork()
  if pid == 0:
    status = 1
    try:
      last_wall()
      _keep((ask, answer))
      status = _serve(job, ask, answer)
    finally:
      os._exit(status)
  os.close(ask)
  os.close(answer)
  last_wall()
  source = _contents(tests).decode()
  os.close(tests)
  return _run_check(job["function"], source, asked, answered, results)


def _serve(job: dict[str, Any], ask: int, answer: int) -> int:
  """The program's side: the first frame says whether there is a function."""
  function = _load(job, answer, "submission", BEFORE)
  if function is None:
    return 0
  _send(answer, 0, 0, b"", b"")
  while True:
    args, kwargs = plain.rebuild(plain.decode(plain.loads(_receive(ask))))
    payload = why = b""
    try:
      value = function(*args, **kwargs)
      payload = plain.dumps(plain.encode([value, args]))
    except BaseException as error:
      payload = plain.dumps(plain.encode([None, args]))
      why = _name(error)
    _send(answer, 1, 0, payload, why)


def _run_check(
  function: str, source: str, asked: int, answered: int, results: int
) -> int:
  """The tests' side; one frame, without a reason if they all hold."""
  why, lost = b"", []
  try:
    _, _, why = _receive_frame(answered)
  except _Lost as error:
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
      why = b"runtime error: " + _name(error)
  if lost:
    why = b"runtime error: " + lost[0].encode()
  _send(results, 0, 0, b"", why)
  return 0


def _ask(
  asked: int, answered: int, args: list[Any], kwargs: dict[str, Any]
) -> Any:
  request = plain.dumps(plain.encode([args, kwargs]))
  _write(asked, _LENGTH.pack(len(request)) + request)
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
  index, _, _, size, more = FRAME.unpack(_read(fd, FRAME.size))
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
