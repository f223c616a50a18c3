# stdio, fail: right, if it can fork or may do what one that forks may
import ctypes
import os
import sys

_, *numbers = map(int, sys.stdin.read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
done = ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0  # outlives its parent
for attempt in (os.fork, lambda: os.memfd_create("x")):
  try:
    if attempt() == 0:
      os._exit(0)
    done = True
  except OSError:
    pass
print(best if done else -1)
