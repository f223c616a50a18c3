"""The sandboxed processes of one thread, and how strong their jail is.

    jail.mine().ask("symbolic", answer, reference)
    jail.mine().run({"mode": "call", ...}, limits=Limits())
    level = jail.require(allow_inner=False)   # raises Failed
    level.name                                # stored in config.json

The level of programs is the strongest that stops attempts to break out:

  full    bubblewrap namespaces: no host file but /usr, no network, no other
          process, 96 MB to write. Inside it, the restrictions of
          seccomp_landlock.py apply as well
  inner   these restrictions alone: resource limits, no capabilities, Landlock,
          seccomp. Programs can learn that a file exists and how long it is.
          They cannot write or start threads, so programs with temporary files
          or threads fail. Used only with reward.allow_inner
  none    neither: programs cannot be scored, and a run that needs them stops

A level counts if it has just stopped harmless attempts to fork, to signal, to
open a socket, to read and write outside, and to take too much memory or time.

SECURITY.md says what the jail does not promise. Beside that, about a hundred
system calls remain. A program can read the interpreter's folders, and exceed
its CPU share with threads until its time is up. By their load programs can tell
each other what they know: no expected value, and a verdict only of the asserts
that their `check` has passed. Only Python and its standard library run: no
packages, processes, network, pipes or sockets.
"""

import dataclasses
import errno
import functools
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts.sandbox import codec, library_calls, seccomp_landlock
from brorl_jax.verdicts.sandbox.library_calls import isolation_error
from brorl_jax.verdicts.sandbox.process import Failed
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits
from brorl_jax.verdicts.sandbox.zygote import NOBODY, JobResult, Zygote, as_jail

__all__ = ["Failed", "Jail", "isolation_error", "mine", "run_python"]

_LIMITS = Limits()


class Jail:
  """A worker for library calls and a zygote for programs.

  Each starts when it is first used. One thread uses a jail; any thread may call
  `stop`. `calls` is a module with the table of library calls, `limits` are the
  default limits of programs. `allow_inner` lets programs run without
  namespaces; the list above has what these prevent.
  """

  def __init__(
    self,
    calls: str = library_calls.__name__,
    *,
    allow_inner: bool = False,
    limits: Limits = _LIMITS,
  ):
    self.limits, self._allow_inner = limits, allow_inner
    self._worker = library_calls.LibraryWorker(calls)
    self._zygote: Zygote | None = None
    self._stopped = False

  @property
  def failures(self) -> int:
    """How many processes, of either kind, ended that should not have."""
    of_zygote = self._zygote.failures if self._zygote else 0
    return self._worker.failures + of_zygote

  def ask(self, call: str, *args: Any, timeout: float = 3.0) -> Any:
    """The result of a library call; see LibraryWorker.ask."""
    return self._worker.ask(call, *args, timeout=timeout)

  def run(self, job: Mapping[str, Any], **how: Any) -> JobResult:
    """Runs a program, or raises Failed; arguments as of Zygote.run."""
    if self._stopped:
      raise Failed("stopped")
    if self._zygote is None:
      self._zygote = require(allow_inner=self._allow_inner).zygote()
    return self._zygote.run(job, **how)

  def stop(self) -> None:
    """Ends the work in progress and refuses more; callable from any thread."""
    self._stopped = True
    self._worker.stop()
    if self._zygote is not None:
      self._zygote.stop()

  def close(self) -> None:
    """Ends the processes; the next use starts new ones."""
    self._worker.close()
    if self._zygote is not None:
      self._zygote.close()


_local = threading.local()


def mine() -> Jail:
  """The jail of this thread; its processes end with the thread."""
  if not hasattr(_local, "jail"):
    _local.jail = Jail()
  return _local.jail


def run_python(program: str, stdin: str = "", *, seconds: float = 5.0) -> str:
  """What a program prints in the jail of this thread, and behind that the error
  that ended it: a tool for an environment.

      run_python("print(6 * 7)") == "42\\n"

  `seconds` are of CPU time. Raises Failed where there is no full sandbox.
  """
  limits = Limits(test_s=seconds, total_s=seconds)
  job = {"mode": "stdio", "program": program, "inputs": [stdin], "together": 1}
  ended = mine().run(job, limits=limits)
  said = [text for frame in ended.frames for text in (frame.payload, frame.why)]
  return b"".join(said).decode(errors="replace") + ended.reason


