# call, pass: 5,000 calls deep
import sys

sys.setrecursionlimit(20_000)


def rise(numbers):
  def go(depth):
    return go(depth - 1) if depth else 0

  go(5_000)
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best
