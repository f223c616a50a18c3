"""A zygote with the verifier libraries loaded, and the processes it forks.

The zygote imports the libraries once, which takes seconds. It then only forks.
Each thread of the host gets a clone that shares the memory, and the clone forks
the process that answers, within milliseconds. No zygote reads model text.

The answering process reads model text. Before its first question it closes
every descriptor but its socket and restricts itself (seccomp_landlock.py): it
can write no file, read only the libraries, and reach neither the network nor
another process. Questions and replies are four bytes of length and a JSON text.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts.sandbox import (
  jail_main,
  program_runner,
  seccomp_landlock,
)
from brorl_jax.verdicts.sandbox.protocol import LENGTH, MAX_REPLY, Limits

# The limit counts address space; the zygote takes 0.2 GiB of it. A
# process gives thousands of answers; the host counts the seconds of each.
_LIMITS = Limits(total_s=1 << 30, memory=2 << 30)
_SOCKET = 3  # its descriptor in the answering process


def main(control: int, calls: str) -> None:
  """Becomes a zygote whose jobs in the mode "ask" run library calls.

  Its hello has `isolation_error` (why processes cannot be isolated, or "") and
  `fresh` (calls that need a new process each time), or `error`.

  Args:
    control: See jail_main.main.
    calls: Module with `LIBRARY_CALLS`, a LibraryCall by name, and `preload()`.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  table: Mapping[str, Any] = {}
  try:
    module = importlib.import_module(calls)
    module.preload()
    table = module.LIBRARY_CALLS
    fresh = [name for name, call in table.items() if call.fresh]
    hello = {"isolation_error": _try_isolation(), "fresh": fresh}
  except BaseException as error:
    hello = {"error": _describe(error)}
  serve = functools.partial(
    _serve, table=table, isolated=not hello.get("isolation_error")
  )
  jail_main.main(
    control, readable=(), namespaces=False, serve=serve, hello=hello
  )


def readable() -> list[str]:
  """Readable paths: the code of the interpreter and of the libraries.

  Not all of sys.path: an entry may be a checkout that also holds data.
  """
  kinds = ("stdlib", "platstdlib", "purelib", "platlib")
  places = {sysconfig.get_path(kind) for kind in kinds}
  places |= {p for p in sys.path if p.endswith("-packages")}
  places |= {"/lib", "/lib64", "/usr/lib"}
  return sorted(p for p in places if os.path.isdir(p))


def _try_isolation() -> str:
  """Isolates a test process; returns why that failed, or ""."""
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      seccomp_landlock.isolate(_LIMITS, readable=readable(), writable=())
    except BaseException as error:
      os.write(write, _describe(error).encode())
    else:
      os.write(write, b"up")
    os._exit(0)
  os.close(write)
  result = program_runner.contents(read).decode()
  os.close(read)
  os.waitpid(pid, 0)
  return "" if result == "up" else result or "the test process died"


def _serve(fd: int, *, table: Mapping[str, Any], isolated: bool) -> int:
  """Answers questions until the host closes the socket."""
  os.dup2(fd, _SOCKET)
  program_runner.keep([_SOCKET])
  if isolated:
    seccomp_landlock.isolate(_LIMITS, readable=readable(), writable=())
  link = socket.socket(fileno=_SOCKET)
  stream = link.makefile("rb")
  while True:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
      return 0
    body = stream.read(*LENGTH.unpack(head))
    try:
      value = _call(body, table, isolated=isolated)
      data = json.dumps({"value": value}).encode()
      if len(data) > MAX_REPLY:
        raise ValueError(
          f"a reply of {len(data)} bytes; the limit is {MAX_REPLY}"
        )
    # Model text may raise anything, SystemExit too.
    except BaseException as error:
      data = json.dumps({"error": _describe(error)}).encode()
    link.sendall(LENGTH.pack(len(data)) + data)


def _call(body: bytes, table: Mapping[str, Any], *, isolated: bool) -> Any:
  name, args = json.loads(body)
  if name not in table:
    raise LookupError(
      f"unknown library call {name!r}; use one of {', '.join(sorted(table))}"
    )
  call = table[name]
  if call.isolated and not isolated:
    raise PermissionError(
      f"{name!r} may execute model text, and this machine cannot isolate it"
    )
  return call.function(*args)


def _describe(error: BaseException) -> str:
  """Type and message of an error, in one short line."""
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
