"""Runs the programs of hostile/code/ and watches the host meanwhile.

The first line of a program says how it is called, the right verdict and what it
tries. The task: the length of the longest run of neighbours that rise. Never
run one outside a jail whose limits were proved; jail.measure() does that.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time

from brorl_jax.verdicts import code
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.sandbox import process, seccomp_landlock, zygote
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

FOLDER = pathlib.Path(__file__).parent / "hostile" / "code"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
# If a wall is missing, the machine of the tests must survive. Four jails have
# some thirty processes.
MOST_PROCESSES = 200
# A hostile program that wastes its time need not do so for long.
SHORT = Limits(test_s=0.3, total_s=0.5, memory=1 << 29)

CALLS = [([1, 2, 3, 1], 3), ([], 0), ([5, 4, 3, 2], 1),
  ([2, 2, 3, 9, 1, 2], 3), (list(range(50)), 50)]  # fmt: skip
_CHECK = """
import functools

def check(candidate):
  assert candidate([4, 5, 1]) == 2
  assert candidate([]) == 0
  assert candidate(numbers=[7, 8, 9, 1, 2]) == 3
  try:
    candidate("123")
    assert False
  except TypeError:
    pass
  mine = [3, 4]
  assert candidate(mine, clear=True) == 2
  assert mine == []
  assert all(candidate(list(range(n))) == n for n in range(5))
