"""Compiled programs are kept from one start to the next, by jax's own cache.

A resume would otherwise compile all of them again: 20 s on a laptop, minutes
for a language model. jax names an entry by the program, its own version, XLA's
flags and the devices. It leaves out what machine code also depends on, the
instructions of the processor (such an entry ends in SIGILL elsewhere) and how
many processors it is divided among, so each kind of machine has a folder here.
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

from brorl_jax.main.settings import UserError

MOST_BYTES = 2**30  # of a folder; the quick start has 2.2 MB
OFF = "off"
_CPUINFO = pathlib.Path("/proc/cpuinfo")
# What differs between processors, not between cores or moments.
_PROCESSOR = (
  "vendor_id",
  "cpu family",
  "model",
  "model name",
  "flags",
  "CPU implementer",  # from here on ARM's
  "CPU architecture",
  "CPU part",
  "Features",
)
_CHECKED = "checked"  # its time is that of the last look at the entries
_CLOCKS = 60.0  # seconds by which those of a file server may be off
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # begins what jax writes where it has that


def keep(given: str | None) -> None:
  """Tells jax where; to be called before anything is compiled.

  A folder that cannot be used is a warning: a run needs none.

  Args:
    given: A folder, "off", or None for JAX_COMPILATION_CACHE_DIR or else the
      user's cache folder.

  Raises:
    UserError: It names nothing.
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
    with tempfile.TemporaryFile(dir=folder):  # or jax warns of each program
      pass
    _tidy(folder)
  except (OSError, RuntimeError) as e:  # RuntimeError: nobody has no home
    print(
      f"warning: compiled programs cannot be kept in {folder}: {e}; "
      "--compilation_cache=DIR names another folder",
      file=sys.stderr,
    )
    return
  jax.config.update("jax_enable_compilation_cache", True)
  jax.config.update("jax_compilation_cache_dir", str(folder))
  # Those below jax's limit of 1 s are 2 s of the quick start's 22.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def says() -> str:
  """A line for those that a run starts with."""
  of = jax.config.values
  folder = of["jax_compilation_cache_dir"]
  if folder is None or not of["jax_enable_compilation_cache"]:
    return "compiled programs are not kept"
  return f"compiled programs are kept in {folder}"


def machine() -> str:
  """The kind of machine: one word for those that share machine code."""
  if hasattr(os, "sched_getaffinity"):
    count = len(os.sched_getaffinity(0))
  else:
    count = os.cpu_count()
  lines = []
  if _CPUINFO.exists():
    first = _CPUINFO.read_text().split("\n\n")[0].splitlines()
    lines = [x for x in first if x.partition(":")[0].strip() in _PROCESSOR]
  # XLA takes NPROC for the number of processors.
  said = [platform.processor(), os.environ.get("NPROC", ""), *lines]
  digest = hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]
  return f"{platform.machine()}-{count}cpu-{digest}"


def _base(given: str | None) -> pathlib.Path:
  """The folder that those of all kinds of machines are in."""
  given = given or os.environ.get("JAX_COMPILATION_CACHE_DIR")
  if given:
    return pathlib.Path(given).expanduser().absolute()
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  return cache.expanduser().absolute() / "brorl_jax" / "programs"


def _tidy(folder: pathlib.Path) -> None:
  """Removes entries that are not whole, and the oldest beyond MOST_BYTES.

  jax writes an entry in place and never again, so that what a killed process
  left of one would be compiled, with a warning, at every start. jax's own
  bound (jax_compilation_cache_max_size) is of no use: until 0.10.2 an entry
  without the file of its last use, which a kill leaves too, stops all writing,
  and each write reads all of those files.
  """
  begin, stamp = time.time(), folder / _CHECKED
  since = stamp.stat().st_mtime if stamp.exists() else 0.0
  entries = []
  for path in folder.glob("*-cache"):
    with contextlib.suppress(FileNotFoundError):  # another process tidies too
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
  """Whether an entry can be decompressed; zstandard's cannot be told here."""
  data = path.read_bytes()
  if data.startswith(_ZSTANDARD):
    return True
  try:
    zlib.decompress(data)
  except zlib.error:
    return False
  return True
