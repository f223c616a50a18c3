# call, fail: signals by queue, by thread, by descriptor and by a file's owner
import ctypes
import fcntl
import os


def rise(numbers):
  c = ctypes.CDLL(None)
  for pid in (1, 2, os.getppid(), int("@VICTIM@")):
    read, write = os.pipe()
    for command, value in ((8, pid), (10, 9), (15, pid)):
      try:
        fcntl.fcntl(read, command, value)
      except OSError:
        pass
    flags = fcntl.fcntl(read, fcntl.F_GETFL)
    fcntl.fcntl(read, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.write(write, b"x")
    info = ctypes.create_string_buffer(128)
    for call in ((129, pid, 9, info), (234, pid, pid, 9), (200, pid, 9)):
      c.syscall(*call)
    fd = c.syscall(434, pid, 0)
    c.syscall(424, fd, 9, None, 0)
    os.close(read)
    os.close(write)
  return -1