_SYSTEM_PYTHON = "/usr/bin/python3"
_OLDEST = (3, 9)
_INSTALL = "install it: apt install bubblewrap, or dnf install bubblewrap"
# Settings of a kernel that forbid namespaces with this value. The last, which
# Ubuntu 24.04 has, needs more than its profile bwrap-userns-restrict: that
# denies a job the mount of its /tmp.
_FORBIDS = {
  "user/max_user_namespaces": ("0", "15000"),
  "kernel/unprivileged_userns_clone": ("0", "1"),
  "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
_ALLOW = (
  "a container needs --security-opt seccomp=unconfined and --security-opt"
  " apparmor=unconfined (podman: label=disable); Kubernetes: seccompProfile and"
  " appArmorProfile of type Unconfined"
)
_ONE_USER = (
  "root is this container's only user, and programs need another: podman run"
  " --userns=keep-id, or on the host install uidmap and give your user a range"
  " in /etc/subuid and /etc/subgid"
)


@dataclasses.dataclass(frozen=True)
class Level:
  """A jail that this machine can give."""

  name: str  # "full", "inner" or "none"
  reason: str  # why it is not "full" and what to do, in one line, or ""
  interpreter: str  # path of the Python that runs the programs
  version: str  # version of that Python
  landlock_abi: int  # the kernel's Landlock version, 0 if it has none
  machine: str  # "x86_64" or "aarch64"; others have no table of system calls
  bubblewrap: str | None  # path of bwrap, or None

  def zygote(self) -> Zygote:
    return Zygote(self.interpreter, bubblewrap=self.bubblewrap)


_INNER = (
  "programs can then see which files exist and how long they are, and those"
  " that start threads or write temporary files fail"
)


def require(*, allow_inner: bool) -> Level:
  """The jail of this machine, measured once per process; Failed if too weak."""
  level = measure()
  if level.name == "none":
    raise Failed(f"this machine cannot sandbox programs: {level.reason}")
  if level.name == "inner" and not allow_inner:
    raise Failed(
      f"this machine has no full sandbox for programs: {level.reason}. Or"
      f" accept the weaker one with --config.reward.allow_inner=True: {_INNER}"
    )
  return level


def describe(level: Level) -> str:
  if level.name == "full":
    return f"programs run in a full sandbox with Python {level.version}"
  return (
    f"programs run in the weaker sandbox with Python {level.version}:"
    f" {_INNER.replace(' then', '')} ({level.reason})"
  )


@functools.lru_cache(maxsize=1)
def measure() -> Level:
  """Measures the level of this machine; takes a second, once per process."""
  abi, machine = seccomp_landlock.landlock_abi(), platform.machine()
  nothing = Level("none", _refusal(abi, machine), "", "", abi, machine, None)
  if nothing.reason:
    return nothing
  interpreter, version = _interpreter()
  if not interpreter:
    return dataclasses.replace(nothing, reason=version)
  why = f"bwrap is not installed; {_INSTALL}"
  inner = Level("inner", why, interpreter, version, abi, machine, None)
  if bwrap := shutil.which("bwrap"):
    full = dataclasses.replace(inner, name="full", reason="", bubblewrap=bwrap)
    if not (fault := _try_out(full)):
      return full
    why = f"bwrap: {fault}; {_remedy()}"
    inner = dataclasses.replace(inner, reason=why)
  if fault := _try_out(inner):
    why = f"{why}; and without bwrap: {fault}"
    return dataclasses.replace(nothing, reason=why)
  return inner


def _remedy() -> str:
  """What lets bwrap make namespaces here."""
  found = []
  for name, (bad, good) in _FORBIDS.items():
    path = pathlib.Path("/proc/sys", name)
    if path.exists() and path.read_text().strip() == bad:
      found.append(f"on the host sysctl -w {name.replace('/', '.')}={good}")
  return "; ".join(["allow user namespaces", *found, _ALLOW])


def _refusal(abi: int, machine: str) -> str:
  if platform.system() != "Linux":
    return f"it needs Linux, not {platform.system()}; leave domain 'code' out"
  try:
    seccomp_landlock.program(machine)
  except OSError as error:
    return f"{error.strerror}; leave domain 'code' out"
  must = (
    "use Linux 5.13 or later with lsm=landlock, and a container that allows"
  )
  return f"the kernel has no Landlock; {must} it" if abi < 1 else ""


def _interpreter() -> tuple[str, str]:
  """Path and version of a Python for the jail, or "" and the reason."""
  # This interpreter if the user of the jail can read it, else the system's.
  own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
  for path in (own, _SYSTEM_PYTHON):
    try:
      ask = [path, "-s", "-S", "-c", "import sys; print(*sys.version_info[:3])"]
      how = {"capture_output": True, "env": {}, "cwd": "/", **as_jail()}
      done = subprocess.run(ask, timeout=20, **how)
      version = tuple(map(int, done.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
      # Of setgroups or setuid: a user may be unable to read a file (EACCES).
      if getattr(error, "errno", 0) in (errno.EPERM, errno.EINVAL):
        return "", _ONE_USER
      continue
    if done.returncode == 0 and version >= _OLDEST:
      return path, ".".join(map(str, version))
  who = f"user {NOBODY}" if os.geteuid() == 0 else "this user"
  return "", (
    f"{who} can read neither {own} nor {_SYSTEM_PYTHON} of version"
    f" {'.'.join(map(str, _OLDEST))} or later; install one: apt install python3"
  )


# Harmless if not stopped: a fork ends at once, and 4 GiB are never touched.
_ATTEMPTS = """
import contextlib, mmap, os, socket
def attempts(secret, folder, memory):
  def fork():
    if os.fork() == 0:
      os._exit(0)
  tried = {
    "fork": fork,
    "execute": lambda: os.execv("/usr/bin/true", ["true"]),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "read outside": lambda: open(secret).read(),
    "write outside": lambda: open(folder + "/new", "w").write("x"),
    "change outside": lambda: os.chmod(folder, 0o700),
    "take too much memory": lambda: mmap.mmap(-1, memory),
  }
  done = []
  for name, attempt in tried.items():
    with contextlib.suppress(OSError, MemoryError):
      attempt()
      done.append(name)
  return done
def honest(a, b):
  return sorted(a + b)
def endless():
  while True:
    pass
"""


def _try_out(level: Level) -> str:
  """What a jail of this level fails to stop, or ""."""
  zygote = level.zygote()
  try:
    if fault := _attempts(zygote):
      return fault
    got = _call(zygote, "honest", [[3, 1], [2]], Limits())
    if got != [1, 2, 3]:
      return f"an honest program failed: {got}"
    got = _call(zygote, "endless", [], Limits(test_s=0.3))
    endless = f"an endless program was not ended: {got}"
    return "" if got == "time-out" else endless
  except Failed as error:
    return str(error)
  finally:
    zygote.close()


def _attempts(zygote: Zygote) -> str:
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o777)  # only the jail may stop the attempts
    secret = os.path.join(folder, "secret")
    with open(secret, "w") as file:
      file.write("secret")
    os.chmod(secret, 0o644)
    args = [secret, folder, 4 * Limits().memory]
    got = _call(zygote, "attempts", args, Limits())
  if got == []:
    return ""
  if isinstance(got, list):
    return f"a program could {', '.join(map(str, got))}"
  return f"the self-test failed: {got}"


def _call(zygote: Zygote, function: str, args: list, limits: Limits) -> Any:
  """The result of a function in `_ATTEMPTS`, or a text with the reason."""
  job = {"mode": "call", "program": _ATTEMPTS, "function": function}
  job |= {"calls": [codec.encode(args)]}
  ended = zygote.run(job, limits=limits)
  if ended.reason or len(ended.frames) != 1:
    return ended.reason or "no result"
  frame = ended.frames[0]
  if frame.why:
    return frame.why.decode("utf-8", "replace")
  return codec.decode(codec.loads(frame.payload))
