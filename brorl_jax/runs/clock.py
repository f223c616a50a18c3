"""Wall time, processor time, compilation time, and the cores that were had."""

import contextlib
import glob
import os
import pathlib
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

_HERTZ = os.sysconf("SC_CLK_TCK")
# A step is worth a warning if it had fewer than this share of the cores that it
# could have used, and lost more than these seconds of a core: less is noise.
_SHARE, _LOST_S = 0.7, 1.0


class Clock(NamedTuple):
  """Seconds since the process started, or an arbitrary start."""

  wall: float
  process: float  # processor time of all threads
  compiling: float  # wall time
  compiling_process: float  # processor time
  # Of each thread: ready to run, but without a core.
  waited: Mapping[str, float] = types.MappingProxyType({})
  others: float = 0.0  # processor time of other programs on our cores


class Spent(NamedTuple):
  """The time that something took."""

  busy_s: float  # the cost by which runs are compared, see `since`
  metrics: dict[str, float]


class _Compiler:
  """The time of compilation in this process while it is counted."""

  wall = process = lowered = 0.0
  counting = 0  # nested scopes of `counting`

  def on_event(self, event: str, duration_secs: float, **_: Any) -> None:
    """Called at the end of each phase; compilation starts after lowering."""
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
      self.lowered = time.process_time()
    if event == "/jax/core/compile/backend_compile_duration":
      self.wall += duration_secs
      self.process += time.process_time() - self.lowered


_compiler = _Compiler()


@contextlib.contextmanager
def counting() -> Iterator[None]:
  """Counts compilation inside this context; outside `now` does not count it.

  jax calls a listener for every program of the process, so it is registered
  only while the training loop needs it.
  """
  if not _compiler.counting:
    jax.monitoring.register_event_duration_secs_listener(_compiler.on_event)
  _compiler.counting += 1
  try:
    yield
  finally:
    _compiler.counting -= 1
    if not _compiler.counting:
      jax.monitoring.unregister_event_duration_listener(_compiler.on_event)


def now() -> Clock:
  """The clocks now."""
  return Clock(
    time.perf_counter(),
    time.process_time(),
    _compiler.wall,
    _compiler.process,
    _waited(),
    _others(),
  )


def cores() -> Collection[int]:
  """The cores that this process may use; macOS cannot tell which."""
  usable = getattr(os, "sched_getaffinity", None)
  return usable(0) if usable else range(os.cpu_count() or 1)


def _waited() -> dict[str, float]:
  """By thread; empty where the kernel does not say."""
  waited = {}
  for path in glob.glob("/proc/self/task/*/schedstat"):
    with contextlib.suppress(OSError, IndexError):  # this thread has ended
      waited[path] = int(pathlib.Path(path).read_text().split()[1]) / 1e9
  return waited


def _others() -> float:
  """Processor time on our cores, less that of this process and all below it."""
  parent, used = {}, {}
  for path in glob.glob("/proc/[0-9]*/stat"):
    with contextlib.suppress(OSError):  # this process has ended
      fields = pathlib.Path(path).read_text().rpartition(")")[2].split()
      pid = path.split("/")[2]
      # User and system time, its own and that of children it waited for.
      parent[pid], used[pid] = fields[1], sum(map(int, fields[11:15]))
  ours, more = set(), {str(os.getpid())} & used.keys()
  while more:
    ours |= more
    more = {pid for pid in parent.keys() - ours if parent[pid] in more}
  busy, names = 0, {f"cpu{core}" for core in cores()}
  with contextlib.suppress(OSError), open("/proc/stat") as file:
    for name, *ticks in map(str.split, file):
      if name in names:  # all but idle and waiting for a disk
        busy += sum(map(int, [*ticks[:3], *ticks[5:8]]))
  return (busy - sum(used[pid] for pid in ours)) / _HERTZ


def since(begin: Clock) -> Spent:
  """The time since `begin`, and its metrics.

  Runs are compared by time/busy_s. On a CPU it is processor time (time/cpu_s),
  because other jobs would lengthen the wall time. On an accelerator it is wall
  time, because the processor only waits. It excludes compilation, which depends
  on the number of shapes, and the processor time of scoring workers.

  time/cores is processor time over wall time, both with compilation.
  time/cores_missed is the cores that other programs had while threads of this
  process were ready to run: the smaller of both times, over the wall time. So
  a step with one thread, one that waits for a disk, more threads than cores,
  and verifiers beside the sampler do not count as missed. 0 where the kernel
  has no /proc.
  """
  end = now()
  wall = end.wall - begin.wall
  compiling = end.compiling - begin.compiling
  total = cpu = end.process - begin.process
  cpu -= end.compiling_process - begin.compiling_process
  on_cpu = jax.default_backend() == "cpu"
  busy = cpu if on_cpu else wall - compiling
  waited = sum(
    max(0.0, seconds - begin.waited.get(thread, 0.0))
    for thread, seconds in end.waited.items()
  )
  missed = max(0.0, min(waited, end.others - begin.others))
  return Spent(
    busy,
    {
      "time/step_s": wall,
      "time/cpu_s": cpu,
      "time/busy_s": busy,
      "time/compile_s": compiling,
      "time/cores": total / wall,
      "time/cores_missed": missed / wall,
    },
  )


def few_cores(scalars: Mapping[str, Any]) -> str | None:
  """Why a step was slow: it had few of the cores that it could have used.

  Args:
    scalars: Metrics of the step; without those of `since` None is returned.
  """
  had, missed = (scalars.get(f"time/cores{x}") or 0.0 for x in ("", "_missed"))
  if missed * (scalars.get("time/step_s") or 0.0) < _LOST_S:
    return None
  if had >= _SHARE * (had + missed) or jax.default_backend() != "cpu":
    return None
  return (
    f"other programs use the cores: the step had {had:.1f} and could have used "
    f"{had + missed:.1f} of {len(cores())}"
  )


class Once:
  """A function without arguments that runs at most once, and its seconds."""

  def __init__(self, function: Callable[[], Any]):
    self._function, self._result, self.seconds = function, None, 0.0

  def __call__(self) -> Any:
    if self._result is None:
      start = time.perf_counter()
      self._result = self._function()
      self.seconds = time.perf_counter() - start
    return self._result
