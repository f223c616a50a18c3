"""Wall time, processor time, compilation time."""

import contextlib
import os
import time
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Clock(NamedTuple):
  """Seconds since the process started, or an arbitrary start."""

  wall: float
  process: float  # processor time of all threads
  compiling: float  # wall time
  compiling_process: float  # processor time


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
  return Clock(*spent, _compiler.wall, _compiler.process)


def cores() -> Collection[int]:
  """The cores that this process may use; macOS cannot tell which."""
  usable = getattr(os, "sched_getaffinity", None)
  return usable(0) if usable else range(os.cpu_count() or 1)


def since(begin: Clock) -> dict[str, float]:
  """The time since `begin`, as metrics.

  Runs are compared by time/busy_s. On a CPU it is processor time (time/cpu_s),
  because other jobs would lengthen the wall time. On an accelerator it is wall
  time, because the processor only waits. It excludes compilation, which depends
  on the number of shapes, and the processor time of scoring workers.

  time/cores is processor time over wall time, both with compilation.
  """
  wall, total, compiling, compiling_cpu = (
    after - before for after, before in zip(now(), begin, strict=True)
  )
  cpu, on_cpu = total - compiling_cpu, jax.default_backend() == "cpu"
  return {
    "time/step_s": wall,
    "time/cpu_s": cpu,
    "time/busy_s": cpu if on_cpu else wall - compiling,
    "time/compile_s": compiling,
    "time/cores": total / wall,
  }


def timed(function: Callable[..., T], *args: Any) -> tuple[T, float]:
  """The result of a call, and its seconds."""
  start = time.perf_counter()
  return function(*args), time.perf_counter() - start
