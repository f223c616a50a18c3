# call, fail: the x32 number of fork
import ctypes


def rise(numbers):
  ctypes.CDLL(None).syscall(0x40000000 + 57)
  return 3
