"""Processes that end with us: their start and end, their time, their answers.

    host                processes
    Process -- life --- zygote   forks others: jail_main.py, library_calls.py
    Worker --- link --- worker   answers questions
          \\--- life --- guard    the parent of the worker. When that ends or
                                 `life` closes, it kills all its descendants
                                 and ends

A message is four bytes of length and a JSON text. A zygote or guard sends one
with its "pid". The reply to a question is {"value": ...} or {"error": text}.
The first message of a worker is a reply without a question. A worker that was
late, died or sent a malformed reply is never asked again: the next question
starts another. library_calls.py and own.py say how a worker is started and what
it answers.

`JobClock` has time limits that do not depend on the load of the machine. A job
has seconds of CPU time, not of wall time. It may sleep for equally long. Sleep
is the time in which its processes neither run nor wait for a CPU, according to
the kernel's scheduler. Without such data all other time counts as sleep.
"""

from __future__ import annotations

import abc
import contextlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from json import dumps, loads  # which a user's file may replace in json
from typing import Any, NamedTuple, NoReturn

from brorl_jax.verdicts.sandbox import jail_main, seccomp_landlock
from brorl_jax.verdicts.sandbox.jail_main import LENGTH, framed

# Environment of every zygote. The trainer's environment may hold secrets.
ENVIRONMENT = {
  "LANG": "C.UTF-8",
  "MALLOC_ARENA_MAX": "2",  # an arena reserves 64 MiB of address space
  "PYTHONDONTWRITEBYTECODE": "1",
  "PYTHONHASHSEED": "0",  # the same program gives the same verdict
  "PYTHONSAFEPATH": "1",
  "PYTHONUTF8": "1",
}
# Wall seconds per CPU second of a job, which may get a tenth of a CPU.
PATIENCE = 10
# Longest time limit, in CPU seconds per test, that an example may set.
MAX_TEST_S = 60.0

_END_S = 10.0
_TICK_S = 0.1
_HERTZ = os.sysconf("SC_CLK_TCK")
_DIED = "the worker process died"


class Failed(RuntimeError):
  """The sandbox failed, so there is no verdict on the program."""


class Process:
  """A process that ends when its socket, `life`, closes."""

  def __init__(
    self,
    start: Callable[[socket.socket], subprocess.Popen | None],
    *,
    patience_s: float,
  ):
    """Starts a process and waits until it is ready, or raises Failed.

    `start` gets the other end of `life`; it returns our child, which is the
    process or its parent, or None if a zygote forks it.
    """
    self.life, theirs = socket.socketpair()
    try:
      with theirs:
        self._popen = start(theirs)
    except BaseException:
      self.life.close()
      raise
    self.owner, pids = os.getpid(), list[int]()
    ours = self.owner, self._popen, self.life, pids
    self._end = weakref.finalize(self, _end, *ours)
    try:
      self.hello = _received(self.life, Deadline(patience_s), 1 << 16)
    except Failed:  # too late, or it ended
      self.close()
      raise Failed("no answer") from None
    self.life.settimeout(None)
    self.pid: int = self.hello["pid"]  # in our namespace
    if self._popen is None:  # the pid of a child may be that of its namespace
      pids.append(self.pid)

  def alive(self) -> bool:
    return self._popen is not None and self._popen.poll() is None

  def stop(self) -> None:
    """Asks the process to end with its work; callable from any thread."""
    with contextlib.suppress(OSError):
      self.life.shutdown(socket.SHUT_WR)

  def close(self) -> None:
    """Ends the process and waits for it, so that no zombie remains."""
    self._end()


def _end(
  owner: int,
  popen: subprocess.Popen | None,
  life: socket.socket,
  pids: Sequence[int],
) -> None:
  if os.getpid() != owner:  # a fork of ours must not end it
    life.close()
    return
  # When we hang up, the process kills what it started, waits for it and ends. A
  # zygote of a jail is the first process of its namespaces, which end with it.
  left_s = _END_S
  try:
    life.shutdown(socket.SHUT_WR)
    life.settimeout(_END_S)
    while life.recv(64):
      pass
  except TimeoutError:  # it is stopped
    left_s = 0.0
    for pid in pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
  except OSError:
    pass
  life.close()
  if popen is not None:
    try:
      popen.wait(left_s)
    except subprocess.TimeoutExpired:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
      popen.wait()


