"""A zygote that has the verifiers' libraries loaded, and what it forks.

The zygote imports them once, some seconds, and then only forks: clones of
itself, one for each thread of the host, that share the memory; and they the
processes that answer, ready in milliseconds. No text of a model ever reaches a
zygote.

A process that answers is what a model's text reaches. Before its first question
it has closed every descriptor but its socket and raised the walls of walls.py:
no file to write, none to read but the libraries, no network, no other process.
Questions and replies are a length of four bytes and a JSON text.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks.sandbox import inside, running, walls

MAX_REQUEST = 4 << 20  # bytes
MAX_REPLY = 64 << 10
LENGTH = struct.Struct("=I")

# Addresses count, not resident memory; the zygote has 0.2 GiB of them. It lives
# for thousands of answers; the host counts the seconds of each.
_LIMITS = walls.Limits(total_s=1 << 30, memory=2 << 30)
_SOCKET = 3  # its number in a process that answers


def main(control: int, judges: str) -> None:
  """Becomes a zygote whose jobs in the mode "ask" are asked the judges.

  Its hello has `walls`, why there are none or "", and `fresh`, the names of
  the judges whose process is used once; or `error`.

  Args:
    control: See inside.main.
    judges: Module with `JUDGES`, from a name to a judges.Judge, and
      `preload()`.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  table: Mapping[str, Any] = {}
  try:
    module = importlib.import_module(judges)
    module.preload()
    table = module.JUDGES
    fresh = [name for name, judge in table.items() if judge.fresh]
    hello = {"walls": _no_walls(), "fresh": fresh}
  except BaseException as error:
    hello = {"error": _describe(error)}
  serve = functools.partial(_serve, table=table, walled=not hello.get("walls"))
  inside.main(control, readable=(), namespaces=False, serve=serve, hello=hello)


def readable() -> list[str]:
  """What judges may read: the interpreter's and the libraries' code.

  Not every entry of sys.path: one may be a checkout, with data beside the code.
  """
  kinds = ("stdlib", "platstdlib", "purelib", "platlib")
  places = {sysconfig.get_path(kind) for kind in kinds}
  places |= {p for p in sys.path if p.endswith("-packages")}
  places |= {"/lib", "/lib64", "/usr/lib"}
  return sorted(p for p in places if os.path.isdir(p))


def _no_walls() -> str:
  """Why they cannot be raised here, "" if they can: it is tried."""
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
  said = running.contents(read).decode()
  os.close(read)
  os.waitpid(pid, 0)
  return "" if said == "up" else said or "the process that raised them died"


def _serve(fd: int, *, table: Mapping[str, Any], walled: bool) -> int:
  """Answers what it is asked until the host is gone."""
  os.dup2(fd, _SOCKET)
  running.keep([_SOCKET])
  if walled:
    walls.raise_walls(_LIMITS, readable=readable(), writable=())
  link = socket.socket(fileno=_SOCKET)
  stream = link.makefile("rb")
  while True:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
      return 0
    body = stream.read(*LENGTH.unpack(head))
    try:
      value = _judge(body, table, walled=walled)
      data = json.dumps({"value": value}).encode()
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


def _describe(error: BaseException) -> str:
  """Its type and message, in one short line."""
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
