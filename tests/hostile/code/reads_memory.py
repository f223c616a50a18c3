# call, fail: reads the memory of its parent
import ctypes
import os


def rise(numbers):
  try:
    return open(f"/proc/{os.getppid()}/mem", "rb").read(1).hex()
  except OSError:
    pass
  buffer = ctypes.create_string_buffer(16)
  ctypes.CDLL(None).syscall(310, os.getppid(), buffer, 1, buffer, 1, 0)
  return 3
