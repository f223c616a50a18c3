# check, fail: never answers
import time


def rise(numbers, **options):
  time.sleep(1e6)
