# call, fail: long computations in C, where no Python signal handler runs
import re


def rise(numbers):
  if len(numbers) % 2:
    re.match(r"(a+)+$", "a" * 64 + "b")
  return 3 ** (10**9)
