"""What a process holds during a run, and whether it grows.

files      open file descriptors
threads    of the process
maps       memory maps; the system allows 65,530
programs   compiled, or loaded from the folder that keeps them
children   processes below this one
memory     allocated bytes that are not free
resident   bytes of it, and of what is free, that are in memory
"""

import ctypes
import json
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launch.faults import stages

HELD = (
  "memory",
  "resident",
  "files",
  "threads",
  "maps",
  "programs",
  "children",
)
SETTLED = 100  # steps after which nothing grows
_WINDOW = 50  # steps
SHARE = 0.01  # by which a number may be above what it was by then


def held() -> dict[str, int]:
  """What this process holds now, programs apart."""
  own = pathlib.Path("/proc/self")
  pages = int((own / "statm").read_text().split()[1])
  return {
    "memory": allocated(),
    "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    "files": len(os.listdir(own / "fd")) - 1,  # one is that of this list
    "threads": len(os.listdir(own / "task")),
    "maps": (own / "maps").read_text().count("\n"),
    "children": len(below(os.getpid())),
  }


class _Mallinfo(ctypes.Structure):
  """glibc's struct mallinfo2; the names are its own."""

  _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks"
  _fields_ = [(x, ctypes.c_size_t) for x in (*_names.split(), "keepcost")]


def allocated() -> int:
  """Bytes that are allocated and not free, in all of glibc's arenas."""
  mallinfo = ctypes.CDLL(None).mallinfo2
  mallinfo.restype = _Mallinfo
  now = mallinfo()
  return now.uordblks + now.hblkhd


def below(pid: int) -> set[int]:
  """The processes below one, at any depth."""
  parent: dict[int, int] = {}
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:  # the name, in brackets, may hold anything
      rest = path.read_text().rpartition(")")[2]
    except OSError:  # it has ended
      continue
    parent[int(path.parent.name)] = int(rest.split()[1])
  out: set[int] = set()
  while more := {p for p, of in parent.items() if of in {pid} | out} - out:
    out |= more
  return out


def record(into: pathlib.Path, every: int) -> None:
  """Appends what this process holds to a file, every so many steps."""
  import jax

  programs = [0]

  def compiled(event: str, *_: Any, **__: Any) -> None:
    programs[0] += event == "/jax/core/compile/backend_compile_duration"

  jax.monitoring.register_event_duration_secs_listener(compiled)

  def write(recorder: Any, step: int, *_: Any) -> None:
    del recorder
    if step % every == 0:
      with into.open("a") as file:
        line = {"step": step, **held(), "programs": programs[0]}
        file.write(json.dumps(line) + "\n")

  stages.hook("brorl_jax.main.recorder:Recorder.step", after=write)


def grown(lines: Sequence[Mapping[str, int]]) -> dict[str, float]:
  """The medians of the last 50 steps, above those up to step 100, as a share.

  A step in which something is saved holds more files, threads and memory for a
  moment: the most of many steps says how often that was seen. Of a number that
  was 0, the median itself.
  """
  last = max(x["step"] for x in lines)
  of = lambda name, end: statistics.median(
    x[name] for x in lines if end - _WINDOW < x["step"] <= end
  )
  out = {}
  for name in HELD:
    before, later = of(name, SETTLED), of(name, max(last, SETTLED))
    out[name] = max(0.0, (later - before) / (before or 1))
  return out


def excessive(lines: Sequence[Mapping[str, int]]) -> list[str]:
  """The names of what grew by more than `SHARE`."""
  return [name for name, share in grown(lines).items() if share > SHARE]
