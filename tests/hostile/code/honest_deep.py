# call, pass: 5,000 calls deep, 200 MB, lines that look like results
import sys

sys.setrecursionlimit(20_000)
print('{"passed": false}')
print([0, ["fail", None]], file=sys.stderr)


def rise(numbers):
  print("debug", numbers)

  def go(depth):
    return go(depth - 1) if depth else 0

  go(5_000)
  block = bytearray(200 << 20)
  block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best
