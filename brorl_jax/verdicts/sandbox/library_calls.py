"""Library calls on model text, and the workers that answer them.

    worker = LibraryWorker()
    worker.ask("symbolic", r"\\frac{1}{2}", "0.5", timeout=3.0)   # True
    worker.close()

A call takes and returns JSON values. A process that takes too long is killed,
so no call measures time. If a call raises, the verifier has failed.

The first worker starts a zygote, which imports the libraries once, in seconds,
and then only forks: it reads no model text. Each worker is forked from it
within milliseconds, with a guard (process.py). Before its first question it
closes every descriptor but its link and restricts itself (seccomp_landlock.py):
it can write no file, read only the libraries, and reach neither the network nor
another process.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from brorl_jax.verdicts.sandbox import jail_main, process, seccomp_landlock
from brorl_jax.verdicts.sandbox.process import Failed
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

MAX_QUESTION = 4 << 20  # bytes
_MAX_REPLY = 64 << 10
_QUESTIONS = 5_000  # per process, because the caches of libraries grow
_LOAD_S = 120.0  # imports take 3 s, 20 s on a busy machine
_CLONE_S = 60.0  # a worker starts within milliseconds
_KEPT = ("HOME", "LD_LIBRARY_PATH", "NLTK_DATA", "PATH")
# No threads: a fork does not copy them.
_ENVIRONMENT = {
  "MPLBACKEND": "agg",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
}
# The limit counts address space; the zygote takes 0.2 GiB of it. A
# process gives thousands of answers; the host counts the seconds of each.
_LIMITS = Limits(total_s=1 << 30, memory=2 << 30)
_LINK = 3  # its descriptor in a worker


@dataclasses.dataclass(frozen=True)
class LibraryCall:
  """A function and the process that it needs."""

  function: Callable[..., Any]  # from JSON values to a JSON value
  # The function may execute model text. Without isolation the call is refused.
  isolated: bool = False
  # Executed text could affect the next call: its process answers no other.
  fresh: bool = False


def symbolic(answer: str, gold: str) -> bool:
  from brorl_jax.verdicts.math import symbolic

  return symbolic.symbolic(answer, gold)


def gym(answer: str, entry: Mapping[str, Any]) -> float | dict[str, str]:
  """The score by reasoning-gym, or {"raised": type of the exception}."""
  from brorl_jax.verdicts import gym

  scorer = gym.scorer(entry["metadata"]["source_dataset"])
  try:
    return float(scorer(answer, entry))
  except MemoryError:
    raise  # the verifier failed, not the answer
  except Exception as error:  # most raise only on malformed answers
    return {"raised": type(error).__name__}


def instruction(kind: str, kwargs: Mapping[str, Any], response: str) -> bool:
  from brorl_jax.verdicts.instructions import if_library

  return if_library.checked(kind, kwargs, response)


LIBRARY_CALLS: Mapping[str, LibraryCall] = {
  "symbolic": LibraryCall(symbolic, isolated=True),
  # The scorers of these tasks execute the answer; see verdicts/gym.
  "gym": LibraryCall(gym, isolated=True, fresh=True),
  "instruction": LibraryCall(instruction),
}


def preload() -> None:
  """Imports the installed libraries and runs each once, which takes seconds."""
  # A worker could not: it may not read every file, and would pay each time.
  from brorl_jax.verdicts import gym

  logging.disable(logging.CRITICAL)  # else one warning per answer
  for warm in (
    lambda: symbolic(r"\sqrt{2}+1", r"1+\sqrt{2}"),
    lambda: symbolic("x<2", r"(-\infty,2)"),
    lambda: [*map(gym.scorer, sorted(gym.JAILED))],
    lambda: instruction("count:numbers", {"N": 1}, "one 1"),
  ):
    # An optional extra may be missing; a call that needs it names it.
    with contextlib.suppress(ImportError, LookupError):
      warm()


# The host's side.


class LibraryWorker(process.Worker):
  """A process that answers one library call at a time."""

  def __init__(self, calls: str = __name__):
    super().__init__(reply_bytes=_MAX_REPLY)
    self._calls = calls
    self._zygote: process.Process | None = None
    self._fresh: list[str] = []
    self._asked = 0

  def ask(self, call: str, *args: Any, timeout: float) -> Any:
    """The result of a library call, any JSON value. The caller checks it.

    `args` are JSON values of at most 4 MiB together, `timeout` seconds of CPU
    time, or of sleep; see process.py. Raises Failed without an answer.
    """
    question = json.dumps([call, args]).encode()
    with self._question(call):
      if (n := len(question)) > MAX_QUESTION:
        raise Failed(f"a question of {n} bytes; the limit is {MAX_QUESTION}")
      if not self._running():
        self._begin_again()
      assert self._guard is not None
      clock = process.JobClock(self._guard.pid, timeout, math.inf)
      clock.tested()  # earlier questions do not count
      value = self._answer(question, clock, process.PATIENCE * timeout)
    self._asked += 1
    if call in self._fresh or self._asked >= _QUESTIONS:
      self.close()
    return value

  def _begin_again(self) -> None:
    self._asked = 0
    try:
      self._fresh = self._begin(_CLONE_S)
    except Failed:
      if self._stopped or self._zygote is None:
        raise
      # The zygote was killed or stopped, before it read any model text.
      with _loading:
        if _loaded.get(self._calls) is self._zygote:
          del _loaded[self._calls]
      self._zygote.close()
      self._fresh = self._begin(_CLONE_S)

  def _start(self, life: socket.socket, link: socket.socket) -> None:
    self._zygote = zygote = libraries(self._calls)
    # One byte with its descriptors stays whole when several threads send. If
    # the zygote has ended, no guard says hello.
    with contextlib.suppress(OSError):
      socket.send_fds(zygote.life, [b"w"], [life.fileno(), link.fileno()])


def isolation_error(calls: str = __name__) -> str:
  """Why this machine cannot isolate workers, or ""; may raise Failed."""
  return libraries(calls).hello["isolation_error"]


_loaded: dict[str, process.Process] = {}
_loading = threading.Lock()


def libraries(calls: str) -> process.Process:
  """This process's zygote for a table; starts it or raises Failed."""
  with _loading:
    zygote = _loaded.get(calls)
    # In a fork of ours it is not a child of the fork, and so not alive.
    if zygote is None or not zygote.alive():
      kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
      env = {**kept, **process.ENVIRONMENT, **_ENVIRONMENT}
      how = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
      start = lambda life: process.python(
        __name__, [life], calls, flag="-s", env=env, cwd="/", **how
      )
      zygote = process.Process(start, patience_s=_LOAD_S)
      if "error" in zygote.hello:
        zygote.close()
        error = zygote.hello["error"]
        raise Failed(f"the verifier libraries do not load: {error}")
      _loaded[calls] = zygote
    return zygote


