"""What runs in the processes that judge: a template and its workers.

The template imports the verifiers' libraries once, some seconds, and then only
forks: a worker is ready in milliseconds and shares the memory. No text of a
model ever reaches the template, which has one thread and so may fork.

A worker is what a model's text reaches. Before its first request it closes
every descriptor but its socket and raises the walls of walls.py: no file to
write, none to read but the libraries, no network, no other process. It is ended
by SIGKILL, never asked to stop.

Descriptors a worker comes with, both ends of socket pairs of the host:
  socket  requests and replies, each a length of four bytes and a JSON text
  leash   kept by the template. It says the worker's pid once; when it ends at
          the host, the template kills the worker, and reaps it, and closes it.
Only the template waits for a worker and only it kills, so that a pid it kills
is never another's.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any, NoReturn

from brorl_jax.tasks.sandbox import walls

MAX_REQUEST = 4 << 20  # bytes
MAX_REPLY = 64 << 10
LENGTH = struct.Struct("=I")
PID = struct.Struct("=i")
NEW = b"n"

# sympy's caches and one hard answer fit. Addresses count, not resident memory;
# the template has 0.23 GiB of them.
_MEMORY = 2 << 30
# A worker lives for thousands of answers; the host counts the seconds of each.
_LIMITS = walls.Limits(cpu_s=1 << 30, memory=_MEMORY, open_files=64)
_SOCKET = 3  # its number in a worker
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main(fd: int, judges: str) -> None:
  """Runs the template until the host closes its end of the orders.

  Args:
    fd: The template's end of a stream socket. The first thing on it is a JSON
      line, `{"walls": why there are none or "", "fresh": names of the judges
      whose worker is used once}`, or `{"error": ...}`. Then each byte `NEW`,
      with a worker's two descriptors, starts one.
    judges: Module with `JUDGES`, from a name to a judges.Judge, and
      `preload()`.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  orders = socket.socket(fileno=fd)
  try:
    module = importlib.import_module(judges)
    module.preload()
    table = module.JUDGES
    gc.collect()
    gc.freeze()  # a worker's collections leave the shared pages alone
    hello = {
      "walls": _no_walls(),
      "fresh": [name for name, judge in table.items() if judge.fresh],
    }
  except BaseException as error:
    hello, table = {"error": _describe(error)}, {}
  orders.sendall(json.dumps(hello).encode() + b"\n")
  if "error" not in hello:
    _serve_orders(orders, table, walled=not hello["walls"])


def readable() -> list[str]:
  """What a worker may read: the interpreter's and the libraries' code.

  Not every entry of sys.path: one may be a checkout, with data beside the code.
  """
  kinds = ("stdlib", "platstdlib", "purelib", "platlib")
  places = {sysconfig.get_path(kind) for kind in kinds}
  places |= {p for p in sys.path if p.endswith("-packages")}
  places |= {"/lib", "/lib64", "/usr/lib"}
  return sorted(p for p in places if os.path.isdir(p))


def _serve_orders(
  orders: socket.socket, table: Mapping[str, Any], *, walled: bool
) -> None:
  pids: dict[socket.socket, int] = {}  # by leash
  with selectors.DefaultSelector() as selector:
    selector.register(orders, selectors.EVENT_READ)
    while True:
      ready = [key.fileobj for key, _ in selector.select()]
      for leash in ready:
        if leash is not orders:
          selector.unregister(leash)
          _end(leash, pids.pop(leash))  # type: ignore[arg-type]
      if orders not in ready:
        continue
      order, fds, _, _ = socket.recv_fds(orders, 1, 2)
      if not order:
        break
      leash = socket.socket(fileno=fds[1])
      try:
        pid = os.fork()
        if pid == 0:
          _work(fds[0], table, walled=walled)
        pids[leash] = pid
        selector.register(leash, selectors.EVENT_READ)
        leash.sendall(PID.pack(pid))
      except OSError:
        # Either there can be no more processes now, and the host sees it by the
        # leash; or it let go of this one, which is ended in the next round.
        if leash not in pids:
          leash.close()
      os.close(fds[0])
  for leash, pid in pids.items():
    _end(leash, pid)


def _end(leash: socket.socket, pid: int) -> None:
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  leash.close()


def _no_walls() -> str:
  """Why a worker cannot raise the walls here, "" if it can: it is tried."""
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      walls.raise_walls(_LIMITS, readable=readable(), writable=())
    except BaseException as error:
      os.write(write, _describe(error).encode())
    else:
      os.write(write, b"up")
    os._exit(0)
  os.close(write)
  said = os.read(read, 4096).decode()
  os.close(read)
  os.waitpid(pid, 0)
  return "" if said == "up" else said or "the process that raised them died"


def _work(fd: int, table: Mapping[str, Any], *, walled: bool) -> NoReturn:
  """A worker's whole life, after the fork."""
  status = 1
  try:
    template = os.getppid()
    _die_with(template)
    _keep_only(fd)
    if walled:
      walls.raise_walls(_LIMITS, readable=readable(), writable=())
    _answer(socket.socket(fileno=_SOCKET), table, walled=walled)
    status = 0
  finally:
    # Nothing of the template's, no handler and no finally, is for a worker.
    os._exit(status)


def _die_with(template: int) -> None:
  if sys.platform == "linux":
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != template:
      os._exit(1)


def _keep_only(fd: int) -> None:
  """Leaves `fd`, as number 3, and three ends of nothing below it."""
  nothing = os.open(os.devnull, os.O_RDWR)
  for low in (0, 1, 2):
    os.dup2(nothing, low)
  os.dup2(fd, _SOCKET)
  for name in os.listdir("/dev/fd"):
    if int(name) > _SOCKET:
      try:
        os.close(int(name))
      except OSError:
        pass  # the one that listed them


def _answer(
  link: socket.socket, table: Mapping[str, Any], *, walled: bool
) -> None:
  """Judges what it is asked until the host is gone."""
  stream = link.makefile("rb")
  while True:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
      return
    (size,) = LENGTH.unpack(head)
    if size > MAX_REQUEST:
      return
    body = stream.read(size)
    if len(body) < size:
      return
    try:
      reply = {"value": _judge(body, table, walled=walled)}
      reply["rss"] = _resident()
      data = json.dumps(reply).encode()
      if len(data) > MAX_REPLY:
        raise ValueError(f"a reply of {len(data)} bytes, at most {MAX_REPLY}")
    # What a model's text does may raise anything, SystemExit too.
    except BaseException as error:
      data = json.dumps({"error": _describe(error)}).encode()
    link.sendall(LENGTH.pack(len(data)) + data)


def _judge(body: bytes, table: Mapping[str, Any], *, walled: bool) -> Any:
  name, args = json.loads(body)
  if name not in table:
    raise LookupError(
      f"no judge is called {name!r}; there are {', '.join(sorted(table))}"
    )
  judge = table[name]
  if judge.walls and not walled:
    raise PermissionError(
      f"{name!r} may execute the text it judges and there are no walls here"
    )
  return judge.function(*args)


def _resident() -> int:
  """The most kilobytes of memory that it ever had."""
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return most // 1024 if sys.platform == "darwin" else most


def _describe(error: BaseException) -> str:
  """Its type and message, in one short line."""
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
