"""Walls: the filter is run by an interpreter, the rest in a real process."""

import errno
import json
import os
import pathlib
import sys

import pytest
from launchers import ran

from brorl_jax.verdicts.sandbox import seccomp_landlock
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

MACHINES = sorted(seccomp_landlock.MACHINES)
ALLOW, KILL = seccomp_landlock.ALLOW, seccomp_landlock.KILL
EPERM, ENOSYS, ENOTTY = (
  seccomp_landlock.ERRNO | e for e in (errno.EPERM, errno.ENOSYS, errno.ENOTTY)
)
THREAD = 0x3D0F00  # the flags of pthread_create
FORK = 0x1200011  # of fork: SIGCHLD, and where to store the child's number

# Numbers looked up by hand, apart from the tables: x86-64, aarch64.
NUMBERS = {
  "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "ioctl": (16, 29),
  "fork": (57, None), "vfork": (58, None), "clone": (56, 220),
  "clone3": (435, 435), "execve": (59, 221), "execveat": (322, 281),
  "wait4": (61, 260), "kill": (62, 129), "tkill": (200, 130),
  "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
  "pidfd_send_signal": (424, 424), "socket": (41, 198), "connect": (42, 203),
  "bind": (49, 200), "sendto": (44, 206), "sendmsg": (46, 211),
  "socketpair": (53, 199), "fcntl": (72, 25), "openat": (257, 56),
  "openat2": (437, 437), "prlimit64": (302, 261), "chmod": (90, None),
  "fchmod": (91, 52), "fchmodat": (268, 53), "fchownat": (260, 54),
  "utimensat": (280, 88), "setxattr": (188, 5), "truncate": (76, 45),
  "symlinkat": (266, 36), "linkat": (265, 37), "mknodat": (259, 33),
  "shmget": (29, 194), "memfd_create": (319, 279), "prctl": (157, 167),
  "seccomp": (317, 277), "setuid": (105, 146), "setsid": (112, 157),
  "setpgid": (109, 154), "ptrace": (101, 117), "unshare": (272, 97),
  "mount": (165, 40), "bpf": (321, 280), "io_uring_setup": (425, 425),
  "process_vm_readv": (310, 270), "userfaultfd": (323, 282),
  "open_by_handle_at": (304, 265), "pipe2": (293, 59), "sysinfo": (99, 179),
  "getsockopt": (55, 209),
}  # fmt: skip


def answer(program, number, arguments=(), *, audit):
  """What the filter says: classic BPF over struct seccomp_data."""
  data = {0: number, 4: audit}
  for i, value in enumerate([*arguments, *[0] * (6 - len(arguments))]):
    data[16 + 8 * i] = value & 0xFFFFFFFF
    data[20 + 8 * i] = value >> 32 & 0xFFFFFFFF
  a, at = 0, 0
  while True:
    code, jt, jf, k = program[at]
    at += 1
    if code == 0x06:
      return k
    if code == 0x20:
      a = data[k]
    elif code == 0x54:
      a &= k
    else:
      yes = {0x15: a == k, 0x35: a >= k, 0x45: a & k != 0}[code]
      at += jt if yes else jf


@pytest.fixture(params=MACHINES)
def ask(request):
  """ask("read", 0, 1) -> what the filter of this machine says."""
  machine = request.param
  spec = seccomp_landlock.MACHINES[machine]

  def ask(name, *arguments, forks=False, audit=spec.audit):
    number = NUMBERS[name][spec.column] if isinstance(name, str) else name
    if number is None:
      return EPERM  # there is no such call
    program = seccomp_landlock.program(machine, forks=forks)
    return answer(program, number, arguments, audit=audit)

  return ask


TABLES = [getattr(seccomp_landlock, f"_{name}")
  for name in ("ALLOWED", "KILLED", "WEIGHED", "FORKING")]  # fmt: skip


def test_tables_by_hand():
  for name, (x86, arm) in NUMBERS.items():
    for table in TABLES:
      assert seccomp_landlock.numbers(table, "x86_64").get(name, x86) == x86
      assert seccomp_landlock.numbers(table, "aarch64").get(name, arm) == arm


@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_has_two_meanings(machine):
  found = [list(seccomp_landlock.numbers(t, machine).values()) for t in TABLES]
  assert len(set().union(*found)) == sum(map(len, found))
  assert seccomp_landlock.MACHINES[machine].seccomp in found[3]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_jump_lands_and_every_path_returns(machine):
  for forks in (False, True):
    program = seccomp_landlock.program(machine, forks=forks)
    for at, (code, jt, jf, _) in enumerate(program):
      assert 0 <= jt < 256 and 0 <= jf < 256
      if code in (0x15, 0x35, 0x45):
        assert at + 1 + max(jt, jf) < len(program)
    assert program[-1] == (0x06, 0, 0, EPERM)
    assert len(program) < 4096  # the kernel's limit


