"""A zygote's process: how it is started, cloned, given jobs, and ended.

See inside.py for what runs in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from brorl_jax.tasks.sandbox import inside

# Of every zygote. None sees the trainer's environment, which may hold secrets.
ENVIRONMENT = {
  "LANG": "C.UTF-8",
  "MALLOC_ARENA_MAX": "2",  # each is 64 MiB of addresses
  "PYTHONDONTWRITEBYTECODE": "1",
  "PYTHONHASHSEED": "0",  # the same verdict each time
  "PYTHONSAFEPATH": "1",
  "PYTHONUTF8": "1",
}
_CLONE_S = 60.0  # which takes milliseconds
_END_S = 10.0


class Failed(RuntimeError):
  """The jail itself failed. No verdict on the program."""


class Died(Exception):
  """The zygote ended on its own."""


class Process:
  """A zygote's process, from its hello to its end.

  Attributes:
    control: Where its orders go.
    hello: What it said first; see inside.main.
    pid: Its number, as we see it.
    owner: The process that started it.
  """

  def __init__(
    self,
    control: socket.socket,
    popen: subprocess.Popen | None = None,
    *,
    patience_s: float = _CLONE_S,
  ):
    """Waits until it is ready.

    Args:
      control: Our end of its socket.
      popen: The child of ours that it is, or that is its parent.
      patience_s: How long.

    Raises:
      Failed: If it is not.
    """
    self.control, self.owner, self._popen = control, os.getpid(), popen
    self._end = weakref.finalize(self, _end, self.owner, popen, control)
    control.settimeout(patience_s)
    try:
      self.hello = json.loads(control.recv(1 << 16))
    except (OSError, ValueError):  # late, or gone
      self.close()
      raise Failed("no answer") from None
    control.settimeout(None)
    self.pid: int = self.hello["pid"]

  def alive(self) -> bool:
    """Whether it runs; of one that we started."""
    return self._popen is not None and self._popen.poll() is None

  def begin(self, texts: Sequence[bytes], answers: int) -> None:
    """Starts a job.

    Args:
      texts: The job, and what else it reads, as files.
      answers: What it writes to; closed here.

    Raises:
      Died: If nobody is there to do it.
    """
    files = [memory(text) for text in texts]
    try:
      fds = [files[0], answers, *files[1:]]
      socket.send_fds(self.control, [inside.JOB], fds)
    except OSError:
      raise Died from None
    finally:
      for fd in (answers, *files):
        os.close(fd)

  def clone(self) -> Process:
    """Another one, with all that this one has loaded.

    Raises:
      Failed: If there is none.
    """
    control, theirs = _pair()
    # Packets are whole, whatever other threads send. If nobody takes it, the
    # clone does not answer.
    with theirs, contextlib.suppress(OSError):
      socket.send_fds(self.control, [inside.CLONE], [theirs.fileno()])
    return Process(control)

  def stop(self) -> None:
    """Has it end with its job, soon; from any thread."""
    with contextlib.suppress(OSError):
      self.control.shutdown(socket.SHUT_WR)

  def close(self) -> None:
    """Ends it and waits for it; nothing is left, no zombie either."""
    self._end()


def start(
  command: Sequence[str],
  *,
  patience_s: float,
  pass_fds: Sequence[int] = (),
  stderr: int = subprocess.DEVNULL,
  **options: Any,
) -> Process:
  """The zygote that a command starts.

  Args:
    command: What to run; told the descriptor of its control last.
    patience_s: How long until it is ready.
    pass_fds: Other descriptors that it is told.
    stderr: File of what it says.
    **options: Of subprocess.Popen.

  Raises:
    Failed: If it does not start.
  """
  control, theirs = _pair()
  with theirs:
    try:
      popen = subprocess.Popen(
        [*command, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(*pass_fds, theirs.fileno()),
        cwd="/",
        # Not the terminal's: an interrupt is for the trainer to handle.
        start_new_session=True,
        **options,
      )
    except OSError as error:
      control.close()
      raise Failed(f"cannot start {command[0]}: {error}") from None
  return Process(control, popen, patience_s=patience_s)


def _pair() -> tuple[socket.socket, socket.socket]:
  return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _end(
  owner: int, popen: subprocess.Popen | None, control: socket.socket
) -> None:
  if os.getpid() != owner:  # a fork of ours has no business with it
    control.close()
    return
  # It kills its job, waits for it and ends when it finds its socket closed, and
  # with it the namespaces of which it is the first process.
  with contextlib.suppress(OSError):
    control.shutdown(socket.SHUT_WR)
    control.settimeout(_END_S)
    while control.recv(64):
      pass
  control.close()
  if popen is None:
    return
  try:
    popen.wait(_END_S)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def memory(data: bytes) -> int:
  """A file in memory, at its start."""
  fd = os.memfd_create("job")
  with open(fd, "wb", closefd=False) as file:
    file.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd
