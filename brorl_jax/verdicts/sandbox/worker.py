"""A process that answers questions, and the guard that ends it.

    host               processes
    Worker -- link --- worker   answers questions
          \\-- life --- guard    the parent of the worker. When the worker ends,
                                or `life` closes, it kills all its descendants
                                and ends

A message on the link is four bytes of length and a JSON text. A question has
one or more replies, {"value": ...} or {"error": text}; the first message is a
reply without a question. A worker that was late, died or sent a malformed reply
is never asked again: the next question starts another. library_calls.py and
own/rewards.py say how a worker is started and what it answers.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from brorl_jax.verdicts.sandbox import process, seccomp_landlock, usage
from brorl_jax.verdicts.sandbox.process import Failed

_LENGTH = struct.Struct("=I")
_DIED = "the worker process died"


class Worker(abc.ABC):
  """The host's side; one thread asks, any thread may call `stop`.

  Attributes:
    failures: Questions without an answer; each ended a process.
  """

  def __init__(self, *, reply_bytes: int):
    self.failures = 0
    self._reply_bytes = reply_bytes
    self._guard: process.Process | None = None
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
    """Whether a process waits for a question."""
    if self._stopped:
      raise Failed("stopped")
    if self._link is not None and self._readable():
      self.close()  # readable without a question: the process was killed
    # After a fork of ours, the process belongs to the parent.
    return self._guard is not None and self._guard.owner == os.getpid()

  def _begin(self, patience_s: float) -> None:
    """Starts a process; `_receive` then gives its first message."""
    life, its_life = process.pair()
    link, its_link = socket.socketpair()
    try:
      with its_life, its_link:
        popen = self._start(its_life, its_link)
      guard = process.Process(life, popen, patience_s=patience_s)
    except BaseException:
      life.close()
      link.close()
      raise
    weakref.finalize(guard, link.close)
    self._guard, self._link = guard, link
    if self._stopped:  # checked after stop() can see the process
      raise Failed("stopped")

  def _send(self, question: bytes, seconds: float) -> None:
    assert self._link is not None
    try:
      self._link.settimeout(seconds)
      self._link.sendall(_LENGTH.pack(len(question)) + question)
    except TimeoutError:
      raise Failed(f"late: question not read in {seconds:g} s") from None
    except OSError:
      raise Failed(_DIED) from None

  def _receive(self, clock: usage.JobClock | usage.Deadline) -> Any:
    """The value of the next reply."""
    link, data, size = self._link, b"", _LENGTH.size
    assert link is not None
    try:
      while len(data) < size:
        link.settimeout(clock.wait_s)
        with contextlib.suppress(TimeoutError):
          part = link.recv(size - len(data))
          if not part:
            raise Failed(_DIED)
          data += part
        if len(data) == size == _LENGTH.size:
          (more,) = _LENGTH.unpack(data)
          if more > self._reply_bytes:
            raise Failed(f"a malformed reply of {more} bytes")
          size += more
        if len(data) < size and clock.late():
          raise Failed(f"late: no answer in {clock.seconds:g} s")
    except OSError:
      raise Failed(_DIED) from None
    return _decoded(data[_LENGTH.size :])

  def _readable(self) -> bool:
    assert self._link is not None
    poll = select.poll()
    poll.register(self._link, select.POLLIN)
    return bool(poll.poll(0))

  @contextlib.contextmanager
  def _question(self, name: str) -> Iterator[None]:
    """Ends the process if there is no answer."""
    try:
      yield
    except Failed as error:
      self.failures += 1
      self.close()
      raise Failed(f"{name}: {error}") from None
    except BaseException:  # an interrupt: the answer may still come
      self.close()
      raise


def _decoded(data: bytes) -> Any:
  # A process that executed model text may send anything.
  try:
    reply = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise Failed(f"a malformed reply ({type(error).__name__})") from None
  match reply:
    case {"value": value}:
      return value
    case {"error": str(text)}:
      raise Failed(" ".join(text.split())[:400])
  raise Failed("a malformed reply")


def python(
  module: str,
  sockets: Sequence[socket.socket],
  *args: str,
  flag: str,
  **options: Any,
) -> subprocess.Popen:
  """Starts `main(descriptors, *args)` of a module in a new interpreter.

  Args:
    flag: An option of the interpreter.
    **options: Of subprocess.Popen.

  Raises:
    Failed: There is no such interpreter.
  """
  path = [os.path.abspath(entry) for entry in sys.path]
  fds = [it.fileno() for it in sockets]
  code = (
    f"import importlib, sys\nsys.path[:] = {path!r}\n"
    f"importlib.import_module({module!r}).main({fds}, *sys.argv[1:])"
  )
  command = [sys.executable, flag, "-c", code, *args]
  return process.popen(command, pass_fds=fds, **options)


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
    host.send(json.dumps({"pid": os.getpid()}).encode())
  _await(worker, host)
  # A killed process may have started others meanwhile, in other sessions.
  while alive := usage.descendants(os.getpid()):
    for pid in alive:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.002)
    _reaped()
  # For kernels that do not list descendants: kill our own process group.
  os.killpg(0, signal.SIGKILL)
  os._exit(0)


def _await(worker: int, host: socket.socket) -> None:
  """Waits until the worker has ended or the host has hung up."""
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  poll = select.poll()
  poll.register(read, select.POLLIN)
  poll.register(host, select.POLLIN)
  while worker not in _reaped():
    if host.fileno() in dict(poll.poll()):
      return
    os.read(read, 4096)


def _reaped() -> set[int]:
  """Children that have ended since the last call."""
  ended = set()
  with contextlib.suppress(ChildProcessError):
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
      ended.add(pid)
  return ended


def serve(
  link: int,
  hello: Any,
  answers: Callable[[Any], Iterable[Any]],
  *,
  reply_bytes: int,
) -> None:
  """Sends `hello`, then answers until the host closes the link.

  Args:
    answers: The values of the replies to a question, JSON values.
    reply_bytes: Limit on a reply.
  """
  os.set_inheritable(link, False)
  socket_, me = socket.socket(fileno=link), os.getpid()

  def send(reply: Any) -> None:
    if os.getpid() != me:  # a function forked, and the child returned too
      os._exit(0)
    data = json.dumps(reply).encode()
    if len(data) > reply_bytes:
      raise ValueError(
        f"a reply of {len(data)} bytes; the limit is {reply_bytes}"
      )
    socket_.sendall(_LENGTH.pack(len(data)) + data)

  send({"value": hello})
  stream = socket_.makefile("rb")
  while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
    question = stream.read(*_LENGTH.unpack(head))
    try:
      for value in answers(json.loads(question)):
        send({"value": value})
    # Model text may raise anything, SystemExit too.
    except BaseException as error:
      send({"error": describe(error)})


def describe(error: BaseException) -> str:
  """Type and message of an error, in one short line."""
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
