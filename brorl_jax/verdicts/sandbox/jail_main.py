"""A zygote: a warm interpreter that forks one process per job.

    main(control, readable=["/usr/lib"], namespaces=True)

process.py starts it and sends orders over a socket. The byte `JOB` comes with
descriptors: a memory file with the job, a pipe for the results and, for a
check, a memory file with the tests. The interpreter reads none of them. It
forks, waits until the job's process and all its descendants have ended, and
replies with the wait status and their CPU seconds. When the socket closes, it
kills the job and ends. The byte `CLONE` comes with another socket; the zygote
then forks a copy of itself. A job has one of four modes:

  call    one process calls the function on one input after the other
  stdio   each input is the stdin of a process; the results are its stdout. The
          processes are forked from one that compiled the program and never
          runs it. A process takes up to "together" inputs, each with new
          standard streams and a new __main__, unless it ends or uses threads
  check   one process has the program, another the tests that call it. Two
          pipes join them; neither sees the other's memory
  ask     one process answers questions with the libraries that are loaded; see
          library_zygote.py

No process that runs the program holds an expected value.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from brorl_jax.verdicts.sandbox import (
  check_runner,
  program_runner,
  protocol,
  seccomp_landlock,
)
from brorl_jax.verdicts.sandbox.protocol import CLONE, STATUS, Limits

_TMP = "/tmp"
_TMP_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
_TMP_FLAGS = 2 | 4 | 8  # no setuid, no devices, no programs
# Modules that solutions import most, loaded once. The list is short because a
# fork costs more in a larger interpreter. threading and random are left out:
# each runs code in every forked process.
_WARM = """
  bisect collections copy dataclasses functools heapq itertools json math
  operator re string
"""

# For the mode "ask": answers on a socket until its other end closes.
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
    control: Our end of a packet socket.
    readable: Paths that jobs may read: the files of the interpreter.
    namespaces: Whether this process has its own namespaces. Then it mounts a
      folder for scratch files, which ends with it. Otherwise jobs can write
      nothing and start no threads, because the kernel would count the threads
      of all jobs together.
    serve: Runs jobs in the mode "ask".
    hello: Entries of the first message, in addition to the pid.
  """
  most = program_runner.OPEN_FILES
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  if namespaces:
    seccomp_landlock.mount_tmpfs(_TMP, _TMP_FLAGS, _TMP_OPTIONS)
  seccomp_landlock.drop_capabilities()
  for name in _WARM.split():
    __import__(name)
  # `site` is not loaded, and many programs end with exit().
  for name in ("exit", "quit"):
    setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
  gc.collect()
  gc.freeze()  # a collection in a program must not touch shared pages
  _obey(control, readable, namespaces, serve, hello)


def _obey(
  control: int,
  readable: Sequence[str],
  namespaces: bool,
  serve: Serve | None,
  hello: Mapping[str, Any],
) -> NoReturn:
  """Runs one order after the other until the socket closes."""
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
      # If this fails the interpreter ends, and its scratch folder with it.
      shutil.rmtree(scratch)


def _begin(control: int, hello: Mapping[str, Any]) -> socket.socket:
  seccomp_landlock.adopt_orphans()
  sock = socket.socket(fileno=control)
  sock.send(json.dumps({"pid": os.getpid(), **hello}).encode())
  return sock


def _await(sock: socket.socket, pid: int) -> tuple[int, float]:
  """Waits for a job; ends with it if the host closes the socket."""
  ended = os.pidfd_open(pid)
  poll = select.poll()
  poll.register(ended, select.POLLIN)
  poll.register(sock, select.POLLIN)
  if ended not in dict(poll.poll()):  # no order comes during a job
    _end([pid])
  os.close(ended)
  return _reap(pid)


def _bury(clones: set[int]) -> None:
  """Reaps the clones that have ended."""
  while clones and (pid := os.waitpid(-1, os.WNOHANG)[0]):
    clones.discard(pid)


def _end(children: Iterable[int]) -> NoReturn:
  """Kills the children and waits for all, so that no zombie remains."""
  try:
    for pid in children:
      os.kill(pid, signal.SIGKILL)
    _reap(0)
  finally:
    os._exit(0)


def _reap(pid: int) -> tuple[int, float]:
  """Waits for all descendants; wait status of `pid`, CPU seconds of all."""
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
  """The process of a job."""
  status = protocol.BROKEN
  try:
    seccomp_landlock.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    program_runner.keep(fds)
    job = json.loads(program_runner.contents(fds[0]))
    os.close(fds[0])
    if job["mode"] == "ask" and serve:
      os._exit(serve(fds[1]))
    os.chdir(scratch or "/")
    limits = Limits(**job["limits"])
    if scratch is None:
      limits = dataclasses.replace(limits, threads=0)
    seccomp_landlock.isolate(
      limits,
      readable=[*readable, "/dev/urandom"],
      writable=[scratch, os.devnull] if scratch else [os.devnull],
      forks=job["mode"] != "call",
    )
    os.write(fds[1], protocol.BEGUN)
    if job["mode"] == "call":
      status = program_runner.calls(job, fds[1])
    elif job["mode"] == "stdio":
      status = program_runner.stdio(job, fds[1], limits)
    else:
      status = check_runner.check(job, fds[1], limits, fds[2])
  finally:
    os._exit(status)
