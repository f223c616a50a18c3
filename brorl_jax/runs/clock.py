"""Wall time, processor time, compilation time, and the cores that were had."""

import contextlib
import math
import os
import pathlib
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")

_PROC, _HERTZ = pathlib.Path("/proc"), os.sysconf("SC_CLK_TCK")
# A step is worth a warning if it had fewer than this share of the cores that it
# could have used, and lost more than these seconds of a core: less is noise.
_SHARE, _LOST_S = 0.7, 1.0
_others_seen = [-math.inf, 0.0]  # when it was read, and what it was


class Clock(NamedTuple):
  """Seconds since the process started, or an arbitrary start."""

  wall: float
  process: float  # processor time of all threads
  compiling: float  # wall time
  compiling_process: float  # processor time
  # Of each thread: ready to run, but without a core.
  waited: Mapping[str, float] = types.MappingProxyType({})
  others: float = 0.0  # processor time of other programs on our cores


# The time of compilation in this process while it is counted.
_compiler = types.SimpleNamespace(wall=0.0, process=0.0, lowered=0.0)


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
  """Called at the end of each phase; compilation starts after lowering."""
  if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
    _compiler.lowered = time.process_time()
  if event == "/jax/core/compile/backend_compile_duration":
    _compiler.wall += duration_secs
    _compiler.process += time.process_time() - _compiler.lowered


@contextlib.contextmanager
def counting() -> Iterator[None]:
  """Counts compilation inside this context; outside `now` does not count it.

  jax calls a listener for every program: registered while training needs it.
  """
  jax.monitoring.register_event_duration_secs_listener(_on_event)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(_on_event)


def now() -> Clock:
  """The clocks now."""
  spent = time.perf_counter(), time.process_time()
  return Clock(*spent, _compiler.wall, _compiler.process, _waited(), _others())


def cores() -> Collection[int]:
  """The cores that this process may use; macOS cannot tell which."""
  usable = getattr(os, "sched_getaffinity", None)
  return usable(0) if usable else range(os.cpu_count() or 1)


def _waited() -> dict[str, float]:
  """By thread; empty where the kernel does not say."""
  waited = {}
  for path in _PROC.glob("self/task/*/schedstat"):
    with contextlib.suppress(OSError, IndexError):  # this thread has ended
      waited[path.parent.name] = int(path.read_text().split()[1]) / 1e9
  return waited


def _others() -> float:
  """Processor time on our cores, less that of this process and all below it."""
  parent, used, seen = {}, {}, time.perf_counter()
  if seen - _others_seen[0] < _LOST_S or not (_PROC / "stat").exists():
    return _others_seen[1]  # it takes 5 ms for 200 processes
  for path in _PROC.glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # this process has ended
      fields = path.read_text().rpartition(")")[2].split()
      # User and system time, its own and that of children it waited for.
      used[path.parent.name] = sum(map(int, fields[11:15]))
      parent[path.parent.name] = fields[1]
  ours, more = {str(os.getpid())}, {str(os.getpid())}
  while more := {pid for pid in parent if parent[pid] in more} - ours:
    ours |= more
  rows = map(str.split, (_PROC / "stat").read_text().splitlines())
  ticks = {name: [*map(int, row)] for name, *row in rows}
  each = [ticks.get(f"cpu{core}", []) for core in cores()]
  # All but idle and waiting for a disk.
  busy = sum(sum(row[:3]) + sum(row[5:8]) for row in each)
  busy -= sum(used.get(pid, 0) for pid in ours)
  _others_seen[:] = seen, busy / _HERTZ
  return _others_seen[1]


def since(begin: Clock) -> dict[str, float]:
  """The time since `begin`, as metrics.

  Runs are compared by time/busy_s. On a CPU it is processor time (time/cpu_s),
  because other jobs would lengthen the wall time. On an accelerator it is wall
  time, because the processor only waits. It excludes compilation, which depends
  on the number of shapes, and the processor time of scoring workers.

  time/cores is processor time over wall time, both with compilation. The cores
  that were missed: the time in which threads were ready to run without a core,
  but at most the time that other programs had these cores, over wall time. So a
  single thread, a wait for a disk, more threads than cores, and verifiers
  beside the sampler miss none. It is 0 where the kernel has no /proc.
  """
  end = now()
  wall, total, compiling, compiling_cpu = (
    after - before for after, before in zip(end[:4], begin[:4], strict=True)
  )
  cpu, on_cpu = total - compiling_cpu, jax.default_backend() == "cpu"
  waited = sum(
    max(0.0, seconds - begin.waited.get(thread, 0.0))
    for thread, seconds in end.waited.items()
  )
  missed = max(0.0, min(waited, end.others - begin.others))
  return {
    "time/step_s": wall,
    "time/cpu_s": cpu,
    "time/busy_s": cpu if on_cpu else wall - compiling,
    "time/compile_s": compiling,
    "time/cores": total / wall,
    "time/cores_missed": missed / wall,
  }


def few_cores(scalars: Mapping[str, Any]) -> str | None:
  """Why a step was slow, if other programs had the cores; see `since`."""
  had = scalars.get("time/cores", 0.0)
  usable = had + scalars.get("time/cores_missed", 0.0)
  enough = had >= _SHARE * usable or jax.default_backend() != "cpu"
  if enough or (usable - had) * scalars["time/step_s"] < _LOST_S:
    return None
  text = f"the step had {had:.1f} and could have used {usable:.1f}"
  return f"other programs use the cores: {text} of {len(cores())}"


def timed(function: Callable[..., T], *args: Any) -> tuple[T, float]:
  """The result of a call, and its seconds."""
  start = time.perf_counter()
  return function(*args), time.perf_counter() - start