# The zygote, and the workers that it forks.


def main(descriptors: Sequence[int], calls: str) -> NoReturn:
  """Becomes a zygote; an order has the descriptors of a life and a link."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  jail_main.limit_descriptors()
  host = socket.socket(fileno=descriptors[0])
  table: Mapping[str, Any] = {}
  # With "isolation_error", why processes cannot be isolated or "", or "error".
  hello: dict[str, Any] = {"pid": os.getpid()}
  try:
    module = importlib.import_module(calls)
    module.preload()
    table = module.LIBRARY_CALLS
    hello["isolation_error"] = _try_isolation()
    seccomp_landlock.drop_capabilities()
  except BaseException as error:
    hello["error"] = process.describe(error)
  gc.collect()
  gc.freeze()  # a collection in a worker must not touch shared pages
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards leave no zombies
  process.tell(host.fileno(), hello)
  isolated = not hello.get("isolation_error")
  work = functools.partial(_work, table=table, isolated=isolated)
  while True:
    order, fds, _, _ = socket.recv_fds(host, 1, 2)
    if not order:
      os._exit(0)  # workers end with their own sockets
    if os.fork() == 0:
      host.close()
      os.setsid()  # a guard kills its process group
      life, link = fds
      process.guard(life, link, work)
    for fd in fds:
      os.close(fd)


def readable() -> list[str]:
  """Readable paths: the code of the interpreter and of the libraries."""
  # Not all of sys.path: an entry may be a checkout that also holds data.
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
    result = "up"
    try:
      seccomp_landlock.isolate(_LIMITS, readable=readable(), writable=())
    except BaseException as error:
      result = process.describe(error)
    os.write(write, result.encode())
    os._exit(0)
  os.close(write)
  result = jail_main.contents(read).decode()
  os.close(read)
  os.waitpid(pid, 0)
  return "" if result == "up" else result or "the test process died"


def _work(link: int, *, table: Mapping[str, Any], isolated: bool) -> None:
  os.dup2(link, _LINK)
  jail_main.keep([_LINK])
  if isolated:
    seccomp_landlock.isolate(_LIMITS, readable=readable(), writable=())

  def answer(question: Any) -> Any:
    name, args = question
    if name not in table:
      known = ", ".join(sorted(table))
      raise LookupError(f"unknown library call {name!r}; use one of {known}")
    if table[name].isolated and not isolated:
      why = "may execute model text, and this machine cannot isolate it"
      raise PermissionError(f"{name!r} {why}")
    return table[name].function(*args)

  fresh = [name for name, call in table.items() if call.fresh]
  process.serve(_LINK, fresh, answer, reply_bytes=_MAX_REPLY)
