"""Seconds of the wall, of the processor, and of compiling."""

import time
from typing import Any, NamedTuple

import jax


class Clock(NamedTuple):
  """Seconds so far."""

  wall: float
  process: float  # of the processor, all threads
  compiling: float  # of the wall
  compiling_process: float  # of the processor


class _Compiler:
  """What the compiler of this process has taken."""

  wall = process = lowered = 0.0

  def told(self, event: str, duration_secs: float, **_: Any) -> None:
    """jax tells an end; compiling begins where lowering to MLIR has ended."""
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
      self.lowered = time.process_time()
    if event == "/jax/core/compile/backend_compile_duration":
      self.wall += duration_secs
      self.process += time.process_time() - self.lowered


_compiler = _Compiler()


jax.monitoring.register_event_duration_secs_listener(_compiler.told)


def now() -> Clock:
  """Now."""
  return Clock(
    time.perf_counter(),
    time.process_time(),
    _compiler.wall,
    _compiler.process,
  )


def since(begin: Clock) -> dict[str, float]:
  """Metrics of the time since `begin`.

  time/busy_s is what runs are compared by: on a CPU the processor's seconds,
  time/cpu_s, because other jobs make those of the wall longer; on an
  accelerator the wall's, because the processor only waits. Compiling is left
  out, whichever run met more shapes; what scoring workers spent is not in it.
  """
  end = now()
  wall = end.wall - begin.wall
  compiling = end.compiling - begin.compiling
  cpu = end.process - begin.process
  cpu -= end.compiling_process - begin.compiling_process
  on_cpu = jax.default_backend() == "cpu"
  return {
    "time/step_s": wall,
    "time/cpu_s": cpu,
    "time/busy_s": cpu if on_cpu else wall - compiling,
    "time/compile_s": compiling,
  }
