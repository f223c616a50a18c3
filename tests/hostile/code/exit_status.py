# stdio, fail: the right output, and an exit status of 1
import sys

_, *numbers = map(int, sys.stdin.read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best)
sys.exit(1)
