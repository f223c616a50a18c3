"""The host's side of worker processes: their template, sockets and clock.

See template.py for what the processes do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

from brorl_jax.tasks.sandbox import template as inside
from brorl_jax.tasks.sandbox.zygote import Failed

_START_S = 120.0  # for a template: it imports for 3 s, on a busy machine for 20
_FORK_S = 60.0  # for a worker, which takes milliseconds
_END_S = 5.0  # for a process to be gone after it was killed

# A worker sees none of the trainer's environment, which may hold secrets. Some
# puzzles change with the hash seed, and threads would not survive a fork.
_KEPT = ("HOME", "LD_LIBRARY_PATH", "NLTK_DATA", "PATH")
_SET = {
  "LANG": "C.UTF-8",
  "MPLBACKEND": "agg",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "PYTHONDONTWRITEBYTECODE": "1",
  "PYTHONHASHSEED": "0",
}
_CODE = """
import sys
sys.path[:] = sys.argv[3:]
from brorl_jax.tasks.sandbox import template
template.main(int(sys.argv[1]), sys.argv[2])
"""


class Process:
  """A worker, by its two sockets.

  Attributes:
    link: Requests and replies; see template.py.
    schedule: How long it waited for a CPU.
    fresh: Judges that it can be asked only once.
    owner: The process that forked it.
    asked: How often it was asked.
  """

  def __init__(
    self, link: socket.socket, leash: socket.socket, fresh: frozenset[str]
  ):
    """Takes the sockets; waits for the template to say which process it is."""
    self.asked = 0
    self.fresh = fresh
    self.owner = os.getpid()
    self.link, self._leash = link, leash
    self.schedule = Schedule()
    self._close = weakref.finalize(
      self, _let_go, link, leash, self.schedule, self.owner
    )
    leash.settimeout(_FORK_S)
    try:
      data = leash.recv(inside.PID.size)
    except OSError:
      data = b""
    if len(data) < inside.PID.size:
      self.close()
      raise Failed("no worker could be started")
    self.schedule.open(inside.PID.unpack(data)[0])

  def stop(self) -> None:
    """Has it killed, soon; from any thread."""
    with contextlib.suppress(OSError):
      self._leash.shutdown(socket.SHUT_WR)

  def close(self) -> None:
    """Has it killed and reaped."""
    self._close()


class Schedule:
  """How long a process has been ready to run and had no CPU."""

  def __init__(self):
    self._file: int | None = None

  def open(self, pid: int) -> None:
    with contextlib.suppress(OSError):  # Linux alone has it
      self._file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)

  def waited(self) -> float:
    """Seconds since it began; 0.0 if the kernel does not say."""
    if self._file is None:
      return 0.0
    try:
      return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
    except (OSError, IndexError):
      return 0.0  # the process is gone; its socket says so too

  def close(self) -> None:
    if self._file is not None:
      os.close(self._file)
      self._file = None


class Template:
  """The process that workers are forked from.

  Attributes:
    pid: Its number.
    walls: Why its workers have none, "" if they have.
  """

  def __init__(self, judges: str):
    """Starts it and waits until it has loaded what it can.

    Args:
      judges: Module with the table of judges; see template.main.

    Raises:
      Failed: If it does not come up.
    """
    self._orders, its = socket.socketpair()
    path = [os.path.abspath(entry) for entry in sys.path]
    environment = {k: os.environ[k] for k in _KEPT if k in os.environ}
    with its:
      self._process = subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, str(its.fileno()), judges, *path],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not the terminal's: an interrupt is for the trainer to handle.
        start_new_session=True,
        cwd="/",
        env={**environment, **_SET},
      )
    self.pid = self._process.pid
    self._close = weakref.finalize(
      self, _end_template, self._orders, self._process, os.getpid()
    )
    hello = self._hello()
    if "error" in hello:
      self._close()
      raise Failed(f"the template did not start: {hello['error']}")
    self.walls: str = hello["walls"]
    self._fresh = frozenset(hello["fresh"])

  def alive(self) -> bool:
    """Whether it still runs."""
    return self._process.poll() is None

  def fork(self) -> Process:
    """A new worker.

    Raises:
      Failed: If the template is dead or the machine has no process to give.
    """
    link, its_link = socket.socketpair()
    leash, its_leash = socket.socketpair()
    with its_link, its_leash:
      fds = [its_link.fileno(), its_leash.fileno()]
      # One byte is sent whole, whatever other threads send.
      with contextlib.suppress(OSError):  # then the leash says it
        socket.send_fds(self._orders, [inside.NEW], fds)
    return Process(link, leash, self._fresh)

  def close(self) -> None:
    """Ends it with all its workers."""
    self._close()

  def _hello(self) -> dict[str, Any]:
    self._orders.settimeout(_START_S)
    data = b""
    try:
      while not data.endswith(b"\n"):
        part = self._orders.recv(1 << 16)
        if not part:
          return {"error": "it died; does the interpreter start?"}
        data += part
    except TimeoutError:
      return {"error": f"it was not ready in {_START_S:g} s"}
    return json.loads(data)


_templates: dict[str, Template] = {}
_starting = threading.Lock()


def template(judges: str) -> Template:
  """The process's template for a table of judges, started if need be.

  Raises:
    Failed: If it does not come up.
  """
  with _starting:
    found = _templates.get(judges)
    if found is None or not found.alive():
      if found is not None:
        found.close()
      found = _templates[judges] = Template(judges)
    return found


def fork(judges: str) -> Process:
  """A new worker of that template.

  Raises:
    Failed: If the template does not come up.
  """
  found = template(judges)
  try:
    return found.fork()
  except Failed:
    if found.alive():
      raise
    # It was killed a moment ago, and no text of a model's was involved.
    return template(judges).fork()


def _let_go(
  link: socket.socket, leash: socket.socket, schedule: Schedule, owner: int
) -> None:
  """Ends a worker, and returns when it is reaped."""
  if os.getpid() == owner:  # a fork of ours shares the sockets
    with contextlib.suppress(OSError):
      leash.shutdown(socket.SHUT_WR)
      leash.settimeout(_END_S)
      while leash.recv(64):
        pass
  link.close()
  leash.close()
  schedule.close()


def _end_template(
  orders: socket.socket, process: subprocess.Popen[bytes], owner: int
) -> None:
  if os.getpid() == owner:
    with contextlib.suppress(OSError):
      orders.shutdown(socket.SHUT_RDWR)
    try:
      process.wait(_END_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
  orders.close()
