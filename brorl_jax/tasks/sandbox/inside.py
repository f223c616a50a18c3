"""What runs in the code jail: a warm interpreter that forks once per program.

    main(control, readable=["/usr/lib"], namespaces=True)

Started by process.py, whose socket brings jobs: the byte `JOB` with descriptors
of a memory file with the job, of the pipe for its results and, for a check, of
a memory file with the tests. The interpreter itself reads neither; it forks,
waits until the job's process and all its descendants are gone, and answers with
the wait status. A job says how it is run:

  call    one process; the function is called with one input after the other
  stdio   each input is a process's stdin; its stdout comes back. They are
          forked from one that has compiled the program and never runs it. A
          process goes on to the next input, up to "together" of them, with new
          standard streams and a new __main__, unless it ended or used threads
  check   one process with the program, one with the tests that call it, joined
          by two pipes; neither can see the other's memory

No expected value enters a process that runs the program.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import dataclasses
import gc
import json
import os
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

from brorl_jax.tasks.sandbox import checking, running, walls

READY, JOB = b"r", b"j"
STATUS = struct.Struct("=i")

_TMP = "/tmp"
_TMP_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
_TMP_FLAGS = 2 | 4 | 8  # no setuid, no devices, no programs
_THREADS_OF_USER = 4096
# What solutions import most: warm, it costs a program nothing. No more than
# that, since a fork pays for the interpreter's size; and neither threading nor
# random, which have work to do in each process that is forked.
_WARM = """
  bisect collections copy dataclasses functools heapq itertools json math
  operator re string
"""

_running: list[int] = []  # the job's process


def main(control: int, *, readable: Sequence[str], namespaces: bool) -> None:
  """Forks one process per job until the host closes its end of the socket.

  Args:
    control: Our end of a socket of packets.
    readable: What programs may read: the interpreter's own files.
    namespaces: Whether there are namespaces around this process, so that it may
      mount a place for scratch files and dies with what is in it. Without, jobs
      have no place to write.
  """
  sock = socket.socket(fileno=control)
  most = running.OPEN_FILES
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  walls.adopt_orphans()
  if namespaces:
    walls.mount_tmpfs(_TMP, _TMP_FLAGS, _TMP_OPTIONS)
  else:
    walls.die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
  walls.drop_capabilities()
  for name in _WARM.split():
    __import__(name)
  # As `site` would, which is not loaded: many programs end with exit().
  for name in ("exit", "quit"):
    setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
  gc.collect()
  gc.freeze()  # collections in a program leave the shared pages alone
  sock.send(READY)
  jobs = 0
  while True:
    _, fds, _, _ = socket.recv_fds(sock, 1, 3)
    if not fds:
      return
    jobs += 1
    scratch = f"{_TMP}/{jobs}" if namespaces else None
    if scratch:
      os.mkdir(scratch, 0o700)
    pid = os.fork()
    if pid == 0:
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      _job(fds, scratch, readable)
    _running.append(pid)
    for fd in fds:
      os.close(fd)
    sock.send(STATUS.pack(_reap(pid)))
    _running.clear()
    if scratch:
      # What cannot be removed ends this interpreter, and the scratch with it.
      shutil.rmtree(scratch)


def _stop(*_: Any) -> NoReturn:
  """Ends with all descendants, which leave no zombie to anyone else."""
  try:
    for pid in _running:
      os.kill(pid, signal.SIGKILL)
    _reap(0)
  finally:
    os._exit(0)


def _reap(pid: int) -> int:
  """Waits for all descendants; the wait status of one of them."""
  status = 0
  while True:
    try:
      ended, how = os.waitpid(-1, 0)
    except ChildProcessError:
      return status
    if ended == pid:
      status = how


def _job(
  fds: Sequence[int], scratch: str | None, readable: Sequence[str]
) -> NoReturn:
  """A job's process. 5: it could not do what it should."""
  status = 5
  try:
    walls.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    running.keep(fds)
    job = json.loads(running.contents(fds[0]))
    os.close(fds[0])
    os.chdir(scratch or "/")
    limits = walls.Limits(**job["limits"])
    if scratch is None:
      # Without namespaces all processes of the user count, not ours alone.
      limits = dataclasses.replace(limits, threads=_THREADS_OF_USER)
    walls.raise_walls(
      limits,
      readable=[*readable, "/dev/urandom"],
      writable=[scratch, os.devnull] if scratch else [os.devnull],
      forks=job["mode"] != "call",
    )
    if job["mode"] == "call":
      status = running.calls(job, fds[1])
    elif job["mode"] == "stdio":
      status = running.stdio(job, fds[1], limits)
    else:
      status = checking.check(job, fds[1], fds[2])
  finally:
    os._exit(status)
