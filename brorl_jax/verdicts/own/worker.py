"""The process that calls a user's reward functions, and its guard.

    socket, stdin    from process.py
       |       |
    worker   guard   the parent of the worker. When the worker ends, or stdin
                     closes, it kills all its descendants and ends

The worker imports the functions and answers questions. A message is four bytes
of length and a JSON text. Prints of the functions go to the standard error of
the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from brorl_jax.verdicts.own import functions
from brorl_jax.verdicts.sandbox import seccomp_landlock, usage

LENGTH = struct.Struct("=I")
WHAT = "config.reward.verifier"


def main(link: int, names: Sequence[str]) -> None:
  """Becomes a guard with its worker; never returns.

  Args:
    link: Our end of the stream on which the worker answers.
  """
  if sys.platform == "linux":
    seccomp_landlock.adopt_orphans()
  worker = os.fork()
  if worker == 0:
    _serve(link, names)
  os.close(link)
  _guard(worker)


def message(value: Any) -> bytes:
  """A JSON value as bytes for the stream."""
  data = json.dumps(value).encode()
  return LENGTH.pack(len(data)) + data


def _guard(worker: int) -> None:
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  while worker not in _reaped():
    if 0 in select.select([0, read], [], [])[0]:
      break
    os.read(read, 4096)
  # A killed process may have started others meanwhile, in other sessions.
  while alive := usage.of_descendants(os.getpid()):
    for pid in alive:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.002)
    _reaped()
  # For kernels that do not list descendants: kill our own process group.
  os.killpg(0, signal.SIGKILL)


def _reaped() -> set[int]:
  """Children that have ended since the last call."""
  ended = set()
  with contextlib.suppress(ChildProcessError):
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
      ended.add(pid)
  return ended


def _serve(fd: int, names: Sequence[str]) -> None:
  """Answers until the other end closes; never returns."""
  if sys.platform == "linux":
    seccomp_landlock.die_with_parent()
  os.set_inheritable(fd, False)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  link = socket.socket(fileno=fd)
  me, loaded = os.getpid(), []
  try:
    loaded = [functions.load(name, what=WHAT) for name in names]
    hello = {
      "digests": {f.name: f.digest for f in loaded},
      "whole": [f.whole for f in loaded],
    }
  except BaseException as error:  # a module may raise SystemExit
    text = " ".join(str(error).split())
    of = "" if isinstance(error, ValueError) else f"{WHAT}: "
    hello = {"error": f"{of}{text or type(error).__name__}"}
  link.sendall(message(hello))
  stream = link.makefile("rb")
  while len(head := stream.read(LENGTH.size)) == LENGTH.size:
    which, responses, example, step = json.loads(
      stream.read(*LENGTH.unpack(head))
    )
    for verdict in functions.verdicts(loaded[which], responses, example, step):
      if os.getpid() != me:  # the function forked, and the child returned too
        os._exit(0)
      link.sendall(message(dataclasses.astuple(verdict)))
  os._exit(0)
