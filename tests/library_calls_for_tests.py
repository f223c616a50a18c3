"""A table of judges that behave badly, for a template of the tests."""

import importlib
import inspect
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from brorl_jax.verdicts.sandbox.library_calls import LibraryCall

seen: list[str] = []


def preload() -> None:
  pass


def echo(*values):
  return list(values)


def pid() -> int:
  return os.getpid()


def slow_echo(text: str, seconds: float) -> str:
  time.sleep(seconds)
  return text


def length(text: str) -> int:
  return len(text)


def hashed(text: str) -> int:
  return hash(text)


def imported(name: str) -> bool:
  missing = name not in sys.modules
  importlib.import_module(name)
  return missing


def remember(text: str) -> list[str]:
  seen.append(text)
  return seen


def sleep() -> None:
  while True:
    time.sleep(1)


def spin() -> None:
  while True:
    pass


def work(seconds: float) -> float:
  """Seconds of its CPU, whatever the wall says."""
  start = time.process_time()
  while time.process_time() - start < seconds:
    pass
  return seconds


def crash(status: int) -> None:
  os._exit(status)


def abort() -> None:
  os.abort()


def segfault() -> None:
  import ctypes

  ctypes.string_at(0)


def allocate() -> None:
  held = []
  while True:
    held.append(mmap.mmap(-1, 1 << 26))  # not touched, which takes seconds


def recurse() -> None:
  recurse()


def leave() -> None:
  sys.exit(0)


def huge(size: int) -> str:
  return "x" * size


def unserialisable() -> object:
  return object()


def say(text: str) -> None:
  """Raw bytes in the place of a reply, then nothing."""
  os.write(3, bytes.fromhex(text))
  time.sleep(100)


def drip() -> None:
  os.write(3, (60_000).to_bytes(4, sys.byteorder))
  while True:
    os.write(3, b" ")
    time.sleep(0.05)


def touch(path: str) -> None:
  pathlib.Path(path).write_text("reached")


def read(path: str) -> str:
  return pathlib.Path(path).read_text()


def connect(port: int) -> None:
  socket.create_connection(("127.0.0.1", port), timeout=1).close()


def fork() -> int:
  return os.fork() or os._exit(0)


def run(program: str) -> None:
  subprocess.run([program], check=True)


def kill(other: int) -> None:
  os.kill(other, signal.SIGTERM)


def environment() -> dict[str, str]:
  return dict(os.environ)


def descriptors() -> list[int]:
  def is_open(fd: int) -> bool:
    try:
      os.fstat(fd)
    except OSError:
      return False
    return True

  return [fd for fd in range(256) if is_open(fd)]


_WALLED = "allocate touch read connect fork run kill".split()
LIBRARY_CALLS = {name: LibraryCall(value, isolated=name in _WALLED)
  for name, value in [*globals().items()]
  if inspect.isfunction(value) and name != "preload"}  # fmt: skip
LIBRARY_CALLS["remember_afresh"] = LibraryCall(
  remember, isolated=True, fresh=True
)
