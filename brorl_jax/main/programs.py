"""Keeps compiled programs between starts, in jax's persistent cache.

Without it a resume compiles everything again: 20 s on a laptop, minutes for a
language model. jax identifies an entry by the program, its own version, XLA's
flags and the devices. Machine code also depends on the processor's instructions
(an entry from another processor ends in SIGILL) and on the number of
processors, so each kind of machine has its own folder.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
import tempfile
import time
import zlib

import jax

from brorl_jax.errors import UserError

MOST_BYTES = 2**30  # limit of a folder; configs/smoke.py needs 2.2 MB
OFF = "off"
_CPUINFO = pathlib.Path("/proc/cpuinfo")
# Fields that differ between processors, but not between cores or over time.
_PROCESSOR = (
  "vendor_id",
  "cpu family",
  "model",
  "model name",
  "flags",
  "CPU implementer",  # this and the following: ARM
  "CPU architecture",
  "CPU part",
  "Features",
)
_CHECKED = "checked"  # file whose time is that of the last check
_CLOCKS = 60.0  # seconds by which the clock of a file server may differ
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # first bytes of an entry if jax has zstandard


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
      f"--compilation_cache={given!r} names no folder; give one, or {OFF!r}"
    )
  jax.config.update("jax_enable_compilation_cache", False)
  if given == OFF:
    return
  folder = given
  try:
    folder = _base(given) / machine()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Otherwise jax warns about each program.
    tempfile.TemporaryFile(dir=folder).close()
    _tidy(folder)
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


def place() -> pathlib.Path | None:
  """The folder of this kind of machine; None if nothing is kept."""
  of = jax.config.values
  folder = of["jax_compilation_cache_dir"]
  if folder is None or not of["jax_enable_compilation_cache"]:
    return None
  return pathlib.Path(folder)


def log_line() -> str:
  """A line for the log."""
  if (folder := place()) is None:
    return "compiled programs are not kept"
  return f"compiled programs are kept in {folder}"


def machine() -> str:
  """The kind of machine, as a name: machines of one kind share programs."""
  if hasattr(os, "sched_getaffinity"):
    count = len(os.sched_getaffinity(0))
  else:
    count = os.cpu_count()
  lines = []
  if _CPUINFO.exists():
    first = _CPUINFO.read_text().split("\n\n")[0].splitlines()
    lines = [x for x in first if x.partition(":")[0].strip() in _PROCESSOR]
  # XLA reads the number of processors from NPROC.
  parts = [platform.processor(), os.environ.get("NPROC", ""), *lines]
  digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
  return f"{platform.machine()}-{count}cpu-{digest}"


def _base(given: str | None) -> pathlib.Path:
  """The folder with one folder per kind of machine."""
  given = given or os.environ.get("JAX_COMPILATION_CACHE_DIR")
  if given:
    return pathlib.Path(given).expanduser().absolute()
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  return cache.expanduser().absolute() / "brorl_jax" / "programs"


def _tidy(folder: pathlib.Path) -> None:
  """Removes incomplete entries, and the oldest beyond MOST_BYTES.

  jax writes an entry in place and never replaces it. An entry that a killed
  process left incomplete would be compiled, with a warning, at every start.
  jax's own limit (jax_compilation_cache_max_size) does not help: until 0.10.2
  an entry without its access-time file, which a kill also leaves, stops all
  writing, and each write reads all of these files.
  """
  begin, stamp = time.time(), folder / _CHECKED
  since = stamp.stat().st_mtime if stamp.exists() else 0.0
  entries = []
  for path in folder.glob("*-cache"):
    with contextlib.suppress(FileNotFoundError):  # another process removed it
      stat = path.stat()
      if stat.st_mtime >= since and not _whole(path):
        path.unlink()
      else:
        entries.append((stat.st_atime, stat.st_size, path))
  excess = sum(size for _, size, _ in entries) - MOST_BYTES
  for _, size, path in sorted(entries):
    if excess <= 0:
      break
    path.unlink(missing_ok=True)
    excess -= size
  stamp.touch()
  os.utime(stamp, (begin - _CLOCKS, begin - _CLOCKS))


def _whole(path: pathlib.Path) -> bool:
  """Whether an entry can be decompressed; zstandard entries are not checked."""
  data = path.read_bytes()
  if data.startswith(_ZSTANDARD):
    return True
  try:
    zlib.decompress(data)
  except zlib.error:
    return False
  return True
