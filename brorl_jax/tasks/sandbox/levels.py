"""How good a jail this machine can give, found out by trying to break it.

    level = levels.require(allow_inner=False)   # or process.Failed, and why
    level.name                                  # goes into the run record

  full    bubblewrap: no host file but /usr, no network, no other process, 32 MB
          to write; and, inside it, the walls of walls.py
  inner   the walls alone: limits, no capabilities, Landlock, seccomp. Programs
          can find out that a file exists and how long it is, and have no place
          to write and can start no threads, so that those with temporary files
          or threads fail. Used only if it is asked for
  none    neither: no program is judged; a run that needs it must not start

A level is had only if harmless attempts to leave were stopped just now: to
fork, to signal, to open a socket, to read and to write outside, to take too
much memory, too much time.

What the jail does not promise. It stops a program's system calls, not a fault
of the kernel reached through the hundred that are left, nor of the CPU: who
runs programs of a determined attacker puts the machine's own work elsewhere. It
does not keep a program from finding out what it runs on, how fast, and what the
interpreter's folders hold. It has no defence against tests that are weak: a
program may hold the answers to those it can guess. A program may exceed its CPU
share by threads, for as long as its time lasts. Only Python is run, with its
standard library alone: no packages, no processes, no network, no sockets.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from brorl_jax.tasks.sandbox import calls, plain, walls
from brorl_jax.tasks.sandbox.process import Failed
from brorl_jax.tasks.sandbox.programs import NOBODY
from brorl_jax.tasks.sandbox.zygote import Zygote

_SYSTEM_PYTHON = "/usr/bin/python3"
_OLDEST = (3, 9)
_INSTALL = "install it: apt install bubblewrap, or dnf install bubblewrap"
_ALLOW_NAMESPACES = (
  "allow user namespaces: in Docker --security-opt seccomp=unconfined"
  " --security-opt apparmor=unconfined; on Ubuntu 24.04 the AppArmor profile"
  " bwrap-userns-restrict; else sysctl kernel.unprivileged_userns_clone=1 and"
  " user.max_user_namespaces above 0"
)


@dataclasses.dataclass(frozen=True)
class Level:
  """The jail of this machine.

  Attributes:
    name: "full", "inner" or "none".
    reason: Why it is not "full", and what to do about it, in one line; or "".
    interpreter: Path of the Python that runs the programs.
    version: Its version.
    landlock_abi: The kernel's version of Landlock, 0 for none.
    machine: "x86_64", "aarch64" or another, without a table of system calls.
    bubblewrap: Path of bwrap if it is used.
  """

  name: str
  reason: str
  interpreter: str
  version: str
  landlock_abi: int
  machine: str
  bubblewrap: str | None

  def zygote(self) -> Zygote:
    """A jail of this level, for one thread."""
    return Zygote(self.interpreter, bubblewrap=self.bubblewrap)


_INNER = (
  "programs could then find out that files exist and how long they are, and"
  " fail if they start threads or write temporary files"
)


def require(*, allow_inner: bool) -> Level:
  """The level of this machine, found out once per process.

  Args:
    allow_inner: Whether "inner" will do.

  Raises:
    Failed: In one line, if there is none that will.
  """
  level = probe()
  if level.name == "none":
    raise Failed(f"no jail for untrusted code here: {level.reason}")
  if level.name == "inner" and not allow_inner:
    raise Failed(
      f"no full jail for programs here: {level.reason}. Or accept the inner"
      f" walls alone, --config.allow_inner=True: {_INNER}"
    )
  return level


def describe(level: Level) -> str:
  """A line for whoever starts a run."""
  if level.name == "full":
    return f"programs run in a full jail, with Python {level.version}"
  return (
    f"programs run within the inner walls alone, with Python {level.version}:"
    f" {_INNER.replace('could then', 'can')} ({level.reason})"
  )


@functools.lru_cache(maxsize=1)
def probe() -> Level:
  """Tries what this machine can give; a second, once per process."""
  abi, machine = walls.landlock_abi(), platform.machine()
  nothing = Level("none", "", "", "", abi, machine, None)
  refusal = _refusal(abi, machine)
  if refusal:
    return dataclasses.replace(nothing, reason=refusal)
  interpreter, version = _interpreter()
  if not interpreter:
    return dataclasses.replace(nothing, reason=version)
  inner = Level("inner", "", interpreter, version, abi, machine, None)
  bubblewrap = shutil.which("bwrap")
  if bubblewrap:
    full = dataclasses.replace(inner, name="full", bubblewrap=bubblewrap)
    why = _try_out(full)
    if not why:
      return full
    why = f"bwrap: {why}; {_ALLOW_NAMESPACES}"
  else:
    why = f"bwrap is not installed; {_INSTALL}"
  inner = dataclasses.replace(inner, reason=why)
  fault = _try_out(inner)
  if fault:
    return dataclasses.replace(
      nothing, reason=f"{why}; and without bwrap: {fault}"
    )
  return inner


def _refusal(abi: int, machine: str) -> str:
  if platform.system() != "Linux":
    return f"it takes Linux, and this is {platform.system()}; leave code out"
  try:
    calls.program(machine)
  except OSError as error:
    return f"{error.strerror}; leave code out"
  if abi < 1:
    return (
      "the kernel has no Landlock; it takes Linux 5.13 with lsm=landlock, and a"
      " container that does not forbid it"
    )
  return ""


def _as_jail() -> dict[str, Any]:
  """Options of a process with the jail's user."""
  if os.geteuid() != 0:
    return {}
  return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def _interpreter() -> tuple[str, str]:
  """Path and version of the Python to use, or "" and why there is none.

  The run's own if the jail's user can read it, else the system's.
  """
  own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
  for path in (own, _SYSTEM_PYTHON):
    try:
      done = subprocess.run(
        [path, "-s", "-S", "-c", "import sys; print(*sys.version_info[:3])"],
        capture_output=True,
        env={},
        cwd="/",
        timeout=20,
        **_as_jail(),
      )
      version = tuple(map(int, done.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError):
      continue
    if done.returncode == 0 and version >= _OLDEST:
      return path, ".".join(map(str, version))
  who = f"user {NOBODY}" if os.geteuid() == 0 else "this user"
  return "", (
    f"{who} can read neither {own} nor a {_SYSTEM_PYTHON} from"
    f" {'.'.join(map(str, _OLDEST))}; install one: apt install python3"
  )


# Harmless where it is not stopped: a fork ends at once, 4 GiB are not touched.
_ATTEMPTS = """
import mmap, os, socket
def attempts(secret, folder, memory):
  def fork():
    if os.fork() == 0:
      os._exit(0)
  def read():
    with open(secret) as file:
      file.read()
  def write():
    with open(folder + "/new", "w") as file:
      file.write("x")
  def change():
    os.chmod(folder, 0o700)
  tried = {
    "fork": fork,
    "execute": lambda: os.execv("/usr/bin/true", ["true"]),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "read outside": read,
    "write outside": write,
    "change outside": change,
    "take too much memory": lambda: mmap.mmap(-1, memory),
  }
  done = []
  for name, attempt in tried.items():
    try:
      attempt()
      done.append(name)
    except (OSError, MemoryError):
      pass
  return done
def honest(a, b):
  return sorted(a + b)
def endless():
  while True:
    pass
"""


def _try_out(level: Level) -> str:
  """What is wrong with a jail of this level; "" if it holds."""
  zygote = level.zygote()
  try:
    return _attempts(zygote) or _run_honest(zygote) or _run_endless(zygote)
  except Failed as error:
    return str(error)
  finally:
    zygote.close()


def _attempts(zygote: Zygote) -> str:
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o777)  # it is the jail that has to stop them
    secret = os.path.join(folder, "secret")
    with open(secret, "w") as file:
      file.write("secret")
    os.chmod(secret, 0o644)
    args = [secret, folder, 4 * walls.Limits().memory]
    got = _call(zygote, "attempts", args, walls.Limits())
  if got == []:
    return ""
  if isinstance(got, list):
    return f"a program could {', '.join(map(str, got))}"
  return f"the self-test failed: {got}"


def _run_honest(zygote: Zygote) -> str:
  got = _call(zygote, "honest", [[3, 1], [2]], walls.Limits())
  return "" if got == [1, 2, 3] else f"an honest program failed: {got}"


def _run_endless(zygote: Zygote) -> str:
  got = _call(zygote, "endless", [], walls.Limits(test_s=0.3))
  return "" if got == "time-out" else f"an endless program was not ended: {got}"


def _call(
  zygote: Zygote, function: str, args: list[Any], limits: walls.Limits
) -> Any:
  """What a function of `_ATTEMPTS` returns, or a text that says why nothing."""
  job = {
    "mode": "call",
    "program": _ATTEMPTS,
    "function": function,
    "calls": [plain.encode(args)],
  }
  ended = zygote.run(job, limits=limits)
  if ended.reason or len(ended.frames) != 1:
    return ended.reason or "no result"
  frame = ended.frames[0]
  if frame.why:
    return frame.why.decode("utf-8", "replace")
  return plain.decode(plain.loads(frame.payload))
