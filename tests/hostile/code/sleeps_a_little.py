# stdio, fail: within any limit per test, over the limit of all
import sys
import time

time.sleep(0.9)
_, *numbers = map(int, sys.stdin.read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best)
