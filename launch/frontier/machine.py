"""Processes on the cores of this machine, and how far they are."""

import concurrent.futures
import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# Starts a process that ends when this one does. Not a preexec_fn, because jax
# has threads, and between fork and exec nothing may need their locks.
PR_SET_PDEATHSIG = 1
_WITH_ME = (
  "import ctypes, os, sys; "
  f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}); "
  "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
ROOT = pathlib.Path(__file__).parents[2]


class Machine:
  """Cores that runs share, one lane each."""

  def __init__(self, lanes: int):
    cores = sorted(os.sched_getaffinity(0))
    self._lanes = queue.SimpleQueue[set[int]]()
    pin = 1 < lanes <= len(cores)
    for lane in range(lanes):
      self._lanes.put({cores[lane]} if pin else set(cores))
    self._pool = concurrent.futures.ThreadPoolExecutor(lanes)

  def each(self, do: Callable[[Any, set[int]], object], some: Sequence) -> None:
    """`do` with each of them and the cores of a lane that is free.

    Raises what the first failure raises.
    """

    def one(what) -> None:
      cores = self._lanes.get()
      try:
        do(what, cores)
      finally:
        self._lanes.put(cores)

    list(self._pool.map(one, some))


def share_a_gpu(lanes: int) -> None:
  """Gives each run a share of a GPU's memory, if the user names none.

  One run alone would take most of it. A quarter is left for what is not in
  XLA's pool: each process has its own context.
  """
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  if not any(map(os.environ.get, names)):
    os.environ[names[0]] = f"{0.75 / lanes:.3f}"


def call(folder: pathlib.Path, cores: Iterable[int], *args: object) -> None:
  """Runs a Python process on these cores; its output goes to FOLDER.log."""
  folder.mkdir(parents=True, exist_ok=True)
  # Beside the folder: a run takes an empty one only.
  log = folder.with_name(f"{folder.name}.log")
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(
      filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    ),
    "JAX_COMPILATION_CACHE_DIR": os.environ.get(
      "JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled")
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  with log.open("a") as out:
    process = subprocess.Popen(
      [sys.executable, "-c", _WITH_ME, *map(str, args)],
      cwd=ROOT,
      env=environment,
      stdout=out,
      stderr=subprocess.STDOUT,
    )
    os.sched_setaffinity(process.pid, set(cores))
    if process.wait():
      tail = log.read_text().splitlines()[-3:]
      raise SystemExit(f"{folder} failed; {log} ends with:\n" + "\n".join(tail))


@contextlib.contextmanager
def one_line() -> Iterator[None]:
  """Ends a command with one line if a file is in its way."""
  try:
    yield
  except OSError as e:
    where = f"{e.filename}: " if e.filename else ""
    raise SystemExit(f"error: {where}{e.strerror or e}") from None


def say(text: str) -> None:
  """Now, also where the output is a file."""
  print(text, flush=True)