"""
TESTS = {
  "call": {"inputs": [[numbers] for numbers, _ in CALLS],
    "outputs": [want for _, want in CALLS], "fn_name": "rise"},
  "stdio": {
    "inputs": [f"{len(n)}\n{' '.join(map(str, n))}\n" for n, _ in CALLS],
    "outputs": [f"{want}\n" for _, want in CALLS],
  },
  "check": {"check": _CHECK, "fn_name": "rise"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
  verdict: Verdict
  seconds: float
  said: bytes  # all that came out of the jail


def header(name: str) -> tuple[str, str]:
  """How it is called, and the right verdict."""
  first = (FOLDER / f"{name}.py").read_text().partition("\n")[0]
  match = re.fullmatch(r"# (call|stdio|check), (pass|fail): .+", first)
  assert match, f"{name}: {first}"
  return match[1], match[2]


class _Watched:
  """A jail, and what came out of it."""

  def __init__(self, jail):
    self.jail, self.said = jail, b""

  def run(self, job, **options):
    ended = self.jail.run(job, **options)
    for frame in ended.frames:
      self.said += frame.payload + frame.why
    return ended


def run_all(names, level, canaries, *, at_once: int) -> dict[str, Report]:
  """Runs programs on jails of a level, some at a time."""
  local = threading.local()
  jails = []

  def run(name):
    if not hasattr(local, "jail"):
      local.jail = level.zygote()
      jails.append(local.jail)
    mode, right = header(name)
    program = canaries.fill((FOLDER / f"{name}.py").read_text())
    watched = _Watched(local.jail)
    start = time.monotonic()
    verdict = code.verify(program, TESTS[mode],
      limits=Limits() if right == "pass" else SHORT, jail=watched)  # fmt: skip
    seconds = time.monotonic() - start
    return Report(verdict, seconds, watched.said)

  # A jail that does not end its programs is stopped from outside.
  timer = threading.Timer(240.0, lambda: [jail.stop() for jail in jails])
  timer.start()
  with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    reports = dict(zip(names, pool.map(run, names), strict=True))
    for jail in jails:
      jail.close()
  timer.cancel()
  return reports


def change_source(monkeypatch, old, new, times=100) -> list[str]:
  real, sources = zygote._boot, []

  def boot(**options):
    text = real(**options).decode()
    assert text.count(old) == 1
    sources.append(text.replace(old, new) if len(sources) < times else text)
    return sources[-1].encode()

  monkeypatch.setattr(zygote, "_boot", boot)
  return sources


def children() -> set[int]:
  return {*process._children(os.getpid())}


class Canaries:
  """What a program must not touch, and whether it was touched.

  with Canaries() as canaries:
    ...
    canaries.close()
    assert canaries.complaints() == []
  """

  def __enter__(self):
    self._stack = contextlib.ExitStack()
    self.secret = f"canary-{secrets.token_hex(8)}"
    os.environ["BRORL_SECRET"] = self.secret
    self._stack.callback(os.environ.pop, "BRORL_SECRET")
    self._start_files()
    self._hits = []
    self._start_sockets()
    self._start_processes()
    self._ipc = self._shared()
    return self

  def __exit__(self, *_):
    self._stack.close()

  def fill(self, program: str) -> str:
    for name, value in self._places.items():
      program = program.replace(f"@{name}@", str(value))
    return program

  def complaints(self) -> list[str]:
    """What happened to the host; to be asked when all jails are closed."""
    time.sleep(0.2)  # a packet may be on its way
    found = [f"host: {hit}" for hit in self._hits]
    if sorted(os.listdir(self._folder)) != ["secret"]:
      found.append(f"files: {os.listdir(self._folder)}")
    elif self._state() != self._before:
      found.append(f"secret: {self._before} -> {self._state()}")
    if self._victim.poll() is not None:
      found.append(f"victim: ended with {self._victim.returncode}")
    left = children() - {self._victim.pid} - self._children_before
    found += [f"process left: {self._describe(pid)}" for pid in left]
    if self._shared() != self._ipc:
      found.append(f"shared memory: {self._ipc} -> {self._shared()}")
    if self.peak_kb > 4 * (2 << 20):
      found.append(f"memory: {self.peak_kb} kB at once")
    return found

  def _start_files(self):
    folder = self._stack.enter_context(tempfile.TemporaryDirectory())
    self._folder = pathlib.Path(folder)
    (self._folder / "secret").write_text(self.secret)
    # It is the jail that has to stop them, not the rights of the files.
    (self._folder / "secret").chmod(0o666)
    self._folder.chmod(0o777)
    self._before = self._state()
    self._places = {"FOLDER": folder}

  def _state(self):
    stat = (self._folder / "secret").stat()
    text = (self._folder / "secret").read_text()
    return text, stat.st_mode, stat.st_uid, stat.st_nlink, stat.st_mtime_ns

  def _start_sockets(self):
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"brorl-{secrets.token_hex(8)}"
    abstract.bind(f"\0{name}")
    abstract.listen()
    self._places |= {"TCP": tcp.getsockname()[1],
      "UDP": udp.getsockname()[1], "ABSTRACT": name}  # fmt: skip
    stop = threading.Event()
    watcher = threading.Thread(
      target=self._watch, args=(stop, tcp, udp, abstract)
    )
    watcher.start()
    for s in (tcp, udp, abstract):
      self._stack.callback(s.close)
    self._stack.callback(watcher.join)
    self._stack.callback(stop.set)

  def _watch(self, stop, tcp, udp, abstract):
    self.peak_kb = 0
    for s in (tcp, udp, abstract):
      s.settimeout(0)
    while not stop.wait(0.05):
      for s in (tcp, abstract):
        with contextlib.suppress(OSError):
          connection, address = s.accept()
          connection.close()
          self._hits.append(f"connection from {address!r}")
      with contextlib.suppress(OSError):
        self._hits.append(f"datagram {udp.recv(100)!r}")
      alive = process.descendants(os.getpid())
      self.peak_kb = max(self.peak_kb, sum(map(self._kb, alive)))
      if len(alive) > MOST_PROCESSES:
        self._hits.append(f"{len(alive)} processes at once, all ended")
        for pid in alive:
          with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

  def _start_processes(self):
    # An orphan becomes our child, so that none is overlooked.
    seccomp_landlock._prctl(seccomp_landlock._CHILD_SUBREAPER, 1)
    self._stack.callback(
      seccomp_landlock._prctl, seccomp_landlock._CHILD_SUBREAPER, 0
    )
    self._children_before = children()
    as_jail = {}
    if os.geteuid() == 0:
      nobody = zygote.NOBODY
      as_jail = {"user": nobody, "group": nobody, "extra_groups": []}
    self._victim = subprocess.Popen(["sleep", "600"], **as_jail)
    self._places["VICTIM"] = self._victim.pid
    self._stack.callback(self._victim.wait)
    self._stack.callback(self._victim.kill)

  def _kb(self, pid):
    with contextlib.suppress(OSError):
      status = pathlib.Path(f"/proc/{pid}/status").read_text()
      if match := re.search(r"RssAnon:\s+(\d+)", status):
        return int(match[1])
    return 0

  def _describe(self, pid):
    with contextlib.suppress(OSError):
      return pathlib.Path(f"/proc/{pid}/status").read_text()[:100].split("\n")
    return pid

  def _shared(self):
    ipc = pathlib.Path("/proc/sysvipc")
    counts = [len(p.read_text().split("\n")) for p in sorted(ipc.glob("*"))]
    return counts, sorted(os.listdir("/dev/shm"))
