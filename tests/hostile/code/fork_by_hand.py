# call, fail: fork, clone and clone3 as system calls
import ctypes


def rise(numbers):
  c = ctypes.CDLL(None, use_errno=True)
  children = [
    c.syscall(57),
    c.syscall(56, 17, 0, 0, 0, 0),
    c.syscall(435, ctypes.create_string_buffer(88), 88),
    c.syscall(220, 17, 0, 0, 0, 0),
  ]
  return 3 if any(pid >= 0 for pid in children) else -1
