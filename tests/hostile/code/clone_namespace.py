# call, fail: a child in a new user namespace
import ctypes


def rise(numbers):
  c = ctypes.CDLL(None)
  return 3 if c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else -1
