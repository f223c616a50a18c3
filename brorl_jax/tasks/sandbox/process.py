"""The process of the code jail: how it is started, and how it ends.

With bubblewrap there are new namespaces around it, with /usr and nothing else
to read, no /proc, no devices but two, and no network; without, the walls that
each job raises are all there is. As root we start it as nobody.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from brorl_jax.tasks.sandbox import (
  calls,
  checking,
  inside,
  plain,
  running,
  walls,
)

NOBODY = 65534  # who runs the jail where we are root

_START_S = 20.0  # 0.1 s, on a crowded machine more
_END_S = 10.0
_MODULES = (calls, walls, plain, running, checking, inside)

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


class Died(Exception):
  """The zygote ended on its own."""


class Process:
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
      raise Died from None
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
