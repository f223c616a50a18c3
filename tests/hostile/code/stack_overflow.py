# call, fail: recursion without end, in Python and in C
import sys

sys.setrecursionlimit(10**9)


class Deep:
  def __repr__(self):
    return repr([self])


def rise(numbers):
  return repr(Deep()) if len(numbers) % 2 else rise(numbers)
