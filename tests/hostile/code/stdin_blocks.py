# call, fail: reads an input that it hopes is left open
import os


def rise(numbers):
  while os.read(0, 1):
    pass
  return -1
