"""Restrictions that a process puts on itself, for good.

    isolate(Limits(), readable=["/usr/lib"], writable=["/tmp/mine"])

The inner layer of the jail. It needs no privileges and no other program, so it
works even in containers without namespaces. A process applies it to itself
before it reads untrusted text, and cannot undo it. Four mechanisms:

  limits         memory, CPU seconds, file sizes, descriptors, threads
  capabilities   all dropped, also for programs executed later
  Landlock       only the named files; no TCP, no abstract sockets
  seccomp        only the system calls in the tables below: no exec, no
                 sockets, no signals to others, no ptrace. No fork, so that the
                 memory limit of one process bounds the run and nothing outlives
                 it

Landlock does not cover a file's mode, times and owner, so the system calls that
change these are not allowed. stat() is: names and sizes of files can be probed.

Standard library only, from Python 3.9: the system's interpreter may run this.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of one program."""

  # CPU seconds of one test, over all its threads. It may also sleep for this
  # long. The host counts them (process.py) and kills the program.
  test_s: float = 5.0
  total_s: float = 30.0  # the same for all its tests together
  memory: int = 1 << 30  # bytes of one process's address space; 64 MiB of stack
  file_bytes: int = 8 << 20  # of one file
  output_bytes: int = 1 << 20  # of standard output; more is an error
  result_bytes: int = 8 << 20  # of the results; more is an error
  open_files: int = 128  # descriptors of one process
  # Threads of all processes of the jail's user, which in a user namespace are
  # those of one jail. Does not limit root. 0: no threads.
  threads: int = 64


def isolate(
  limits: Limits,
  *,
  readable: Sequence[str],
  writable: Sequence[str],
  forks: bool = False,
) -> None:
  """Applies all restrictions to this process, for good.

  What is `readable`, a file or a folder with its contents, may be read and
  mapped as code; missing paths are ignored. What is `writable` may also be
  written: files and folders in it can be made, changed and removed, but not
  devices, pipes, sockets or links. With `forks` the process may still fork and
  wait, in order to prepare others, which call a `fork_ban`.

  The host enforces the seconds (here they only bound the process) and the sizes
  of output and results. Raises OSError if a restriction is not available.
  Others may already apply, so the process has to end.
  """
  _restrict_files(readable, writable)
  _set_limits(limits)
  drop_capabilities()
  calls_filter(forks, limits.threads > 0)()


def _set_limits(limits: Limits) -> None:
  wanted = {
    **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "RTPRIO", "NICE"), 0),
    **{"AS": limits.memory, "DATA": limits.memory, "STACK": 64 << 20},
    **{"FSIZE": limits.file_bytes, "NOFILE": limits.open_files},
    **{"CPU": math.ceil(limits.total_s) + 1, "SIGPENDING": 16},
    **({"NPROC": limits.threads} if limits.threads else {}),
  }
  for name, value in wanted.items():
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
      value = min(value, hard)  # a process cannot raise its hard limit
    # At the soft limit of CPU time comes SIGXCPU, which can be ignored.
    later = which == resource.RLIMIT_CPU and hard != value
    resource.setrlimit(which, (value, value + later))


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


@contextlib.contextmanager
def new_namespaces(path: str, flags: int, options: str) -> Iterator[None]:
  """The next child is process 1 and has an empty folder in memory; numbers of
  files count from the start. Needs namespaces.
  """
  what = b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(flags)
  _require(_libc().mount(*what, options.encode()), f"mount {path}")
  _require(_libc().unshare(_CLONE_NEWPID), "unshare")
  yield
  # An error ends the interpreter, and what is mounted with it.
  ours = os.pidfd_open(os.getpid())
  failed = _libc().setns(ours, _CLONE_NEWPID)
  os.close(ours)
  _require(failed, "setns")
  _require(_libc().umount2(path.encode(), 0), f"unmount {path}")


def drop_capabilities() -> None:
  """Drops all capabilities of this process and of programs it executes."""
  libc = _libc()
  _prctl(_NO_NEW_PRIVS, 1)
  # Without CAP_SETPCAP this fails, but no_new_privs already keeps an executed
  # program from gaining capabilities.
  for capability in range(64):
    libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), *_ZEROS)
  libc.prctl(_CAP_AMBIENT, ctypes.c_ulong(_CLEAR_ALL), *_ZEROS)
  header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
  _require(libc.capset(header, bytes(24)), "capset")


