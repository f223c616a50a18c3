# stdio, fail: an output file of a terabyte that holds nothing
import os

for attempt in (lambda: os.lseek(1, 1 << 40, os.SEEK_SET),
  lambda: os.write(1, b"3\n"), lambda: os.ftruncate(1, 1 << 40),
  lambda: os.ftruncate(1, 7 << 20)):  # fmt: skip
  try:
    attempt()
  except OSError:
    pass