def _received(
  link: socket.socket, clock: JobClock | Deadline, most: int
) -> Any:
  """The next message, of at most `most` bytes; raises Failed."""
  data, size = b"", LENGTH.size
  try:
    while len(data) < size:
      link.settimeout(clock.wait_s)
      with contextlib.suppress(TimeoutError):
        part = link.recv(size - len(data))
        if not part:
          raise Failed(_DIED)
        data += part
      if len(data) == size == LENGTH.size:
        (more,) = LENGTH.unpack(data)
        if more > most:
          raise Failed(f"a malformed reply of {more} bytes")
        size += more
      if len(data) < size and clock.late():
        raise Failed(f"late: no answer in {clock.seconds:g} s")
  except OSError:
    raise Failed(_DIED) from None
  # A process that executed model text may send anything.
  try:
    return loads(data[LENGTH.size :])
  except (ValueError, RecursionError) as error:
    raise Failed(f"a malformed reply ({type(error).__name__})") from None


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen:
  """Starts a command in a new session, or raises Failed."""
  try:
    # A new session: only the trainer handles an interrupt of the terminal.
    return subprocess.Popen(
      command, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )
  except OSError as error:
    raise Failed(f"cannot start {command[0]}: {error}") from None


def python(
  module: str,
  sockets: Sequence[socket.socket],
  *args: str,
  flag: str,
  **options: Any,
) -> subprocess.Popen:
  """Starts `main(descriptors, *args)` of a module in a new interpreter."""
  path = [os.path.abspath(entry) for entry in sys.path]
  fds = [it.fileno() for it in sockets]
  code = (
    f"import importlib, sys\nsys.path[:] = {path!r}\n"
    f"importlib.import_module({module!r}).main({fds}, *sys.argv[1:])"
  )
  command = [sys.executable, flag, "-c", code, *args]
  return popen(command, pass_fds=fds, **options)


class Worker(abc.ABC):
  """The host's side of a worker. One thread asks; any may call `stop`."""

  def __init__(self, *, reply_bytes: int):
    self.failures = 0  # questions without an answer; each ended a process
    self._reply_bytes = reply_bytes
    self._guard: Process | None = None
    self._link: socket.socket | None = None
    self._stopped = False

  @abc.abstractmethod
  def _start(
    self, life: socket.socket, link: socket.socket
  ) -> subprocess.Popen | None:
    """Starts a guard with these ends; its process if it is our child."""

  def stop(self) -> None:
    """Ends the question in progress and refuses further ones; any thread."""
    self._stopped = True
    guard = self._guard
    if guard is not None:
      guard.stop()

  def close(self) -> None:
    """Ends the process. A later question starts a new one."""
    guard, self._guard = self._guard, None
    if guard is not None:
      guard.close()
    if self._link is not None:
      self._link.close()
      self._link = None

  def _running(self) -> bool:
    if self._stopped:
      raise Failed("stopped")
    if self._link is not None:
      poll = select.poll()
      poll.register(self._link, select.POLLIN)
      if poll.poll(0):  # without a question: the process was killed
        self.close()
    # After a fork of ours, the process belongs to the parent.
    return self._guard is not None and self._guard.owner == os.getpid()

  def _begin(self, patience_s: float) -> Any:
    link, its_link = socket.socketpair()
    try:
      with its_link:
        start = lambda life: self._start(life, its_link)
        guard = Process(start, patience_s=patience_s)
    except BaseException:
      link.close()
      raise
    weakref.finalize(guard, link.close)
    self._guard, self._link = guard, link
    if self._stopped:  # checked after stop() can see the process
      raise Failed("stopped")
    return self._receive(Deadline(patience_s))

  def _answer(
    self, question: bytes, clock: JobClock | Deadline, seconds: float
  ) -> Any:
    assert self._link is not None
    try:
      self._link.settimeout(seconds)
      self._link.sendall(framed(question))
    except TimeoutError:
      raise Failed(f"late: question not read in {seconds:g} s") from None
    except OSError:
      raise Failed(_DIED) from None
    return self._receive(clock)

  def _receive(self, clock: JobClock | Deadline) -> Any:
    assert self._link is not None
    match _received(self._link, clock, self._reply_bytes):
      case {"value": value}:
        return value
      case {"error": str(text)}:
        raise Failed(" ".join(text.split())[:400])
    raise Failed("a malformed reply")

  @contextlib.contextmanager
  def _question(self, name: str) -> Iterator[None]:
    """Ends the process if there is no answer."""
    try:
      yield
    except Exception as error:  # of what it replied, too
      self.failures += 1
      self.close()
      # As a text: the error would hold this frame, which holds the process.
      why = str(error) if isinstance(error, Failed) else "a malformed reply"
      raise Failed(f"{name}: {why}") from None
    except BaseException:  # an interrupt: the answer may still come
      self.close()
      raise


