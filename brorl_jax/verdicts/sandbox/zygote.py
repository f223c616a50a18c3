"""Runs programs in the jail, from the host's side.

    zygote = Zygote("/usr/bin/python3", bubblewrap="/usr/bin/bwrap")
    ended = zygote.run({"mode": "call", ...}, limits=Limits())
    zygote.close()

A zygote is an interpreter in the jail (jail_main.py), one for each thread. It
starts in 0.1 s and forks one process per job in a few milliseconds. With
bubblewrap it has new namespaces: only /usr to read, no /proc, two devices and
no network. Without it, only the restrictions that each job puts on itself
apply. If we are root, it runs as the user nobody.

The host kills a zygote, with all its processes, after a job that was late or
sent malformed results, and after 500 jobs. A crash leaves nothing behind, so
the next job uses the same zygote.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.verdicts.sandbox import jail_main, process
from brorl_jax.verdicts.sandbox.process import Failed
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

NOBODY = 65534  # user of the jail if we are root

_START_S = 20.0  # it takes 0.1 s, more on a busy machine
_JOBS = 500
_TIME_OUT = "time-out"
_FLOOD = "too much output"
_MALFORMED = "malformed results"
_FORBIDDEN = "forbidden system call"
# A zygote is not used again after one of these.
_UNCLEAN = (_TIME_OUT, _FLOOD, _MALFORMED, _FORBIDDEN)
_PIECE = 1 << 18  # bytes of one read


class Frame(NamedTuple):
  """One result; see jail_main.py."""

  index: int  # number of the test, or -1 for a failure before the first
  status: int  # wait status of the test
  cpu_s: float  # CPU seconds; the program may have forged them
  payload: bytes  # the encoded value
  why: bytes  # reason of a failure; the program may have forged it


class JobResult(NamedTuple):
  frames: Sequence[Frame]  # its results up to then
  # "" if it completed, else "time-out", "too much output", "malformed results",
  # "forbidden system call", "killed: SIGSEGV" and the like; no test has passed.
  reason: str
  # CPU seconds of all its processes; 0.0 if the host ended it.
  cpu_s: float = 0.0


class Died(Exception):
  """The zygote, or a process of the jail, ended; not the program."""


class Zygote:
  """One warm interpreter in the jail."""

  def __init__(self, interpreter: str, *, bubblewrap: str | None):
    """Starts no process; without `bubblewrap`, process restrictions alone."""
    # The jail's user (nobody if we are root) must be able to read the first.
    self._interpreter, self._bubblewrap = interpreter, bubblewrap
    self._process: process.Process | None = None
    # `failures` counts how often the jail ended or failed, not a program.
    self._jobs = self.failures = 0
    self._stopped = False

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = b"",
    received: int | None = None,
  ) -> JobResult:
    """Runs one job: its "mode" and the fields of that mode; see jail_main.py.

    `tests` is the source of a check's tests; `received` limits the bytes of
    results, by default to `limits.result_bytes`. Raises Failed if there is no
    jail, or it fails for every program.
    """
    if received is None:
      received = limits.result_bytes
    # A jail that breaks is tried once more with a new zygote.
    for _ in range(2):
      if self._stopped:
        raise Failed("stopped")
      try:
        return self._run_once(job, limits, tests, received)
      except Died as error:
        fault = str(error)
      self.failures += not self._stopped
      self.close()
    if fault or self._stopped:
      raise Failed(fault or "stopped")
    # Does the jail end with every program, or only with this one?
    self._check_works()
    return JobResult((), "killed: the jail")

  def stop(self) -> None:
    """Ends the job in progress and refuses further ones; any thread."""
    self._stopped = True
    jail = self._process
    if jail is not None:
      jail.stop()

  def close(self) -> None:
    """Kills the zygote; the next job starts a new one."""
    if self._process is not None:
      self._process.close()
    self._process = None

  def _run_once(
    self, job: Mapping[str, Any], limits: Limits, tests: bytes, received: int
  ) -> JobResult:
    if self._process is None or self._jobs >= _JOBS:
      self.close()
      self._jobs = 0
      self._process = _start_jail(self._interpreter, self._bubblewrap)
    if self._stopped:  # checked after stop() can see the process
      raise Failed("stopped")
    self._jobs += 1
    texts = [json.dumps({**job, "limits": dataclasses.asdict(limits)}).encode()]
    if job["mode"] == "check":
      texts.append(tests)
    clean = False
    results, theirs = os.pipe()
    try:
      _begin(self._process, texts, theirs)
      trusted = job["mode"] != "call"
      ended = _collect(self._process, results, limits, received, trusted)
      clean = ended.reason not in _UNCLEAN
      return ended
    finally:
      os.close(results)
      if not clean:  # also after an interrupt
        self.close()

  def _check_works(self) -> None:
    honest = {"program": "def f(): return 1", "function": "f", "calls": [["l"]]}
    with contextlib.suppress(Died):
      ended = self._run_once({"mode": "call", **honest}, Limits(), b"", 1 << 10)
      if not ended.reason and [f.payload for f in ended.frames] == [b"1"]:
        return
    raise Failed("the jail ends with every program; see jail.measure()")


def _begin(jail: process.Process, texts: Sequence[bytes], answers: int) -> None:
  """Starts a job that reads the texts; closes `answers`."""
  files = [_memory(text) for text in texts]
  try:
    socket.send_fds(jail.life, [jail_main.JOB], [files[0], answers, *files[1:]])
  except OSError:
    raise Died from None
  finally:
    for fd in (answers, *files):
      os.close(fd)


def _collect(
  jail: process.Process,
  results: int,
  limits: Limits,
  received: int,
  trusted: bool,
) -> JobResult:
  """Reads results until the job has ended, is late or sends too much."""
  # Until a job has begun no program runs: a machine that stalls is not late.
  clock = process.JobClock(jail.pid, _START_S, _START_S)
  control, begun = jail.life, jail_main.BEGUN
  data, at, frames = bytearray(), len(begun), list[Frame]()
  status, cpu_s, reason = None, 0.0, ""
  poll = select.poll()
  poll.register(results, select.POLLIN)
  poll.register(control, select.POLLIN)
  waiting = {results, control.fileno()}
  while waiting and not reason:
    ready = dict(poll.poll(clock.wait_s * 1e3))
    if control.fileno() in ready:
      try:
        packet = control.recv(jail_main.STATUS.size)
      except ConnectionError:
        packet = b""
      if len(packet) != jail_main.STATUS.size:
        raise Died
      status, cpu_s = jail_main.STATUS.unpack(packet)
      poll.unregister(control)
      waiting.remove(control.fileno())
    if results in ready:
      piece = os.read(results, _PIECE)
      if not data:
        clock = process.JobClock(jail.pid, limits.test_s, limits.total_s)
      data += piece
      while found := _next_frame(data, at):
        frame, at = found
        frames.append(frame)
        clock.tested()
      if not piece:
        poll.unregister(results)
        waiting.remove(results)
      if len(data) > received:
        reason = _FLOOD
    if waiting and not reason and clock.late():
      reason = _TIME_OUT
  # If trusted, the job's first process does not run the program itself, so that
  # its exit status can be believed.
  broken = trusted and status is not None and status == jail_main.BROKEN << 8
  if broken or not data.startswith(begun):
    raise Died("a process of the jail failed twice in a row")
  good = _expected(frames)
  if len(good) < len(frames) or at < len(data):
    reason = reason or why(status) or _MALFORMED
  if cpu_s > limits.total_s or any(f.cpu_s > limits.test_s for f in good):
    reason = reason or _TIME_OUT
  return JobResult(good, reason or why(status), cpu_s)


def why(status: int | None) -> str:
  """A wait status in words, "" for success."""
  if status is None or status == 0:
    return ""
  if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number == signal.SIGSYS:
      return _FORBIDDEN
    if number == signal.SIGXCPU:
      return _TIME_OUT
    try:
      return f"killed: {signal.Signals(number).name}"
    except ValueError:
      return f"killed: signal {number}"
  return f"exit status: {os.WEXITSTATUS(status)}"


def _next_frame(data: bytearray, at: int) -> tuple[Frame, int] | None:
  """The frame that begins at `at` and its end; None if it is incomplete."""
  begin = at + jail_main.FRAME.size
  if len(data) < begin:
    return None
  index, status, cpu_s, size, more = jail_main.FRAME.unpack_from(data, at)
  middle, end = begin + size, begin + size + more
  if len(data) < end:
    return None
  payload, why = bytes(data[begin:middle]), bytes(data[middle:end])
  return Frame(index, status, cpu_s, payload, why), end


def _expected(frames: Sequence[Frame]) -> list[Frame]:
  """The frames before the first that is out of order."""
  good = lambda pair: pair[1].index in (jail_main.BEFORE, pair[0])
  return [frame for _, frame in itertools.takewhile(good, enumerate(frames))]


# Modules that a jail, which cannot read this package, gets in import order.
_MODULES = ("seccomp_landlock", "codec", "jail_main")
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
_READABLE = (
  "/usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo /lib /lib64".split()
)


def as_jail() -> dict[str, Any]:
  """Popen options for the user of the jail."""
  nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
  return nobody if os.geteuid() == 0 else {}


def _start_jail(interpreter: str, bubblewrap: str | None) -> process.Process:
  """Starts a zygote inside its jail; raises Failed."""
  boot = _memory(_boot(namespaces=bubblewrap is not None, path=interpreter))
  info, errors = _memory(b""), _memory(b"")

  def start(control: socket.socket) -> subprocess.Popen:
    command = [*_bubblewrap(bubblewrap, interpreter, info), interpreter]
    command += ["-s", "-S", "-c", _BOOT, str(boot), str(control.fileno())]
    streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
    how = {"cwd": "/", "env": process.ENVIRONMENT, **as_jail()}
    fds = boot, info, control.fileno()
    return process.popen(command, pass_fds=fds, **streams, **how)

  try:
    zygote = process.Process(start, patience_s=_START_S)
    if bubblewrap:
      # Its pid inside the namespace is another one.
      zygote.pid = json.loads(os.pread(info, 1 << 12, 0))["child-pid"]
    return zygote
  except Failed as error:
    lines = os.pread(errors, 1 << 12, 0).decode("utf-8", "replace").split("\n")
    last = [line for line in lines if line.strip()][-1:]
    raise Failed(f"the jail did not start: {' '.join(last) or error}") from None
  finally:
    for fd in (boot, info, errors):
      os.close(fd)


def _memory(data: bytes) -> int:
  fd = os.memfd_create("job")
  with open(fd, "wb", closefd=False) as file:
    file.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def _boot(*, namespaces: bool, path: str) -> bytes:
  options = {"namespaces": namespaces, "readable": [*_READABLE, *_own(path)]}
  folder = pathlib.Path(__file__).parent
  sources = {
    f"{__package__}.{name}": (folder / f"{name}.py").read_text("utf-8")
    for name in _MODULES
  }
  boot = {"modules": sources, "main": [*sources][-1], "options": options}
  return json.dumps(boot).encode()


def _own(interpreter: str) -> list[str]:
  """For /usr/local/bin/python3.11: /usr/local/lib and the file itself."""
  file = os.path.realpath(interpreter)
  return [os.path.join(os.path.dirname(os.path.dirname(file)), "lib"), file]


def _bubblewrap(path: str | None, interpreter: str, info: int) -> list[str]:
  """The command that starts what follows it in new namespaces."""
  if path is None:
    return []
  command = [path, "--unshare-all", "--die-with-parent", "--new-session"]
  command += ["--as-pid-1", "--info-fd", str(info), "--hostname", "box"]
  # For each job, which drops it, to mount /tmp and to number processes.
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
  # No --proc and no --dev: /dev/shm would be writable.
  command += ["--dir", "/tmp", "--dir", "/dev"]
  for device in ("/dev/null", "/dev/urandom"):
    command += ["--dev-bind", device, device]
  return [*command, "--remount-ro", "/", "--chdir", "/", "--"]
