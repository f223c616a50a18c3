"""The command `brorl`, and what its process sets up before it compiles."""

import ctypes
import hashlib
import os
import pathlib
import platform
import re
import runpy
import signal
import sys
import tempfile

_CPUINFO = pathlib.Path("/proc/cpuinfo")
# Fields that differ between processors, but not between cores or over time.
_PROCESSOR = re.compile(
  r"(vendor_id|cpu family|model|model name|flags"
  r"|CPU implementer|CPU architecture|CPU part|Features)\s*:"  # of ARM
)


def brorl() -> None:
  """The console script: `python -m brorl_jax.main`, --help and all."""
  # As python -m does: finds modules in this folder.
  sys.path.insert(0, os.getcwd())
  runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)


def stop_signals() -> list[int]:
  """Those that end a run after its step, but what nohup ignores stays so."""
  ends = signal.SIGTERM, signal.SIGHUP
  return [n for n in ends if signal.getsignal(n) != signal.SIG_IGN]


def keep_freed_memory() -> None:
  """Lets glibc reuse large blocks instead of returning them.

  XLA frees its work space after every call. Getting it back from the kernel
  page by page took half of the time of an update on a CPU.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):
    return
  M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
  mallopt(M_MMAP_MAX, 0)
  mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
  mallopt(M_TOP_PAD, 64 << 20)
  # With an arena per thread the pieces between live blocks add up.
  mallopt(M_ARENA_MAX, 1)


def take_most_of_a_gpu() -> None:
  """Gives XLA's pool 92 % of a GPU's memory, if the user names no share.

  The default is 75 %, which leaves 20 GB of an H100 empty. The rest is for what
  is not in the pool: NCCL's buffers, cuDNN's and cuBLAS' handles, and programs.
  """
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  if not any(map(os.environ.get, names)):
    os.environ[names[0]] = ".92"


def keep_programs(given: str | None) -> None:
  """Keeps compiled programs between starts, in jax's persistent cache.

  Without it a resume compiles everything again: 20 s on a laptop, minutes for a
  language model. `given` is a folder, "off", or None for
  JAX_COMPILATION_CACHE_DIR or else the user's cache folder. A folder that
  cannot be used gives a warning.
  """
  import jax  # takes seconds, and --help needs this file

  jax.config.update("jax_enable_compilation_cache", False)
  if given == "off":
    return
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  given = given or os.environ.get("JAX_COMPILATION_CACHE_DIR")
  folder = pathlib.Path(given or f"{cache}/brorl_jax/programs") / machine_kind()
  try:
    folder = folder.expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Otherwise jax warns about each program.
    tempfile.TemporaryFile(dir=folder).close()
  except (OSError, RuntimeError) as e:  # RuntimeError: no home folder
    print(
      f"warning: compiled programs cannot be kept in {folder}: {e}; "
      "--compilation_cache=DIR names another folder",
      file=sys.stderr,
    )
    return
  jax.config.update("jax_enable_compilation_cache", True)
  jax.config.update("jax_compilation_cache_dir", str(folder))
  # Of 22 s of programs of configs/smoke.py, 2 s are below jax's limit of 1 s.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def machine_kind() -> str:
  """A name of the kind of machine, whose machines can share programs.

  jax identifies a program by its text, its own version, XLA's flags and the
  devices. Machine code also depends on the processor's instructions (a program
  from another processor ends in SIGILL) and on the number of processors.
  """
  shared = hasattr(os, "sched_getaffinity")
  count = len(os.sched_getaffinity(0)) if shared else os.cpu_count()
  info = _CPUINFO.read_text() if _CPUINFO.exists() else ""
  first = info.split("\n\n")[0].splitlines()
  # XLA reads the number of processors from NPROC.
  parts = [platform.processor(), os.environ.get("NPROC", "")]
  parts += filter(_PROCESSOR.match, first)
  digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
  return f"{platform.machine()}-{count}cpu-{digest}"
