# call, fail: never returns, and uses no CPU
import time


def rise(numbers):
  while True:
    time.sleep(1e6)