@pytest.mark.parametrize("names, what", [
  ("read write mmap", ALLOW),
  (
    """fork vfork execve execveat wait4 kill tkill tgkill rt_sigqueueinfo
      pidfd_send_signal socket connect bind sendmsg openat2 chmod fchmod
      fchmodat fchownat utimensat setxattr truncate symlinkat linkat mknodat
      shmget memfd_create prctl seccomp setuid setsid setpgid""",
    EPERM,
  ),
  (
    """ptrace unshare mount bpf io_uring_setup process_vm_readv userfaultfd
      open_by_handle_at""",
    KILL,
  ),
], ids=["an interpreter runs", "an error", "killed on sight"])  # fmt: skip
def test_calls_whose_arguments_do_not_matter(ask, names, what):
  found = {name: ask(name) for name in names.split()}
  assert found == dict.fromkeys(found, what)


def test_clone_makes_threads_only(ask):
  assert (ask("clone", THREAD), ask("clone", FORK)) == (ALLOW, EPERM)
  assert ask("clone", 0) == EPERM
  assert ask("clone", THREAD | 0x10000000) == EPERM  # CLONE_NEWUSER
  assert ask("clone3", 0, 88) == ENOSYS


def test_a_process_that_prepares_others_may_fork_and_wait_and_no_more(ask):
  for name in ("clone", "wait4", "memfd_create", "prctl", "seccomp"):
    assert ask(name, FORK, forks=True) == ALLOW
  assert ask("clone", FORK | 0x20000000, forks=True) == EPERM  # a namespace
  for name in ("execve", "kill", "socket", "setsid", "setuid"):
    assert ask(name, forks=True) == EPERM
  assert ask("ptrace", forks=True) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_the_ban_on_forks_is_the_difference(machine):
  audit = seccomp_landlock.MACHINES[machine].audit
  before = seccomp_landlock.program(machine, forks=True)
  ban = seccomp_landlock.fork_filter(machine)
  after = seccomp_landlock.program(machine)
  assert len(ban) < 20
  severity = {KILL: 3, EPERM: 2, ENOSYS: 1, ENOTTY: 1, ALLOW: 0}
  for number in range(500):
    for first in (0, 1, FORK, THREAD, THREAD | 0x20000000):
      arguments = (first, 1, 0)
      both = [answer(p, number, arguments, audit=audit) for p in (before, ban)]
      want = answer(after, number, arguments, audit=audit)
      assert max(both, key=severity.__getitem__) == want