# In the processes.


def guard(life: int, link: int, work: Callable[[int], object]) -> NoReturn:
  """Becomes a guard; `work` gets the link in a worker."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  host = socket.socket(fileno=life)
  if sys.platform == "linux":
    seccomp_landlock.adopt_orphans()
  worker = os.fork()
  if worker == 0:
    try:
      if sys.platform == "linux":
        seccomp_landlock.die_with_parent()
      host.close()
      work(link)
    finally:
      os._exit(0)
  os.close(link)
  with contextlib.suppress(OSError):  # the host has hung up
    tell(life, {"pid": os.getpid()})

  def hung_up() -> None:
    with contextlib.suppress(OSError):
      host.recv(1)
    _kill_all()

  threading.Thread(target=hung_up, daemon=True).start()
  with contextlib.suppress(ChildProcessError):  # that thread reaped it
    while os.wait()[0] != worker:  # an orphan
      pass
  _kill_all()


def _kill_all() -> NoReturn:
  # A killed process may have started others meanwhile, in other sessions.
  while alive := descendants(os.getpid()):
    for pid in alive:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.002)
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
  # For kernels that do not list descendants: kill our own process group.
  os.killpg(0, signal.SIGKILL)
  os._exit(0)


def tell(link: int, value: Any, most: int = 1 << 16) -> None:
  """Sends a message of at most `most` bytes from a process."""
  data = dumps(value).encode()
  if len(data) > most:
    raise ValueError(f"a reply of {len(data)} bytes; the limit is {most}")
  jail_main.write(link, framed(data))


def serve(
  link: int, hello: Any, answer: Callable[[Any], Any], *, reply_bytes: int
) -> None:
  """Sends `hello`, then answers until the host closes the link."""
  os.set_inheritable(link, False)
  me = os.getpid()

  def send(reply: Any) -> None:
    if os.getpid() != me:  # a function forked, and the child returned too
      os._exit(0)
    tell(link, reply, reply_bytes)

  send({"value": hello})
  stream = open(link, "rb", closefd=False)
  while len(head := stream.read(LENGTH.size)) == LENGTH.size:
    question = stream.read(*LENGTH.unpack(head))
    try:
      send({"value": answer(loads(question))})
    # Model text may raise anything, SystemExit too.
    except BaseException as error:
      send({"error": describe(error)})


def describe(error: BaseException) -> str:
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


# What processes use, and when they are late.


class Usage(NamedTuple):
  """Seconds of a process and of the children that it waited for."""

  cpu_s: float
  # Time ready to run but without a CPU, of its own threads alone.
  waited_s: float


def descendants(pid: int) -> dict[int, Usage]:
  """Usage of the living descendants of a process, by pid."""
  by_pid: dict[int, Usage] = {}
  todo = _children(pid)
  while todo:
    child = todo.pop()
    # It may have ended by now.
    with contextlib.suppress(OSError, IndexError):
      by_pid[child] = _usage(child)
    todo += _children(child)
  return by_pid


def _children(pid: int) -> list[int]:
  children = []
  with contextlib.suppress(OSError):
    for task in os.listdir(f"/proc/{pid}/task"):
      with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/task/{task}/children") as file:
          children += map(int, file.read().split())
  return children


def _usage(pid: int) -> Usage:
  with open(f"/proc/{pid}/stat") as file:
    fields = file.read().rpartition(")")[2].split()
  waited = 0
  for task in os.listdir(f"/proc/{pid}/task"):
    # This thread may have ended while the others have not.
    with contextlib.suppress(OSError, IndexError):
      with open(f"/proc/{pid}/task/{task}/schedstat") as file:
        waited += int(file.read().split()[1])
  return Usage(sum(map(int, fields[11:15])) / _HERTZ, waited / 1e9)


class JobClock:
  """Whether the descendants of a process have used up the time of a job.

      clock = JobClock(pid, 5.0, 30.0)     # when the job begins
      clock.wait_s                   # seconds until the next look
      clock.late()                   # whether the job has to be ended
      clock.tested()                 # a test has ended, the next one begins

  It looks ten times a second; most jobs end before the first look.
  """

  def __init__(self, pid: int, test_s: float, total_s: float):
    self._pid, self.seconds, self._total_s = pid, test_s, total_s
    self.wait_s = min(_TICK_S, test_s / 4)
    self._begin = self._test = self._looked = time.monotonic()
    self._seen: dict[int, Usage] = {}
    self._before = 0.0  # CPU seconds at the start of the test; < 0: unknown
    self._slept = self._slept_before = self._cpu_s = 0.0

  def tested(self) -> None:
    self._test, self._before = time.monotonic(), -1.0
    self._slept_before = self._slept

  def late(self) -> bool:
    now = time.monotonic()
    if now - self._looked < self.wait_s:
      return False
    cpu_s = self._look(now)
    if self._before < 0:
      self._before = cpu_s
    return (
      max(cpu_s - self._before, self._slept - self._slept_before) > self.seconds
      or max(cpu_s, self._slept) > self._total_s
      or now - self._test > PATIENCE * self.seconds
      or now - self._begin > PATIENCE * self._total_s
    )

  def _look(self, now: float) -> float:
    """The CPU seconds so far; adds the sleep since the last look."""
    seen, before = descendants(self._pid), self._seen
    if seen.keys() == before.keys():
      # The kernel drops a thread's waiting time when it ends.
      busy = sum(
        max(0.0, after - then)
        for pid in seen
        for after, then in zip(seen[pid], before[pid], strict=True)
      )
      self._slept += max(0.0, now - self._looked - busy)
    self._seen, self._looked = seen, now
    # A process that ended and was not reaped may be missing: never go down.
    self._cpu_s = max(self._cpu_s, sum(used.cpu_s for used in seen.values()))
    return self._cpu_s


class Deadline:
  """A clock of wall time, for work that may wait for a network."""

  def __init__(self, seconds: float):
    self.seconds, self._end = seconds, time.monotonic() + seconds

  @property
  def wait_s(self) -> float:
    return max(self._end - time.monotonic(), 1e-3)

  def late(self) -> bool:
    return time.monotonic() >= self._end


class Output(io.FileIO):
  """Standard output or error, where what cannot be written is left out."""

  required = 0  # the descriptor whose next failure is an error

  def write(self, data: Any, /) -> int:
    try:
      return super().write(data) or len(data)  # None: it would block
    except OSError as e:
      if self.fileno() != Output.required:
        return len(data)
      Output.required = 0  # what is left in buffers goes nowhere
      raise OSError(e.errno, e.strerror, "standard output") from None


def outlast_terminal() -> None:
  """A print never fails: its reader may be gone, its disk be full."""
  for fd in range(3):
    try:
      os.fstat(fd)
    except OSError:  # closed: the next file would get what is printed
      os.open(os.devnull, os.O_RDWR)
  for fd, name in ((1, "stdout"), (2, "stderr")):
    out = io.BufferedWriter(Output(fd, "w", closefd=False))
    encoding = getattr(getattr(sys, name), "encoding", None)
    text = io.TextIOWrapper(out, encoding, "backslashreplace", None, True)
    setattr(sys, name, text)
