"""The command line, clock and output of a benchmarked system.

  python SCRIPT --workload=w1 --n=512 --dtype=float32 [--serve | --repeats=3]

The first run, which compiles, is not measured. Each later run prints a line of
JSON: useful tokens (up to and including the end token of a response), wall and
CPU seconds, memory. With --serve it runs once per line on standard input, so
that two systems can take turns, and first prints a line that it is ready. Only
these lines go to standard output; prints of libraries go to standard error.

Standard library only, as in workloads.py.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import queue
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from launch.bench import flags
from launch.bench.workloads import Workload, prompt_ids

# From a seed to a row of token ids for each response.
Run = Callable[[int], Iterable[Any]]


class Task:
  """What to sample.

  Attributes:
    workload: Lengths and the shape of the model.
    prompts: Token ids of each prompt.
    n: Responses of each.
    dtype: "float32" or "bfloat16".
    slots: Responses in progress at a time, for a system that has slots.
    threads: CPUs to use.
    idle_bytes: Memory before caches were made.
    idle_at: `time.perf_counter` then.
    parts: Seconds of the last run's parts, by name, for its line.
  """

  def __init__(self, workload: Workload, n: int, dtype: str):
    self.workload = workload
    self.prompts = [prompt_ids(workload, i) for i in range(workload.prompts)]
    self.n = n
    self.dtype = dtype
    self.slots = min(workload.slots or n, n)
    self.threads = cpus()
    self.idle_bytes: int | None = None
    self.idle_at = 0.0
    self.parts: dict[str, float] = {}

  def idle(self) -> None:
    """Libraries are loaded, weights too if possible; caches are not yet made.

    Memory is counted from here, and the seconds until responses are there.
    """
    _give_back()
    self.idle_bytes = _resident()
    self.idle_at = time.perf_counter()


def main(
  start: Callable[[Task], tuple[str, dict[str, str], Run]],
  *,
  any_heads: bool = False,
  **options,
) -> None:
  """Runs the command line.

  Args:
    start: Builds a model of random weights, calls task.idle(), and gives the
      the name and version of the system, versions of its libraries, and a
      function that runs it.
    any_heads: Heads need not be as wide as the model together. Where a library
      derives their size from the width, other shapes are refused.
    **options: See `parse`.
  """
  task, given = parse(**options)
  m = task.workload.model
  if not any_heads and m.heads * m.head_size != m.width:
    sys.exit(
      f"error: --model={given.model} has {m.heads} heads of {m.head_size}; "
      f"this system needs heads x head_size = {m.width}"
    )
  say = _take_stdout()
  system, versions, run = start(task)
  if task.idle_bytes is None:
    raise RuntimeError("start() has to call task.idle()")
  about = {
    "system": system,
    "workload": given.workload,
    "n": task.n,
    "dtype": task.dtype,
  }
  first = time.perf_counter()
  measure(task, run, 0)
  end = time.perf_counter()
  if given.serve:
    ready = {"ready": True, "system": system}
    ready["first_run_s"] = round(end - first, 3)
    # With what a system makes before its first run, which may be all.
    ready["ready_s"] = round(end - task.idle_at, 3)
    versions = {"python": platform.python_version(), **versions}
    say({**ready, "idle_bytes": task.idle_bytes, "versions": versions})
    for seed, _ in enumerate(sys.stdin, 1):
      say({**about, **measure(task, run, seed)})
  else:
    for seed in range(1, given.repeats + 1):
      say({**about, **measure(task, run, seed)})
  if Trainer.held:  # would wait for ever for its next step
    os._exit(0)


def cpus() -> int:
  """Those this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def parse(
  *,
  accelerator: Callable[[], bool] = lambda: False,
  default: str = "w1",
  more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
  argv: Sequence[str] | None = None,
) -> tuple[Task, argparse.Namespace]:
  """What the command line asks for, or `argv`.

  Args:
    accelerator: Whether there is one, without which workloads that are too
      large for a CPU are refused. Asked for those alone.
    default: The workload if none is given.
    more: Adds flags of a script's own. All integers are at least 1.
    argv: Flags in place of the command line's.
  """
  parser = flags.parser(default, more)
  given = parser.parse_args(argv)
  try:
    workload = flags.workload(given, accelerator)
    return Task(workload, workload.n, workload.dtype), given
  except ValueError as e:
    parser.error(str(e))


def processor() -> str:
  """Its name, as the system tells it."""
  found = re.search(r"^model name\s*: (.*)$", _read("cpuinfo"), re.MULTILINE)
  return found[1] if found else platform.processor() or platform.machine()


