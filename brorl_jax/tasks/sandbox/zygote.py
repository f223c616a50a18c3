"""The host's side of the code jail: starts it, hands it jobs, kills it.

    zygote = Zygote("/usr/bin/python3", bubblewrap="/usr/bin/bwrap")
    ended = zygote.run({"mode": "call", ...}, limits=Limits())
    zygote.close()

A zygote is an interpreter in the jail, see inside.py, which forks a process per
job in a few milliseconds; starting it takes 0.1 s. With bubblewrap there are
new namespaces around it, of an unprivileged user, with /usr and nothing else to
read, without /proc and devices, and 32 MB to write. One thread uses a zygote;
each wants its own. It is killed from here, with all that it holds, after the
first job that was late, was killed or said what it should not, and after 500.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.tasks.sandbox import calls, inside, plain, walls
from brorl_jax.tasks.sandbox.walls import Limits

NOBODY = 65534  # who runs the jail where we are root

_JOBS = 500
_START_S = 20.0  # 0.1 s, on a crowded machine more
_END_S = 10.0
_PIECE = 1 << 18  # bytes of one read
_MODULES = (calls, walls, plain, inside)

# The jail has no file of this package, and need not: it is told the sources.
_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json, types
with open(int(sys.argv[1]), "rb") as file:
  boot = json.loads(file.read())
for name, source in boot["modules"].items():
  parent = ""
  for part in name.split("."):
    full = parent + "." + part if parent else part
    if full not in sys.modules:
      module = types.ModuleType(full)
      module.__path__ = []
      sys.modules[full] = module
      if parent:
        setattr(sys.modules[parent], part, module)
    parent = full
  exec(compile(source, name, "exec"), vars(sys.modules[name]))
sys.modules[boot["main"]].main(int(sys.argv[2]), **boot["options"])
"""
_ENVIRONMENT = {
  "LANG": "C.UTF-8",
  "MALLOC_ARENA_MAX": "2",  # each is 64 MiB of addresses
  "PYTHONDONTWRITEBYTECODE": "1",
  "PYTHONHASHSEED": "0",  # the same verdict each time
  "PYTHONSAFEPATH": "1",
  "PYTHONUTF8": "1",
}
_READABLE = (
  "/usr/lib",
  "/usr/lib64",
  "/usr/local/lib",
  "/usr/share/zoneinfo",
  "/lib",
  "/lib64",
)


class Failed(RuntimeError):
  """The jail itself failed. No verdict on the program."""


class _Died(Exception):
  """The zygote ended on its own."""