# Landlock: calls, the same on all machines; bits of rights, and the interface
# version that added them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
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
  if (abi := landlock_abi()) < 1:
    why = "no Landlock; use Linux 5.13 or later with lsm=landlock"
    raise OSError(errno.ENOSYS, why)
  rights = (1 << max(n for v, n in _RIGHTS.items() if v <= abi)) - 1
  handled = struct.pack("=Q", rights)
  if abi >= 4:
    handled += struct.pack("=Q", 0b11)  # TCP: bind and connect
  if abi >= 6:
    handled += struct.pack("=Q", 0b11)  # abstract sockets and signals
  ruleset = _syscall(_CREATE_RULESET, handled, len(handled), 0)
  _require(ruleset < 0, "landlock_create_ruleset")
  for paths, access in ((readable, _READ), (writable, _WRITE)):
    for path in paths:
      _add_rule(ruleset, path, access & rights)
  _prctl(_NO_NEW_PRIVS, 1)
  _require(_syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
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
    failed = _syscall(_ADD_RULE, ruleset, 1, rule, 0)
    _require(failed, f"landlock_add_rule {path}")
  finally:
    os.close(fd)


@functools.lru_cache(None)
def calls_filter(forks: bool, threads: bool) -> Callable[[], None]:
  """Installs `program`; who calls it before a fork spares the child .8 ms."""
  return _prepared(program(_machine(), forks=forks, threads=threads))


def fork_ban(*, threads: bool = True) -> Callable[[], None]:
  """Prepares a call for the children of a process with `forks=True`.

  A child that calls it may fork no more and dies with its parent. The filter is
  built beforehand, because a new fork pays for each page that it touches; two
  system calls touch few.
  """
  ban = _prepared(fork_filter(_machine(), threads=threads))
  prctl = _libc().prctl
  numbers = ctypes.c_int(_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), *_ZEROS

  def apply() -> None:
    _require(prctl(*numbers), "prctl")
    ban()

  return apply


def _machine() -> str:
  bits = 8 * struct.calcsize("P")
  return platform.machine() + ("" if bits == 64 else f" with {bits} bits")


def _prepared(code: Sequence[Instruction]) -> Callable[[], None]:
  packed = b"".join(struct.pack("=HBBI", *step) for step in code)
  array = ctypes.create_string_buffer(packed, len(packed))
  # struct sock_fprog: a count, and a pointer where the compiler aligns it.
  header = struct.pack("@HP", len(code), ctypes.addressof(array))
  number = MACHINES[_machine()].seccomp
  # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC: all threads.
  numbers = [ctypes.c_long(n) for n in (number, 1, 1)]
  syscall = _libc().syscall

  def install(_keep: object = array) -> None:  # the header points to it
    _require(syscall(*numbers, header), "seccomp")

  return install


# The filter, for x86-64 and aarch64: about a hundred calls that interpreters
# and honest programs make are allowed. A few dozen that only attacks make kill
# the process. All others fail with an error that programs handle.

# Calls as name:x86-64:aarch64; "-" if aarch64 lacks the call, as a later one
# replaced it. Numbers from asm/unistd_64.h and asm-generic/unistd.h of Linux.


class Architecture(NamedTuple):
  audit: int  # AUDIT_ARCH of elf machine, 64 bits, little-endian
  column: int  # in the tables
  seccomp: int  # number of the seccomp call


MACHINES = {
  "x86_64": Architecture(0xC000003E, 0, 317),
  "aarch64": Architecture(0xC00000B7, 1, 277),
}

_ALLOWED = """
  read:0:63 write:1:64 close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:-
  lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214
  rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67
  pwrite64:18:68 readv:19:65 writev:20:66 access:21:- select:23:-
  sched_yield:24:124 mremap:25:216 madvise:28:233 dup:32:23 dup2:33:-
  pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103
  getpid:39:172 sendfile:40:71 exit:60:93
  uname:63:160 fsync:74:82 fdatasync:75:83 ftruncate:77:46 getdents:78:-
  getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:-
  unlink:87:- readlink:89:- umask:95:166 gettimeofday:96:169 getrlimit:97:163
  getrusage:98:165 times:100:153 getuid:102:174 getgid:104:176
  geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:-
  getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155
  getsid:124:156 sigaltstack:131:132 sched_getparam:143:121
  sched_getscheduler:145:120 arch_prctl:158:- gettid:186:178 time:201:-
  sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61
  set_tid_address:218:96 restart_syscall:219:128 fadvise64:221:223
  clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
  exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 mkdirat:258:34
  newfstatat:262:79 unlinkat:263:35 renameat:264:38 readlinkat:267:78
  faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
  epoll_pwait:281:22 eventfd2:290:19 epoll_create1:291:20 dup3:292:24
  preadv:295:69 pwritev:296:70 getcpu:309:168 renameat2:316:276
  getrandom:318:278 membarrier:324:283 statx:332:291 rseq:334:293
  close_range:436:436 faccessat2:439:439
"""

# Calls that only attacks make: SIGSYS ends the process at once.
_KILLED = """
  ptrace:101:117 personality:135:92 pivot_root:155:41 chroot:161:51
  mount:165:40 umount2:166:39 swapon:167:224 swapoff:168:225 reboot:169:142
  init_module:175:105 delete_module:176:106 kexec_load:246:104
  add_key:248:217 request_key:249:218 keyctl:250:219 unshare:272:97
  move_pages:279:239 perf_event_open:298:241 open_by_handle_at:304:265
  setns:308:268 process_vm_readv:310:270 process_vm_writev:311:271
  finit_module:313:273 kexec_file_load:320:294 bpf:321:280
  userfaultfd:323:282 io_uring_setup:425:425 open_tree:428:428
  move_mount:429:429 fsopen:430:430 fsmount:432:432 pidfd_getfd:438:438
  mount_setattr:442:442
"""

# Allowed with some arguments; see _rules.
_WEIGHED = """
  ioctl:16:29 clone:56:220 fcntl:72:25
  futex:202:98 openat:257:56 prlimit64:302:261 clone3:435:435
"""

# Also allowed in a process that prepares others. A program may make no pipes:
# the kernel numbers them, and by many of them it would speak to other jails.
_FORKING = """
  wait4:61:260 prctl:157:167 pipe2:293:59 waitid:247:95 seccomp:317:277
  memfd_create:319:279
"""


def numbers(table: str, machine: str) -> dict[str, int]:
  """The numbers of a table's calls on a machine."""
  column = MACHINES[machine].column
  rows = (row.split(":") for row in table.split())
  return {n: int(of[column]) for n, *of in rows if of[column] != "-"}


class Instruction(NamedTuple):
  """An instruction of classic BPF: struct sock_filter."""

  code: int
  jt: int  # instructions to skip if true
  jf: int
  k: int


_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_CLONE_THREAD = 0x10000
# Any new namespace, and one of processes.
_CLONE_NEW, _CLONE_NEWPID = 0x7E020000, 0x20000000
_O_ACCMODE, _O_TRUNC = 0x3, 0x200
# fcntl: duplicate, flags; not signal owners or pipe sizes. Locks, by which two
# jails could talk, succeed and do nothing: no other process could hold one.
_FCNTL, _LOCKS = (0, 1, 2, 3, 4, 1030, 1032), (6, 7, 37, 38)
# futex: among the threads of a process, or to wait for one. A file of the host
# in memory could otherwise wake other jails.
_PRIVATE, _COMMAND, _WAITS = 0x80, 0x7F, (0, 9)
_FIOCLEX, _FIONCLEX, _FIONBIO = 0x5451, 0x5450, 0x5421


def program(
  machine: str, *, forks: bool = False, threads: bool = True
) -> list[Instruction]:
  """The filter of system calls; OSError if the machine is not in `MACHINES`."""
  if machine not in MACHINES:
    known = " and ".join(MACHINES)
    why = f"no system call table for {machine!r}, only for {known}"
    raise OSError(errno.ENOSYS, why)
  ours = Instruction(_EQUAL, 1, 0, MACHINES[machine].audit)
  code = [_load(4), ours, _answer(KILL)]  # the architecture
  code += [_load(0)]  # the call number
  if machine == "x86_64":  # x32: same architecture, other numbers
    code += [Instruction(_AT_LEAST, 0, 1, 0x40000000), _answer(KILL)]
  for rule, body in _rules(machine, forks, threads):
    code += [Instruction(_EQUAL, 0, len(body), rule), *body]
  return [*code, _REFUSE]


def fork_filter(machine: str, *, threads: bool = True) -> list[Instruction]:
  """A second filter that forbids forks, for processes with `forks=True`.

  The kernel runs every filter and obeys the strictest. This one is short,
  because on installing a filter the kernel checks it once per system call: for
  the whole list this takes longer than a fork.
  """
  clone = numbers(_WEIGHED, machine)["clone"]
  code = [_load(0)]
  for number in numbers(_FORKING, machine).values():
    code += _unless(_EQUAL, number)
  thread = Instruction(_ANY_BIT, 1, 0, _CLONE_THREAD if threads else 0)
  code += [Instruction(_EQUAL, 0, 3, clone), _load_argument(0)]
  return [*code, thread, _REFUSE, _PASS]


def _rules(
  machine: str, forks: bool, threads: bool
) -> list[tuple[int, list[Instruction]]]:
  """Pairs of a call's number and the instructions that decide on it."""
  allowed, killed, weighed = (
    numbers(table, machine) for table in (_ALLOWED, _KILLED, _WEIGHED)
  )
  allowed |= numbers(_FORKING, machine) if forks else {}
  thread = Instruction(_ANY_BIT, 0, 1, _CLONE_THREAD if threads else 0)
  clone = [_load_argument(0), *_unless(_ANY_BIT, _CLONE_NEW)]
  clone += [_PASS] if forks else [thread, _PASS, _REFUSE]
  zero = Instruction(_EQUAL, 1, 0, 0), _REFUSE
  bodies = {
    "clone": clone,
    # Its flags lie in memory, which a filter cannot read; libc then uses clone.
    "clone3": [_answer(ERRNO | errno.ENOSYS)],
    # Before version 3, Landlock allows truncating a file that may be read.
    "openat": [
      _load_argument(2),
      Instruction(_AND, 0, 0, _O_ACCMODE | _O_TRUNC),
      *_unless(_EQUAL, _O_TRUNC | os.O_RDONLY),
      _PASS,
    ],
    "fcntl": [
      _load_argument(1),
      *_equal(_LOCKS, ERRNO),  # error 0
      *_equal(_FCNTL, ALLOW),
      _REFUSE,
    ],
    "futex": [
      _load_argument(1),
      *(Instruction(_ANY_BIT, 0, 1, _PRIVATE), _PASS),
      *(Instruction(_AND, 0, 0, _COMMAND), *_equal(_WAITS, ALLOW)),
      _REFUSE,
    ],
    "ioctl": [
      _load_argument(1),
      *_equal((_FIOCLEX, _FIONCLEX, _FIONBIO), ALLOW),
      _answer(ERRNO | errno.ENOTTY),
    ],
    "prlimit64": [  # no new limits: a null pointer, in both of its halves
      *(_load_argument(2), *zero),
      *(_load_argument(2, high=True), *zero),
      _PASS,
    ],
  }
  return [
    *((number, [_PASS]) for number in allowed.values()),
    *((number, [_answer(KILL)]) for number in killed.values()),
    *((weighed[name], body) for name, body in bodies.items()),
  ]


def _load(offset: int) -> Instruction:
  """Loads from struct seccomp_data: number, architecture, arguments."""
  return Instruction(_LOAD, 0, 0, offset)


def _load_argument(index: int, *, high: bool = False) -> Instruction:
  """Loads 32 of its 64 bits; the kernel reads no more of an int."""
  return _load(16 + 8 * index + 4 * high)


def _answer(value: int) -> Instruction:
  return Instruction(_RETURN, 0, 0, value)


_PASS, _REFUSE = _answer(ALLOW), _answer(ERRNO | errno.EPERM)


def _unless(test: int, value: int) -> list[Instruction]:
  """Refuses the call if the test on the loaded value is true."""
  return [Instruction(test, 0, 1, value), _REFUSE]


def _equal(values: Iterable[int], answer: int) -> Iterator[Instruction]:
  for value in values:
    yield Instruction(_EQUAL, 0, 1, value)
    yield _answer(answer)


_ZEROS = (ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


@functools.lru_cache(None)
def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
  # c_long fills the register; a plain int would set only half of it.
  filled = (ctypes.c_long(a) if type(a) is int else a for a in arguments)
  return _libc().syscall(ctypes.c_long(number), *filled)


def _prctl(option: int, value: int) -> None:
  failed = _libc().prctl(option, ctypes.c_ulong(value), *_ZEROS)
  _require(failed, f"prctl {option}")


def _require(failed: int, what: str) -> None:
  """Raises OSError with the number of the last error, if a call failed."""
  if failed:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
