"""Restrictions that a process puts on itself, for good.

    isolate(Limits(), readable=["/usr/lib"], writable=["/tmp/mine"])

The inner layer of the jail. It needs no privileges and no other program, so it
works even in containers without namespaces. A process applies it to itself
before it reads untrusted text, and cannot undo it. Four mechanisms:

  limits         memory, CPU seconds, file sizes, descriptors, threads
  capabilities   all dropped, also for programs executed later
  Landlock       only the named files; no TCP, no abstract sockets
  seccomp        only the system calls in syscalls.py: no exec, no sockets, no
                 signals to others, no ptrace. No fork, so that the memory limit
                 of one process bounds the run and nothing outlives it

Landlock does not cover a file's mode, times and owner, so the system calls that
change these are not allowed. stat() is allowed: names and sizes of files can be
probed.

Standard library only, for Python 3.9 and later, because the system's
interpreter may run this file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Sequence

from brorl_jax.verdicts.sandbox import syscalls
from brorl_jax.verdicts.sandbox.protocol import Limits


def isolate(
  limits: Limits,
  *,
  readable: Sequence[str],
  writable: Sequence[str],
  forks: bool = False,
) -> None:
  """Applies all restrictions to this process, for good.

  Args:
    limits: See `Limits`. The host enforces the seconds (here they only bound
      the process) and the sizes of output and results.
    readable: Files and folders, with their contents, that may be read and
      mapped as code. Missing ones are ignored.
    writable: Files and folders that may also be written: files and folders in
      them can be made, changed and removed, but not devices, pipes, sockets or
      links.
    forks: Whether the process may still fork and wait, in order to prepare
      others. Those call a `fork_ban`.

  Raises:
    OSError: A restriction is not available. Others may already apply, so the
      process has to end.
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
      value = min(value, hard)  # a process cannot raise its hard limit
    # At the soft limit of CPU time comes SIGXCPU, which can be ignored.
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
  """The kernel kills this process when the thread that forked it ends."""
  _prctl(_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
  """Orphaned descendants become children of this process."""
  _prctl(_CHILD_SUBREAPER, 1)


def mount_tmpfs(path: str, flags: int, options: str) -> None:
  """Mounts a file system in memory; needs namespaces.

  Raises:
    OSError: The kernel refused.
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
  """Drops all capabilities of this process and of programs it executes.

  Raises:
    OSError: The kernel refused.
  """
  libc = _libc()
  _prctl(_NO_NEW_PRIVS, 1)
  # Without CAP_SETPCAP this fails, but no_new_privs already keeps an executed
  # program from gaining capabilities.
  for capability in range(64):
    libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), *_ZEROS)
  libc.prctl(_CAP_AMBIENT, ctypes.c_ulong(_CLEAR_ALL), *_ZEROS)
  header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
  if libc.capset(header, bytes(24)) != 0:
    raise _error("capset")


# Landlock: bits of rights, and the interface version that added them.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = (
  444,
  445,
  446,
)  # the same on all machines
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
      errno.ENOSYS, "no Landlock; use Linux 5.13 or later with lsm=landlock"
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
    return  # a missing path allows nothing
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
  """Applies only the last restriction: unlisted system calls are refused.

  Raises:
    OSError: The kernel refused, or is not one of `syscalls.MACHINES`.
  """
  install = _prepared(
    syscalls.program(_machine(), forks=forks, threads=threads)
  )
  _prctl(_NO_NEW_PRIVS, 1)
  install()


def fork_ban(*, threads: bool = True) -> Callable[[], None]:
  """Prepares a call for the children of a process with `forks=True`.

  A child that calls it may fork no more and dies with its parent. The filter is
  built beforehand, because a new fork pays for each page that it touches; two
  system calls touch few.
  """
  ban = _prepared(syscalls.fork_ban(_machine(), threads=threads))
  prctl = _libc().prctl
  numbers = ctypes.c_int(_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), *_ZEROS

  def apply() -> None:
    if prctl(*numbers) != 0:
      raise _error("prctl")
    ban()

  return apply


def _machine() -> str:
  bits = 8 * struct.calcsize("P")
  return platform.machine() + ("" if bits == 64 else f" with {bits} bits")


def _prepared(code: Sequence[syscalls.Instruction]) -> Callable[[], None]:
  packed = b"".join(struct.pack("=HBBI", *step) for step in code)
  array = ctypes.create_string_buffer(packed, len(packed))
  # struct sock_fprog: a count, and a pointer where the compiler aligns it.
  header = struct.pack("@HP", len(code), ctypes.addressof(array))
  number = syscalls.MACHINES[_machine()].seccomp
  # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC: all threads.
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
  # c_long fills the register; a plain int would set only half of it.
  filled = (ctypes.c_long(a) if type(a) is int else a for a in arguments)
  return _libc().syscall(ctypes.c_long(number), *filled)


def _prctl(option: int, value: int) -> None:
  if _libc().prctl(option, ctypes.c_ulong(value), *_ZEROS) != 0:
    raise _error(f"prctl {option}")


def _error(what: str) -> OSError:
  code = ctypes.get_errno()
  return OSError(code, f"{what}: {os.strerror(code)}")
