# call, fail: leaves a process behind that writes later
import os
import time


def rise(numbers):
  try:
    if os.fork() == 0:
      os.setsid()
      if os.fork() == 0:
        time.sleep(2)
        open("@FOLDER@/late", "w").close()
      os._exit(0)
  except OSError:
    pass
  return -1