@dataclasses.dataclass(frozen=True)
class Frame:
  """One result; see inside.py.

  Attributes:
    index: Which test, or -1 for what failed before the first.
    status: Wait status of the test, as of a process of its own.
    first: Whether no test ran in its process before.
    payload: What came back.
    why: What went wrong, in the words of the jail or of a program that forged
      them.
  """

  index: int
  status: int
  first: bool
  payload: bytes
  why: bytes


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a job ended.

  Attributes:
    frames: What it said until then.
    reason: "" if it came to its end, else "time-out", "too much output",
      "malformed results", "forbidden system call", "killed: SIGSEGV" and the
      like: such a job passed nothing.
  """

  frames: Sequence[Frame]
  reason: str


class Zygote:
  """One warm interpreter in the jail; see the module."""

  def __init__(self, interpreter: str, *, bubblewrap: str | None):
    """Starts nothing yet.

    Args:
      interpreter: Path of the Python that runs the programs, which whoever runs
        the jail can read: nobody if we are root, else we.
      bubblewrap: Path of bwrap, or None for the inner walls alone.
    """
    self._interpreter = interpreter
    self._bubblewrap = bubblewrap
    self._process: _Process | None = None
    self._jobs = 0

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> Ended:
    """Runs one job.

    Args:
      job: "mode" and what it needs; see inside.py.
      limits: What it may use.
      tests: For a check, the source of the tests.
      received: Bytes of results that are read, `limits.result_bytes` if None.

    Raises:
      Failed: If there is no jail, or it fails and not for this program alone.
    """
    received = limits.result_bytes if received is None else received
    job = {**job, "limits": dataclasses.asdict(limits)}
    texts = [json.dumps(job).encode(), tests][: 1 + (job["mode"] == "check")]
    for _ in range(2):
      try:
        return self._run_once(texts, limits, received)
      except _Died:
        self.close()
    # Twice in a row with a new zygote: is it the program, or are we broken?
    self._check_works()
    return Ended((), "killed: the jail")

  def close(self) -> None:
    """Kills what runs; the next job starts anew."""
    if self._process is not None:
      self._process.close()
    self._process = None

  def _run_once(
    self, texts: Sequence[bytes], limits: Limits, received: int
  ) -> Ended:
    if self._process is None or self._jobs >= _JOBS:
      self.close()
      self._jobs = 0
      self._process = _Process(self._interpreter, self._bubblewrap)
    self._jobs += 1
    process = self._process
    clean = False
    try:
      results = process.send(texts)
      try:
        ended = _collect(process.control, results, limits.wall_s, received)
      finally:
        os.close(results)
      clean = not ended.reason
      return ended
    finally:
      if not clean:  # also after an interrupt
        self.close()

  def _check_works(self) -> None:
    honest = {"program": "def f(): return 1", "function": "f", "calls": [["l"]]}
    job = {"mode": "call", **honest, "limits": dataclasses.asdict(Limits())}
    with contextlib.suppress(_Died):
      ended = self._run_once([json.dumps(job).encode()], Limits(), 1 << 10)
      if not ended.reason and [f.payload for f in ended.frames] == [b"1"]:
        return
    raise Failed("the jail ends with every program; see levels.probe()")


class _Process:
  """The zygote's process, from its start to its end."""

  def __init__(self, interpreter: str, bubblewrap: str | None):
    self.control, theirs = socket.socketpair(
      socket.AF_UNIX, socket.SOCK_SEQPACKET
    )
    boot = _memory(_boot(namespaces=bubblewrap is not None, path=interpreter))
    info, errors = _memory(b""), _memory(b"")
    run = [
      interpreter,
      "-s",
      "-S",
      "-c",
      _BOOT,
      str(boot),
      str(theirs.fileno()),
    ]
    command = [*_bubblewrap(bubblewrap, interpreter, info), *run]
    as_nobody: dict[str, Any] = {}
    if os.geteuid() == 0:
      as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
      self._popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(boot, info, theirs.fileno()),
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
        **as_nobody,
      )
    except OSError as error:
      self.control.close()
      raise Failed(f"cannot start {command[0]}: {error}") from None
    else:
      theirs.close()
      self._end = weakref.finalize(
        self, _end, os.getpid(), self._popen, None, self.control
      )
      self._await(errors, info if bubblewrap else None)
    finally:
      theirs.close()
      for fd in (boot, info, errors):
        os.close(fd)

  def _await(self, errors: int, info: int | None) -> None:
    """Waits until it is ready."""
    self.control.settimeout(_START_S)
    try:
      ready = self.control.recv(1)
    except OSError:  # late, or gone
      ready = b""
    if ready != inside.READY:
      self.close()
      said = os.pread(errors, 1 << 12, 0).decode("utf-8", "replace").split("\n")
      last = [line for line in said if line.strip()][-1:]
      raise Failed(f"the jail does not start: {' '.join(last) or 'no answer'}")
    self.control.settimeout(None)
    if info is not None:
      pid = json.loads(os.pread(info, 1 << 12, 0))["child-pid"]
      first = os.pidfd_open(pid)
      self._end.detach()
      self._end = weakref.finalize(
        self, _end, os.getpid(), self._popen, first, self.control
      )

  def send(self, texts: Sequence[bytes]) -> int:
    """Starts a job; the end of the pipe with its results."""
    results, theirs = os.pipe()
    files = [_memory(text) for text in texts]
    try:
      fds = [files[0], theirs, *files[1:]]
      socket.send_fds(self.control, [inside.JOB], fds)
    except OSError:
      os.close(results)
      raise _Died from None
    finally:
      for fd in (theirs, *files):
        os.close(fd)
    return results

  def close(self) -> None:
    """Kills it and waits for it; nothing is left, no zombie either."""
    self._end()


def _end(
  owner: int, popen: subprocess.Popen, first: int | None, control: socket.socket
) -> None:
  control.close()
  if os.getpid() != owner:  # a fork of ours has no business with it
    return
  # With namespaces their first process is killed, and with it all the others,
  # and bubblewrap, its parent, waits for it. Killed itself, it would leave it
  # to the first process of this container, which may wait for nobody. Without,
  # the zygote is asked to kill and wait.
  if first is not None:
    with contextlib.suppress(ProcessLookupError):
      signal.pidfd_send_signal(first, signal.SIGKILL)
    os.close(first)
  else:
    popen.terminate()
  try:
    popen.wait(_END_S)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _boot(*, namespaces: bool, path: str) -> bytes:
  options = {"namespaces": namespaces, "readable": [*_READABLE, *_own(path)]}
  sources = {module.__name__: inspect.getsource(module) for module in _MODULES}
  boot = {"modules": sources, "main": inside.__name__, "options": options}
  return json.dumps(boot).encode()


