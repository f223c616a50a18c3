"""A zygote: a warm interpreter that forks once per job.

    main(control, readable=["/usr/lib"], namespaces=True)

Started by process.py, whose socket brings orders: the byte `JOB` with
descriptors of a memory file with the job, of the pipe for its results and, for
a check, of a memory file with the tests. The interpreter itself reads none of
them; it forks, waits until the job's process and all its descendants are gone,
and answers with the wait status and their CPU-seconds. If the socket's other
end is closed it kills the job, and ends. The byte `CLONE`, with a descriptor of
another socket, has it fork another zygote, with all that this one has loaded. A
job says how it is run:

  call    one process; the function is called with one input after the other
  stdio   each input is a process's stdin; its stdout comes back. They are
          forked from one that has compiled the program and never runs it. A
          process goes on to the next input, up to "together" of them, with new
          standard streams and a new __main__, unless it ended or used threads
  check   one process with the program, one with the tests that call it, joined
          by two pipes; neither can see the other's memory
  ask     one process that answers questions with the libraries that were
          loaded; see asking.py, which starts such zygotes

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
import select
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from brorl_jax.tasks.sandbox import checking, running, walls

JOB, CLONE = b"j", b"c"
STATUS = struct.Struct("=id")  # wait status and CPU-seconds of a job
BROKEN = 5  # exit status of a job's process that could not do what it should

_TMP = "/tmp"
_TMP_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
_TMP_FLAGS = 2 | 4 | 8  # no setuid, no devices, no programs
# What solutions import most: warm, it costs a program nothing. No more than
# that, since a fork pays for the interpreter's size; and neither threading nor
# random, which have work to do in each process that is forked.
_WARM = """
  bisect collections copy dataclasses functools heapq itertools json math
  operator re string
"""

# Of jobs in the mode "ask": serves a socket, until its other end is closed.
Serve = Callable[[int], int]


def main(
  control: int,
  *,
  readable: Sequence[str],
  namespaces: bool,
  serve: Serve | None = None,
  hello: Mapping[str, Any] = {},
) -> None:
  """Forks one process per job until the host closes its end of the socket.

  Args:
    control: Our end of a socket of packets.
    readable: What jobs may read: the interpreter's own files.
    namespaces: Whether there are namespaces around this process, so that it may
      mount a place for scratch files and dies with what is in it. Without, jobs
      have no place to write and can start no threads, which the kernel would
      count together with those of other jobs.
    serve: Does jobs in the mode "ask".
    hello: What the host is told first, beside the pid.
  """
  most = running.OPEN_FILES
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  if namespaces:
    walls.mount_tmpfs(_TMP, _TMP_FLAGS, _TMP_OPTIONS)
  walls.drop_capabilities()
  for name in _WARM.split():
    __import__(name)
  # As `site` would, which is not loaded: many programs end with exit().
  for name in ("exit", "quit"):
    setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
  gc.collect()
  gc.freeze()  # collections in a program leave the shared pages alone
  _obey(control, readable, namespaces, serve, hello)


def _obey(
  control: int,
  readable: Sequence[str],
  namespaces: bool,
  serve: Serve | None,
  hello: Mapping[str, Any],
) -> NoReturn:
  """One order after the other, until there are no more."""
  sock, jobs, clones = _begin(control, hello), 0, set()
  while True:
    order, fds, _, _ = socket.recv_fds(sock, 1, 3)
    if not order:
      _end(clones)
    jobs += 1
    scratch = f"{_TMP}/{jobs}" if namespaces else None
    if scratch:
      os.mkdir(scratch, 0o700)
    pid = os.fork()
    if pid == 0 and order == CLONE:
      sock.close()
      _obey(fds[0], readable, namespaces, serve, hello)
    if pid == 0:
      _job(fds, scratch, readable, serve)
    for fd in fds:
      os.close(fd)
    if order == CLONE:
      clones.add(pid)
      _bury(clones)
      continue
    sock.send(STATUS.pack(*_await(sock, pid)))
    if scratch:
      # What cannot be removed ends this interpreter, and the scratch with it.
      shutil.rmtree(scratch)


def _begin(control: int, hello: Mapping[str, Any]) -> socket.socket:
  walls.adopt_orphans()
  sock = socket.socket(fileno=control)
  sock.send(json.dumps({"pid": os.getpid(), **hello}).encode())
  return sock


def _await(sock: socket.socket, pid: int) -> tuple[int, float]:
  """Waits for a job, and ends with it if the host does not want it any more."""
  ended = os.pidfd_open(pid)
  poll = select.poll()
  poll.register(ended, select.POLLIN)
  poll.register(sock, select.POLLIN)
  if ended not in dict(poll.poll()):  # no order comes before the answer
    _end([pid])
  os.close(ended)
  return _reap(pid)


def _bury(clones: set[int]) -> None:
  """Waits for those that have ended."""
  while clones and (pid := os.waitpid(-1, os.WNOHANG)[0]):
    clones.discard(pid)


def _end(children: Iterable[int]) -> NoReturn:
  """Kills them and waits for all, so that zombies are left to nobody else."""
  try:
    for pid in children:
      os.kill(pid, signal.SIGKILL)
    _reap(0)
  finally:
    os._exit(0)


def _reap(pid: int) -> tuple[int, float]:
  """Waits for all descendants; the wait status of one, the CPU of all."""
  status, cpu_s = 0, 0.0
  while True:
    try:
      ended, how, used = os.wait4(-1, 0)
    except ChildProcessError:
      return status, cpu_s
    cpu_s += used.ru_utime + used.ru_stime
    if ended == pid:
      status = how


def _job(
  fds: Sequence[int],
  scratch: str | None,
  readable: Sequence[str],
  serve: Serve | None,
) -> NoReturn:
  """A job's process."""
  status = BROKEN
  try:
    walls.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    running.keep(fds)
    job = json.loads(running.contents(fds[0]))
    os.close(fds[0])
    if job["mode"] == "ask" and serve:
      os._exit(serve(fds[1]))
    os.chdir(scratch or "/")
    limits = walls.Limits(**job["limits"])
    if scratch is None:
      limits = dataclasses.replace(limits, threads=0)
    walls.raise_walls(
      limits,
      readable=[*readable, "/dev/urandom"],
      writable=[scratch, os.devnull] if scratch else [os.devnull],
      forks=job["mode"] != "call",
    )
    os.write(fds[1], running.BEGUN)
    if job["mode"] == "call":
      status = running.calls(job, fds[1])
    elif job["mode"] == "stdio":
      status = running.stdio(job, fds[1], limits)
    else:
      status = checking.check(job, fds[1], limits, fds[2])
  finally:
    os._exit(status)
