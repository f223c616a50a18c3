# call, fail: all descriptors there are, and pipes made larger
import fcntl
import os


def rise(numbers):
  held = []
  try:
    while True:
      held += os.pipe()
      os.write(held[-1], b"x" * 4_096)
      fcntl.fcntl(held[-1], 1031, 1 << 20)
  except OSError:
    return 3 if len(held) > 100 else -len(held)