def test_arguments_that_matter(ask):
  at_cwd = -100
  assert ask("openat", at_cwd, 1, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
  assert ask("openat", at_cwd, 1, os.O_WRONLY | os.O_TRUNC) == ALLOW
  assert ask("openat", at_cwd, 1, os.O_RDONLY | os.O_TRUNC) == EPERM
  for command in (0, 1, 2, 3, 4, 1030):
    assert ask("fcntl", 5, command) == ALLOW
  for command in (8, 10, 15, 1024, 1026, 1031, 1033):  # owners of signals, ...
    assert ask("fcntl", 5, command) == EPERM
  assert ask("ioctl", 5, 0x5451) == ask("ioctl", 5, 0x5421) == ALLOW
  assert ask("ioctl", 5, 0x5401) == ENOTTY
  assert ask("ioctl", 0, 0x5412) == ENOTTY  # type on a terminal
  assert ask("prlimit64", 0, 7, 0, 4096) == ALLOW
  assert ask("prlimit64", 0, 7, 4096, 0) == EPERM
  assert ask("prlimit64", 0, 7, 1 << 32, 0) == EPERM
  for name in ("pipe2", "socketpair", "sendto", "getsockopt", "sysinfo"):
    assert ask(name, 1, 1, 0, 0, 0, 0) == EPERM
  for command in (6, 7, 37, 38):  # a lock is no lock
    assert ask("fcntl", 5, command) == seccomp_landlock.ERRNO


def test_other_architectures_of_the_same_processor_are_killed(ask):
  assert ask("read", audit=0x40000003) == KILL  # int 0x80
  assert ask("read", audit=0x40000028) == KILL  # 32-bit arm
  x86, arm = (seccomp_landlock.MACHINES[m].audit for m in ("x86_64", "aarch64"))
  both = {ask(0, audit=x86), ask(0, audit=arm)}
  assert KILL in both and len(both) == 2


def test_x32_is_killed():
  program = seccomp_landlock.program("x86_64")
  audit = seccomp_landlock.MACHINES["x86_64"].audit
  for number in (0x40000000, 0x40000000 + 57, 0xFFFFFFFF):
    assert answer(program, number, audit=audit) == KILL
  assert answer(program, 0x3FFFFFFF, audit=audit) == EPERM


def test_an_unknown_machine_is_refused_by_name(monkeypatch):
  with pytest.raises(OSError, match="'riscv64', only for x86_64 and aarch64"):
    seccomp_landlock.program("riscv64")
  monkeypatch.setattr(seccomp_landlock.platform, "machine", lambda: "ppc64le")
  with pytest.raises(OSError, match="'ppc64le'"):
    seccomp_landlock.calls_filter.__wrapped__(False, True)


def test_without_landlock_there_are_no_walls(monkeypatch):
  monkeypatch.setattr(seccomp_landlock, "landlock_abi", lambda: 0)
  with pytest.raises(OSError, match=r"no Landlock; use Linux 5\.13"):
    seccomp_landlock.isolate(Limits(), readable=[], writable=[])
  monkeypatch.undo()
  monkeypatch.setattr(seccomp_landlock.platform, "system", lambda: "Darwin")
  assert seccomp_landlock.landlock_abi() == 0


# A process raises the walls around itself and says what it can still do. Every
# attempt is harmless where a wall is missing.
PROBE = """
import json, os, resource, socket, sys, threading, ctypes
from brorl_jax.verdicts.sandbox import seccomp_landlock
inside, outside = sys.argv[1:]
readable = ["/usr/lib", "/lib", *sys.path]
limits = seccomp_landlock.Limits(
  memory=1 << 30, open_files=32, file_bytes=1 << 16)
seccomp_landlock.isolate(limits, readable=readable, writable=[inside])

def fork():
  if os.fork() == 0:
    os._exit(0)

def write_inside():
  os.mkdir(inside + "/d")
  with open(inside + "/d/a", "w") as f:
    f.write("x")
  os.rename(inside + "/d/a", inside + "/b")
  os.rmdir(inside + "/d")
  return open(inside + "/b").read()

def large_file():
  with open(inside + "/large", "wb") as f:
    f.write(bytes(1 << 17))

def thread():
  done = []
  thread = threading.Thread(target=done.append, args=("ran",))
  thread.start()
  thread.join()
  return done[0]

out = {}
for name, attempt in {
  "fork": fork,
  "socket": socket.socket,
  "kill": lambda: os.kill(os.getppid(), 0),
  "memory": lambda: len(bytearray(2 << 30)),
  "read outside": lambda: open(outside + "/secret").read(),
  "write outside": lambda: open(outside + "/new", "w"),
  "chmod": lambda: os.chmod(inside, 0o700),
  "link": lambda: os.symlink("/", inside + "/link"),
  "raise limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
  "exec": lambda: os.execv("/bin/true", ["true"]),
  "write inside": write_inside,
  "large file": large_file,
  "files": lambda: [open(inside + "/b") for _ in range(64)],
  "thread": thread,
  "prctl": lambda: ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
}.items():
  try:
    got = attempt()
    out[name] = got if isinstance(got, (int, str)) else "done"
  except BaseException as error:
    out[name] = type(error).__name__
print(json.dumps(out))
"""


def printed(code, *args):
  package = pathlib.Path(seccomp_landlock.__file__).parents[3]
  env = {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
  how = dict(env=env, timeout=60, check=True)
  return ran(sys.executable, "-c", code, *args, **how).stdout


def test_what_is_left_inside(tmp_path):
  inside, outside = tmp_path / "inside", tmp_path / "outside"
  for folder in (inside, outside):
    folder.mkdir()
  (outside / "secret").write_text("secret")
  denied = "fork socket kill read_outside write_outside chmod link exec"
  assert json.loads(printed(PROBE, inside, outside)) == {
    **{name.replace("_", " "): "PermissionError" for name in denied.split()},
    "memory": "MemoryError", "raise limit": "ValueError", "write inside": "x",
    "large file": "OSError", "files": "OSError", "thread": "ran", "prctl": -1,
  }  # fmt: skip
  assert [p.name for p in outside.iterdir()] == ["secret"]


def test_capabilities_are_gone():
  code = """
from brorl_jax.verdicts.sandbox import seccomp_landlock
seccomp_landlock.drop_capabilities()
print(*[l.split()[1] for l in open("/proc/self/status") if l[:3] == "Cap"])
print([l.split()[1] for l in open("/proc/self/status") if l[:4] == "NoNe"])
"""
  sets, no_new_privs = printed(code).splitlines()
  inherited, permitted, effective, bounding, ambient = sets.split()
  assert {inherited, permitted, effective, ambient} == {"0" * 16}
  assert bounding == "0" * 16 or os.geteuid() != 0
  assert no_new_privs == "['1']"
