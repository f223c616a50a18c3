"""Faults inside a start: clocks, failing and slow files, lost workers, NaN.

Each is put in place before the command runs, by replacing functions of Python,
of a library or of the package; the package knows nothing of them.
"""

import builtins
import errno
import io
import os
import pathlib
import resource
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launch.faults import stages, watch


def inject(fault: Mapping[str, Any]) -> None:
  """Puts a fault in place, {"kind": name, ...}; see the functions below."""
  fault = dict(fault)
  _KINDS[fault.pop("kind")](**fault)


def kill(stage: str) -> None:
  """Kills the process at a stage."""
  named = {**stages.STAGES, "after step 5": stages.AFTER_FIVE}
  stages.kill_at(named[stage])


def clock(by: float, step: int) -> None:
  """The wall clock jumps by this many seconds after the line of a step."""
  jumped, now, now_ns = [0.0], time.time, time.time_ns
  time.time = lambda: now() + jumped[0]
  time.time_ns = lambda: now_ns() + int(1e9 * jumped[0])

  def jump(*_: Any) -> None:
    jumped[0] = by

  of = stages.of_file("metrics.jsonl")
  stages.hook(stages.LINES, after=jump, when=of, nth=step)


def fails(number: int, below: str, nth: int) -> None:
  """From the n-th write below a folder on, each write has this error."""
  name = errno.errorcode[number]
  seen = [0]

  def write(path: str) -> None:
    seen[0] += 1
    if seen[0] >= nth:
      raise OSError(number, f"{os.strerror(number)} [{name}]", path)

  _at_each_write(pathlib.Path(below), write)
  # Arrays are written by a library of C++, which no Python sees.
  save = "orbax.checkpoint:CheckpointManager.save"
  stages.hook(save, before=lambda manager, *_, **__: write(f"{below}/arrays"))


def slow(below: str, seconds: float) -> None:
  """Each write below a folder takes so long."""
  pause = lambda *_, **__: time.sleep(seconds)
  _at_each_write(pathlib.Path(below), pause)
  stages.hook("orbax.checkpoint:CheckpointManager.save", before=pause)


def limited(what: str, most: int) -> None:
  """The system allows no more: "FSIZE" bytes of a file, "NOFILE" files."""
  after = lambda *_: resource.setrlimit(
    getattr(resource, f"RLIMIT_{what}"), (most, most)
  )
  of = stages.of_file("metrics.jsonl")
  stages.hook(stages.LINES, after=after, when=of, nth=4)


def waits(step: int, seconds: float) -> None:
  """The update of a step takes so much longer."""
  pause = lambda *_, **__: time.sleep(seconds)
  stages.hook("brorl_jax.learner.step:apply", before=pause, nth=step)


def nan(step: int) -> None:
  """The gradient of an update has a NaN in each array."""
  import jax

  def spoilt(
    real: Callable[..., Any], state: Any, sums: Any, *rest: Any, **how: Any
  ) -> Any:
    grads, stats = sums
    grads = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(float("nan")), grads)
    return real(state, (grads, stats), *rest, **how)

  stages.hook("brorl_jax.learner.update:_apply", instead=spoilt, nth=step)


def worker(number: int, nth: int, during: bool) -> None:
  """A worker process gets a signal before or during its n-th question.

  Every verdict of the run then asks a worker first, which those of puzzles do
  not need; a question without an answer makes it invalid, as elsewhere.
  """
  from brorl_jax.tasks import pool
  from brorl_jax.tasks.base import Verdict
  from brorl_jax.tasks.sandbox.process import Failed

  pool_class, lock, count = pool.Pool, threading.Lock(), [0]
  real = pool_class._verdict

  def struck(jail: Any) -> None:
    process = jail._worker._process
    if process is not None:
      os.kill(process.pid, number)

  def verdict(self: Any, job: Any, jail: Any) -> Any:
    with lock:
      count[0] += 1
      mine = count[0] == nth
    try:
      # Always the same question: what differs from an undisturbed run is the
      # signal alone.
      if mine:
        jail.ask("symbolic", "x+1", "1+x", timeout=1.0)  # it is there now
        if during:
          threading.Timer(0.0, struck, [jail]).start()
        else:
          struck(jail)
          time.sleep(0.5)  # until it has ended
      jail.ask("symbolic", r"\sqrt{2}", "2^{1/2}", timeout=1.0)
    except Failed as e:
      return Verdict("invalid", 0.0, f"verifier failed: {e}", "")
    return real(self, job, jail)

  pool_class._verdict = verdict


def recorded(into: str, every: int) -> None:
  """What the process holds, as a line of JSON every so many steps."""
  watch.record(pathlib.Path(into), every)


def _at_each_write(below: pathlib.Path, call: Callable[[str], None]) -> None:
  """Calls a function with the path before each write of Python below it.

  Those of TensorBoard, many for each step and in a thread of its own, are left
  alone: they never stop a run.
  """
  root = str(below.absolute())
  inside = lambda path: (
    isinstance(path, str | os.PathLike)
    and os.path.abspath(os.fspath(path)).startswith(f"{root}{os.sep}")
  )
  real_open = io.open

  def opened(file: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
    out = real_open(file, mode, *args, **how)
    writes = inside(file) and set(mode) & set("wax+")
    writes = writes and "tfevents" not in str(file)
    return _File(out, os.fspath(file), call) if writes else out

  io.open = builtins.open = opened
  for name in ("rename", "replace", "mkdir"):
    real = getattr(os, name)

    def renamed(path: Any, *args: Any, real: Any = real, **how: Any) -> Any:
      if inside(path):
        call(str(path))
      return real(path, *args, **how)

    setattr(os, name, renamed)


class _File:
  """A file, each of whose writes is announced."""

  def __init__(self, file: Any, path: str, call: Callable[[str], None]):
    self._file, self._path, self._call = file, path, call

  def write(self, data: Any) -> int:
    self._call(self._path)
    return self._file.write(data)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  def __enter__(self) -> "_File":
    return self

  def __exit__(self, *_: object) -> None:
    self._file.close()


_KINDS = {
  one.__name__: one
  for one in (kill, clock, fails, slow, limited, waits, nan, worker, recorded)
}
