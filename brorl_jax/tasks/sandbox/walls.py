"""What a process may not do any more, once it has raised these walls.

    raise_walls(Limits(), readable=["/usr/lib"], writable=["/tmp/mine"])

The inner layer of the jail. It needs no privilege and no program, so it stands
even where a container forbids namespaces; a process raises it around itself,
before it meets the text it does not trust, and cannot take it down. Four walls:

  limits         memory, CPU seconds, file sizes, descriptors, threads
  capabilities   all dropped; what is executed later could not gain any
  Landlock       no file but those named; no TCP, no abstract socket
  seccomp        no system call but those in calls.py. No fork, so that the
                 memory limit of the process bounds the run and nothing is left
                 behind; no exec, no socket, no signal to others, no ptrace

Landlock has no right for a file's mode, times or owner, and where the jail runs
as the user who owns the files those are his to change: the calls are missing
from the list. stat() is in it, so names and sizes of files can be probed.

Standard library only, for Python 3.9 and later: the system's interpreter reads
this file too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import math
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Sequence

from brorl_jax.tasks.sandbox import calls


@dataclasses.dataclass(frozen=True)
class Limits:
  """How much one program may use.

  Attributes:
    test_s: CPU-seconds of one test, of all its threads; it may sleep for as
      long. Who started it counts them, see usage.py, and kills it.
    total_s: The same of all its tests together.
    memory: Bytes of addresses in one process, 64 MiB of stack among them.
    file_bytes: Bytes of one file.
    output_bytes: Bytes of standard output that are read; the rest is an error.
    result_bytes: Bytes of results that are read; the rest is an error.
    open_files: Descriptors of one process.
    threads: Of all processes of the jail's user: in a user namespace those of
      one jail. No limit for root. 0: it can start none.
  """

  test_s: float = 5.0
  total_s: float = 30.0
  memory: int = 1 << 30
  file_bytes: int = 8 << 20
  output_bytes: int = 1 << 20
  result_bytes: int = 8 << 20
  open_files: int = 64
  threads: int = 64


def raise_walls(
  limits: Limits,
  *,
  readable: Sequence[str],
  writable: Sequence[str],
  forks: bool = False,
) -> None:
  """Raises all walls around this process, for good.

  Args:
    limits: See `Limits`; the seconds, but for a bound on those of a process,
      and what is read are the business of whoever started it.
    readable: Files and folders with all they hold, to read; also to map as
      code. One that does not exist is left out.
    writable: The same, to read and to write: to make, change and remove files
      and folders, never devices, pipes, sockets or links.
    forks: Whether the process may still fork and wait, for one that prepares
      others; they call a `last_wall`.

  Raises:
    OSError: If one of the walls cannot be had. The others may stand by then:
      a process that was refused has to end.
  """
  _restrict_files(readable, writable)
  _set_limits(limits)
  drop_capabilities()
  forbid_calls(forks=forks, threads=limits.threads > 0)


def _set_limits(limits: Limits) -> None:
  wanted = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: math.ceil(limits.total_s) + 1,
    resource.RLIMIT_AS: limits.memory,
    resource.RLIMIT_DATA: limits.memory,
    resource.RLIMIT_FSIZE: limits.file_bytes,
    resource.RLIMIT_NOFILE: limits.open_files,
    resource.RLIMIT_STACK: 64 << 20,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: 16,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
  }
  if limits.threads:
    wanted[resource.RLIMIT_NPROC] = limits.threads
  for which, value in wanted.items():
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
      value = min(value, hard)  # never above what this process was given
    # Past the soft limit of CPU time comes SIGXCPU, which can be ignored.
    hard = (
      value + 1 if which == resource.RLIMIT_CPU and hard != value else value
    )
    resource.setrlimit(which, (value, hard))


# prctl() and capabilities.

_PDEATHSIG, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_CAPBSET_DROP = 24
_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_CAPABILITY_VERSION = 0x20080522


def die_with_parent() -> None:
  """The kernel kills this process when the thread that made it ends."""
  _prctl(_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
  """Descendants whose parents ended become this process's, to wait for."""
  _prctl(_CHILD_SUBREAPER, 1)


def mount_tmpfs(path: str, flags: int, options: str) -> None:
  """Mounts a file system in memory, where namespaces give us the right to.

  Raises:
    OSError: If the kernel refuses.
  """
  if _libc().mount(
    b"tmpfs",
    path.encode(),
    b"tmpfs",
    ctypes.c_ulong(flags),
    options.encode(),
  ):
    raise _error(f"mount {path}")


def drop_capabilities() -> None:
  """Drops all capabilities, for this process and what it executes.

  Raises:
    OSError: If the kernel refuses.
  """
  libc = _libc()
  _prctl(_NO_NEW_PRIVS, 1)
  # A process without CAP_SETPCAP may not shrink what it could be given on exec;
  # with no_new_privs it is given nothing then.
  for capability in range(64):
    libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), *_ZEROS)
  libc.prctl(_CAP_AMBIENT, ctypes.c_ulong(_CLEAR_ALL), *_ZEROS)
  header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
  if libc.capset(header, bytes(24)) != 0:
    raise _error("capset")


