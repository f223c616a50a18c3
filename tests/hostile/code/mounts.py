# call, fail: mounts a file system over its own
import ctypes


def rise(numbers):
  ctypes.CDLL(None).mount(b"proc", b"/tmp", b"proc", 0, None)
  return 3
