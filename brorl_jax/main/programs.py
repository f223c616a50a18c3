"""Keeps compiled programs between starts, in jax's persistent cache.

Without it a resume compiles everything again: 20 s on a laptop, minutes for a
language model. jax identifies an entry by the program, its own version, XLA's
flags and the devices. Machine code also depends on the processor's instructions
(an entry from another processor ends in SIGILL) and on the number of
processors, so each kind of machine has its own folder.
"""

import hashlib
import os
import pathlib
import platform
import re
import sys
import tempfile

import jax

from brorl_jax.errors import UserError

_CPUINFO = pathlib.Path("/proc/cpuinfo")
# Fields that differ between processors, but not between cores or over time.
_PROCESSOR = re.compile(
  r"(vendor_id|cpu family|model|model name|flags"
  r"|CPU implementer|CPU architecture|CPU part|Features)\s*:"  # of ARM
)


def keep(given: str | None) -> None:
  """Sets jax's cache folder; call it before anything is compiled.

  A folder that cannot be used gives a warning: a run works without it.

  Args:
    given: A folder, "off", or None for JAX_COMPILATION_CACHE_DIR or else the
      user's cache folder.

  Raises:
    UserError: The name is blank.
  """
  if given is not None and not given.strip():
    raise UserError(
      f"--compilation_cache={given!r} names no folder; give one, or 'off'"
    )
  jax.config.update("jax_enable_compilation_cache", False)
  if given == "off":
    return
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  given = given or os.environ.get("JAX_COMPILATION_CACHE_DIR")
  folder = pathlib.Path(given or f"{cache}/brorl_jax/programs") / machine()
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
  # Programs below jax's default limit of 1 s are 2 s of the 22 s that
  # configs/smoke.py compiles.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def log_line() -> str:
  """A line for the log."""
  of = jax.config.values
  folder = of["jax_compilation_cache_dir"]
  if folder is None or not of["jax_enable_compilation_cache"]:
    return "compiled programs are not kept"
  return f"compiled programs are kept in {folder}"


def machine() -> str:
  """The kind of machine, as a name: machines of one kind share programs."""
  shared = hasattr(os, "sched_getaffinity")
  count = len(os.sched_getaffinity(0)) if shared else os.cpu_count()
  info = _CPUINFO.read_text() if _CPUINFO.exists() else ""
  first = info.split("\n\n")[0].splitlines()
  # XLA reads the number of processors from NPROC.
  parts = [platform.processor(), os.environ.get("NPROC", "")]
  parts += filter(_PROCESSOR.match, first)
  digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
  return f"{platform.machine()}-{count}cpu-{digest}"
