# call, fail: memory that is shared, or has no name
import ctypes
import mmap
import os


def rise(numbers):
  held = []
  try:
    while len(held) < 4_000:
      held.append(mmap.mmap(-1, 1 << 20))
      held[-1][:: 1 << 12] = b"x" * 256
  except (OSError, ValueError, MemoryError):
    pass
  made = [ctypes.CDLL(None).syscall(n, 0, 1 << 30, 0o1777) for n in (29, 319)]
  try:
    made.append(os.memfd_create("m"))
  except OSError:
    pass
  return 3 if len(held) > 2_000 or max(made) >= 0 else -1
