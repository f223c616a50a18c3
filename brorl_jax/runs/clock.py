"""Wall time, processor time and compilation time."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Clock(NamedTuple):
  """Seconds since the process started, or an arbitrary start."""

  wall: float
  process: float  # processor time of all threads
  compiling: float  # wall time
  compiling_process: float  # processor time


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
  )


def since(begin: Clock) -> Spent:
  """The time since `begin`, and its metrics.

  Runs are compared by time/busy_s. On a CPU it is processor time (time/cpu_s),
  because other jobs would lengthen the wall time. On an accelerator it is wall
  time, because the processor only waits. It excludes compilation, which depends
  on the number of shapes, and the processor time of scoring workers.
  """
  end = now()
  wall = end.wall - begin.wall
  compiling = end.compiling - begin.compiling
  cpu = end.process - begin.process
  cpu -= end.compiling_process - begin.compiling_process
  on_cpu = jax.default_backend() == "cpu"
  busy = cpu if on_cpu else wall - compiling
  return Spent(
    busy,
    {
      "time/step_s": wall,
      "time/cpu_s": cpu,
      "time/busy_s": busy,
      "time/compile_s": compiling,
    },
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