def _take_stdout() -> Callable[[dict], None]:
  """Redirects standard output to standard error; returns the JSON printer."""
  sys.stdout.flush()
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)

  def say(line: dict) -> None:
    print(json.dumps(line), file=out, flush=True)

  return say


def measure(task: Task, run: Run, seed: int) -> dict[str, Any]:
  """One run, its responses checked and counted."""
  wall, cpu = time.perf_counter(), cpu_s()
  rows = run(seed)
  wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
  responses = [_useful([int(t) for t in row], task.workload) for row in rows]
  if len(responses) != task.n * len(task.prompts):
    raise RuntimeError(f"{len(responses)} responses instead of {task.n} each")
  peak = peak_bytes()
  return {
    "tokens": sum(map(len, responses)),
    "wall_s": round(wall, 4),
    "cpu_s": round(cpu, 4),
    "peak_bytes": peak,
    "memory_above_idle_bytes": peak - (task.idle_bytes or 0),
    "unique": len(set(responses)),
    **{name: round(seconds, 4) for name, seconds in task.parts.items()},
  }


class Trainer:
  """Runs the training loop of a library one step at a time.

  The loop runs in a separate thread, which waits before each step.
  """

  held = False  # whether there is one in this process

  def __init__(self, train: Callable[["Trainer"], None]):
    Trainer.held = True
    self._go: queue.Queue[None] = queue.Queue()
    self._done: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=self._run, args=(train,), daemon=True).start()

  def _run(self, train) -> None:
    try:
      train(self)
      raise RuntimeError("the trainer ended by itself")
    except BaseException as e:
      self._done.put(e)

  def wait(self) -> None:
    """Called by the loop before a step."""
    self._go.get()

  def done(self, result: Any) -> None:
    """Called by the loop after a step."""
    self._done.put(result)

  def step(self) -> Any:
    """Runs one step and returns the value passed to `done`."""
    self._go.put(None)
    result = self._done.get()
    if isinstance(result, BaseException):
      raise result
    return result


class Clock:
  """Seconds of the wall and of the CPU that a part of a run takes."""

  def __init__(self):
    self.wall_s = self.cpu_s = 0.0

  def __enter__(self):
    self._wall, self._cpu = time.perf_counter(), cpu_s()

  def __exit__(self, *_):
    self.wall_s += time.perf_counter() - self._wall
    self.cpu_s += cpu_s() - self._cpu


def _useful(row: Sequence[int], workload: Workload) -> tuple[int, ...]:
  """The response up to its end token, or the whole response."""
  stops = set(workload.stop_ids)
  for i, token in enumerate(row):
    if token in stops:
      return tuple(row[: i + 1])
  if len(row) != workload.new and not workload.lengths:
    raise RuntimeError(f"a response of {len(row)} tokens that did not end")
  return tuple(row)


def cpu_s() -> float:
  """Of all threads and of all processes below this one, ended or not."""
  ended = resource.getrusage(resource.RUSAGE_CHILDREN)
  seconds = time.process_time() + ended.ru_utime + ended.ru_stime
  for pid in _descendants(os.getpid()):
    # After the name, which may hold spaces: utime, stime, cutime, cstime.
    fields = _read(pid, "stat").rpartition(")")[2].split()[11:15]
    seconds += sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
  return seconds


def _give_back() -> None:
  """Returns to the system what this process freed and glibc keeps.

  A run would take it again without being counted: drawing the weights of a
  vocabulary of 151,936 left more than w1's rollouts need.
  """
  try:
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError, TypeError):  # not glibc
    pass


def _resident() -> int:
  """Memory now. Forgets the peak so far, where the kernel lets it."""
  total = 0
  for pid in [os.getpid(), *_descendants(os.getpid())]:
    try:
      pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
      pass
    total += _status(pid, "VmRSS")
  return total or _max_rss()


def peak_bytes() -> int:
  """Most memory since then; the sum of each process's own peak."""
  pids = [os.getpid(), *_descendants(os.getpid())]
  return sum(_status(pid, "VmHWM") for pid in pids) or _max_rss()


def _max_rss() -> int:
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _descendants(pid: int) -> list[int]:
  """Processes below one; none where there is no /proc."""
  below = []
  for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
    try:
      below += map(int, task.read_text().split())
    except OSError:
      pass
  return below + [pid for child in below for pid in _descendants(child)]


def _status(pid: int, name: str) -> int:
  for line in _read(pid, "status").splitlines():
    if line.startswith(name + ":"):
      return int(line.split()[1]) * 1024
  return 0


def _read(*names: object) -> str:
  try:
    return pathlib.Path("/proc", *map(str, names)).read_text()
  except OSError:  # ended meanwhile, or there is no /proc
    return ""
