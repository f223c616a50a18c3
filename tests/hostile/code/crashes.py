# call, fail: a null pointer
import ctypes


def rise(numbers):
  return ctypes.string_at(0)
