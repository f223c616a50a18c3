"""Seconds of the wall, of the processor, and of compiling."""

import time
from typing import Any, NamedTuple

import jax


class Clock(NamedTuple):
  """Seconds so far."""

  wall: float
  process: float  # of the processor, all threads
  compiling: float  # of the wall; most of it on one thread


_compiling = [0.0]  # one process, one compiler


def _told(event: str, duration_secs: float, **_: Any) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    _compiling[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_told)


def now() -> Clock:
  """Now."""
  return Clock(time.perf_counter(), time.process_time(), _compiling[0])


def since(begin: Clock) -> dict[str, float]:
  """Metrics of the time since `begin`.

  time/busy_s is what runs are compared by: on a CPU the processor's seconds,
  time/cpu_s, because other jobs make those of the wall longer; on an
  accelerator the wall's, because the processor only waits. Compiling is left
  out, whichever run met more shapes; what scoring workers spent is not in it.
  """
  wall, process, compiling = (x - y for x, y in zip(now(), begin, strict=True))
  busy = process if jax.default_backend() == "cpu" else wall
  return {
    "time/step_s": wall,
    "time/cpu_s": max(process - compiling, 0.0),
    "time/busy_s": max(busy - compiling, 0.0),
    "time/compile_s": compiling,
  }