# Landlock: rights by bit, the version of the interface that brought them.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # everywhere
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # version -> number of bits
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_WRITE = (
  (_WRITE_FILE | _READ_FILE | _READ_DIR | _TRUNCATE | _REFER)
  | (_REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG)
)  # fmt: skip


def landlock_abi() -> int:
  """Version of the kernel's Landlock interface, 0 if it has none."""
  if platform.system() != "Linux":
    return 0
  return max(0, _syscall(_CREATE_RULESET, None, 0, 1))


def _restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
  abi = landlock_abi()
  if abi < 1:
    raise OSError(
      errno.ENOSYS, "no Landlock here; it takes Linux 5.13 with lsm=landlock"
    )
  rights = (1 << max(n for v, n in _RIGHTS.items() if v <= abi)) - 1
  handled = struct.pack("=Q", rights)
  if abi >= 4:
    handled += struct.pack("=Q", 0b11)  # TCP: bind and connect
  if abi >= 6:
    handled += struct.pack("=Q", 0b11)  # abstract sockets and signals
  ruleset = _syscall(_CREATE_RULESET, handled, len(handled), 0)
  if ruleset < 0:
    raise _error("landlock_create_ruleset")
  for paths, access in ((readable, _READ), (writable, _WRITE)):
    for path in paths:
      _add_rule(ruleset, path, access & rights)
  _prctl(_NO_NEW_PRIVS, 1)
  if _syscall(_RESTRICT_SELF, ruleset, 0) != 0:
    raise _error("landlock_restrict_self")
  os.close(ruleset)


def _add_rule(ruleset: int, path: str, access: int) -> None:
  try:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
  except OSError:
    return  # nothing there, nothing allowed
  try:
    if not os.path.isdir(path):
      access &= _OF_FILES
    rule = struct.pack("=Qi", access, fd)
    if _syscall(_ADD_RULE, ruleset, 1, rule, 0) != 0:
      raise _error(f"landlock_add_rule {path}")
  finally:
    os.close(fd)


# seccomp.


def forbid_calls(*, forks: bool = False, threads: bool = True) -> None:
  """The last wall alone: system calls that are not listed are refused.

  Args:
    forks: Whether to allow fork and wait.
    threads: Whether to allow threads.

  Raises:
    OSError: If the kernel refuses, or is not one of `calls.MACHINES`.
  """
  install = _prepared(calls.program(_machine(), forks=forks, threads=threads))
  _prctl(_NO_NEW_PRIVS, 1)
  install()


def last_wall(*, threads: bool = True) -> Callable[[], None]:
  """What a process calls that a process with `forks=True` has forked.

  It dies with its parent then, and may fork no more. The call is made ready
  beforehand: a process that was just forked pays for each page it touches, and
  two system calls touch few.
  """
  ban = _prepared(calls.fork_ban(_machine(), threads=threads))
  prctl = _libc().prctl
  numbers = ctypes.c_int(_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), *_ZEROS

  def raise_it() -> None:
    if prctl(*numbers) != 0:
      raise _error("prctl")
    ban()

  return raise_it


def _machine() -> str:
  bits = 8 * struct.calcsize("P")
  return platform.machine() + ("" if bits == 64 else f" with {bits} bits")


def _prepared(code: Sequence[calls.Instruction]) -> Callable[[], None]:
  packed = b"".join(struct.pack("=HBBI", *one) for one in code)
  array = ctypes.create_string_buffer(packed, len(packed))
  # struct sock_fprog: a count, and a pointer where the compiler aligns it.
  header = struct.pack("@HP", len(code), ctypes.addressof(array))
  number = calls.MACHINES[_machine()].seccomp
  # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC: for all threads.
  numbers = [ctypes.c_long(n) for n in (number, 1, 1)]
  syscall = _libc().syscall

  def install(_keep: object = array) -> None:  # the header points to it
    if syscall(*numbers, header) != 0:
      raise _error("seccomp")

  return install


# The C library.

_ZEROS = (ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


@functools.lru_cache(None)
def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
  # Each fills a register, of which a bare int would set only a half.
  filled = (ctypes.c_long(a) if type(a) is int else a for a in arguments)
  return _libc().syscall(ctypes.c_long(number), *filled)


def _prctl(option: int, value: int) -> None:
  if _libc().prctl(option, ctypes.c_ulong(value), *_ZEROS) != 0:
    raise _error(f"prctl {option}")


def _error(what: str) -> OSError:
  code = ctypes.get_errno()
  return OSError(code, f"{what}: {os.strerror(code)}")