def _own(interpreter: str) -> list[str]:
  """/usr/local/lib and the file itself, of /usr/local/bin/python3.11."""
  file = os.path.realpath(interpreter)
  return [os.path.join(os.path.dirname(os.path.dirname(file)), "lib"), file]


def _bubblewrap(path: str | None, interpreter: str, info: int) -> list[str]:
  """The command that puts namespaces around what follows it."""
  if path is None:
    return []
  command = [path, "--unshare-all", "--die-with-parent", "--new-session"]
  command += ["--as-pid-1", "--info-fd", str(info), "--hostname", "box"]
  # The zygote mounts /tmp, with a limit of files that bwrap cannot give, and
  # drops this then.
  command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
  command += ["--ro-bind", "/usr", "/usr"]
  for name in ("bin", "lib", "lib64"):
    if os.path.islink(f"/{name}"):
      command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    elif os.path.isdir(f"/{name}"):
      command += ["--ro-bind", f"/{name}", f"/{name}"]
  for own in _own(interpreter):
    if not own.startswith("/usr/"):
      command += ["--ro-bind", own, own]
  # No --proc and no --dev: its /dev/shm would be one more place to write.
  command += ["--dir", "/tmp", "--dir", "/dev"]
  for device in ("/dev/null", "/dev/urandom"):
    command += ["--dev-bind", device, device]
  return [*command, "--remount-ro", "/", "--chdir", "/", "--"]


def _memory(data: bytes) -> int:
  """A file in memory, at its start."""
  fd = os.memfd_create("job")
  with open(fd, "wb", closefd=False) as file:
    file.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def _collect(
  control: socket.socket, results: int, wall_s: float, received: int
) -> Ended:
  """Reads results until the job ended, is late or says too much."""
  deadline = time.monotonic() + wall_s
  data = bytearray()
  status = None
  poll = select.poll()
  poll.register(results, select.POLLIN)
  poll.register(control, select.POLLIN)
  waiting = {results, control.fileno()}
  reason = ""
  while waiting and not reason:
    left = deadline - time.monotonic()
    ready = dict(poll.poll(left * 1e3)) if left > 0 else {}
    if not ready:
      reason = "time-out"
    if control.fileno() in ready:
      try:
        packet = control.recv(inside.STATUS.size)
      except ConnectionError:
        packet = b""
      if len(packet) != inside.STATUS.size:
        raise _Died
      (status,) = inside.STATUS.unpack(packet)
      poll.unregister(control)
      waiting.remove(control.fileno())
    if results in ready:
      piece = os.read(results, _PIECE)
      data += piece
      if not piece:
        poll.unregister(results)
        waiting.remove(results)
      if len(data) > received:
        reason = "too much output"
  frames = []
  try:
    frames.extend(_frames(data))
  except ValueError:
    reason = reason or why(status) or "malformed results"
  return Ended(frames, reason or why(status))


def why(status: int | None) -> str:
  """What a wait status says, "" if all went well."""
  if status is None or status == 0:
    return ""
  if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number == signal.SIGSYS:
      return "forbidden system call"
    if number == signal.SIGXCPU:
      return "time-out"
    try:
      return f"killed: {signal.Signals(number).name}"
    except ValueError:
      return f"killed: signal {number}"
  return f"exit status: {os.WEXITSTATUS(status)}"


def _frames(data: bytearray) -> Iterator[Frame]:
  """The frames; a ValueError where there is none, or not the next one."""
  view = memoryview(bytes(data))
  at = expected = 0
  while at < len(view):
    if len(view) - at < inside.FRAME.size:
      raise ValueError
    index, status, first, size, more = inside.FRAME.unpack_from(view, at)
    at += inside.FRAME.size
    if index != inside.BEFORE and index != expected:
      raise ValueError
    if len(view) - at < size + more:
      raise ValueError
    payload, why = view[at : at + size], view[at + size : at + size + more]
    at += size + more
    expected += 1
    yield Frame(index, status, first, bytes(payload), bytes(why))
