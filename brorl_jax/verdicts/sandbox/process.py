"""Starts, clones and ends the process of a zygote, and sends it jobs.

jail_main.py runs inside that process. With bubblewrap a zygote for programs has
new namespaces: only /usr to read, no /proc, two devices and no network. Without
it, only the restrictions that each job puts on itself apply. If we are root, it
runs as the user nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from brorl_jax.verdicts.sandbox import protocol

# Environment of every zygote. The trainer's environment may hold secrets.
ENVIRONMENT = {
  "LANG": "C.UTF-8",
  "MALLOC_ARENA_MAX": "2",  # an arena reserves 64 MiB of address space
  "PYTHONDONTWRITEBYTECODE": "1",
  "PYTHONHASHSEED": "0",  # the same program gives the same verdict
  "PYTHONSAFEPATH": "1",
  "PYTHONUTF8": "1",
}
NOBODY = 65534  # user of the jail if we are root

_START_S = 20.0  # it takes 0.1 s, more on a busy machine
# Those of each before itself.
_MODULES = """
  protocol seccomp_landlock codec jail_main
"""

# The jail cannot read this package; it receives the sources of these modules.
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
  "/usr/lib",
  "/usr/lib64",
  "/usr/local/lib",
  "/usr/share/zoneinfo",
  "/lib",
  "/lib64",
)
_END_S = 10.0


class Failed(RuntimeError):
  """The sandbox failed, so there is no verdict on the program."""


class Died(Exception):
  """The zygote ended unexpectedly."""


class Process:
  """A process that ends when its socket closes.

  Attributes:
    control: Socket that carries the orders.
    hello: The first message of the process, with its "pid".
    pid: Process id in our namespace.
    owner: Id of the process that started it.
  """

  def __init__(
    self,
    control: socket.socket,
    popen: subprocess.Popen | None = None,
    *,
    patience_s: float,
  ):
    """Waits until the process is ready.

    Args:
      control: Our end of a `pair`.
      popen: Our child: the process itself or its parent.

    Raises:
      Failed: The process did not become ready.
    """
    self.control, self.owner, self._popen = control, os.getpid(), popen
    pids: list[int] = []
    self._end = weakref.finalize(self, _end, self.owner, popen, control, pids)
    control.settimeout(patience_s)
    try:
      self.hello = json.loads(control.recv(1 << 16))
    except (OSError, ValueError):  # too late, or it ended
      self.close()
      raise Failed("no answer") from None
    control.settimeout(None)
    self.pid: int = self.hello["pid"]
    if popen is None:  # the pid of a child may be that of its namespace
      pids.append(self.pid)

  def alive(self) -> bool:
    """Whether our child runs."""
    return self._popen is not None and self._popen.poll() is None

  def begin(self, texts: Sequence[bytes], answers: int) -> None:
    """Starts a job of a zygote, or raises Died.

    Args:
      texts: The job and the other files that it reads.
      answers: File descriptor for the results; closed here.
    """
    files = [memory(text) for text in texts]
    try:
      fds = [files[0], answers, *files[1:]]
      socket.send_fds(self.control, [protocol.JOB], fds)
    except OSError:
      raise Died from None
    finally:
      for fd in (answers, *files):
        os.close(fd)

  def stop(self) -> None:
    """Asks the process to end with its work; callable from any thread."""
    with contextlib.suppress(OSError):
      self.control.shutdown(socket.SHUT_WR)

  def close(self) -> None:
    """Ends the process and waits for it, so that no zombie remains."""
    self._end()


def pair() -> tuple[socket.socket, socket.socket]:
  """Two ends of a socket that keeps packets whole."""
  linux = sys.platform == "linux"  # macOS has streams alone
  kind = socket.SOCK_SEQPACKET if linux else socket.SOCK_STREAM
  return socket.socketpair(socket.AF_UNIX, kind)


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen:
  """Starts a command in a new session, or raises Failed."""
  try:
    # A new session: only the trainer handles an interrupt of the terminal.
    return subprocess.Popen(
      command, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )
  except OSError as error:
    raise Failed(f"cannot start {command[0]}: {error}") from None


def _end(
  owner: int,
  popen: subprocess.Popen | None,
  control: socket.socket,
  pids: Sequence[int],
) -> None:
  if os.getpid() != owner:  # a fork of ours must not end it
    control.close()
    return
  # When its socket closes, the process kills what it started, waits for it and
  # ends. A zygote of a jail is the first process of its namespaces, which end
  # with it.
  left_s = _END_S
  try:
    control.shutdown(socket.SHUT_WR)
    control.settimeout(_END_S)
    while control.recv(64):
      pass
  except TimeoutError:  # it is stopped
    left_s = 0.0
    for pid in pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
  except OSError:
    pass
  control.close()
  if popen is not None:
    try:
      popen.wait(left_s)
    except subprocess.TimeoutExpired:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
      popen.wait()


def memory(data: bytes) -> int:
  """A file in memory, positioned at its start."""
  fd = os.memfd_create("job")
  with open(fd, "wb", closefd=False) as file:
    file.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def as_jail() -> dict[str, Any]:
  """Popen options for the user of the jail."""
  nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
  return nobody if os.geteuid() == 0 else {}


def start_jail(interpreter: str, bubblewrap: str | None) -> Process:
  """Starts a zygote for programs inside its jail.

  Args:
    interpreter: Path of the Python that runs the programs. The user of the jail
      (nobody if we are root) must be able to read it.
    bubblewrap: Path of bwrap, or None for process restrictions alone.

  Raises:
    Failed: The zygote did not start.
  """
  boot = memory(_boot(namespaces=bubblewrap is not None, path=interpreter))
  info, errors = memory(b""), memory(b"")
  control, theirs = pair()
  command = [*_bubblewrap(bubblewrap, interpreter, info), interpreter]
  command += ["-s", "-S", "-c", _BOOT, str(boot), str(theirs.fileno())]
  try:
    with theirs:
      child = popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(boot, info, theirs.fileno()),
        cwd="/",
        env=ENVIRONMENT,
        **as_jail(),
      )
    zygote = Process(control, child, patience_s=_START_S)
    if bubblewrap:
      # Its pid inside the namespace is another one.
      zygote.pid = json.loads(os.pread(info, 1 << 12, 0))["child-pid"]
    return zygote
  except Failed as error:
    control.close()
    lines = os.pread(errors, 1 << 12, 0).decode("utf-8", "replace").split("\n")
    last = [line for line in lines if line.strip()][-1:]
    raise Failed(f"the jail did not start: {' '.join(last) or error}") from None
  finally:
    for fd in (boot, info, errors):
      os.close(fd)


def _boot(*, namespaces: bool, path: str) -> bytes:
  options = {"namespaces": namespaces, "readable": [*_READABLE, *_own(path)]}
  folder = pathlib.Path(__file__).parent
  sources = {
    f"{__package__}.{name}": (folder / f"{name}.py").read_text("utf-8")
    for name in _MODULES.split()
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
  # The zygote mounts /tmp with a limit on files, which bwrap cannot set. Then
  # it drops this capability.
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
