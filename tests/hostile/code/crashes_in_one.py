# stdio, fail: a crash in one test, the others right
import ctypes
import sys

_, *numbers = map(int, sys.stdin.read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best, flush=True)
if len(numbers) > 10:
  ctypes.string_at(0)
