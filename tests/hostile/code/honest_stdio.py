# stdio, pass: reads all at once
import sys

data = sys.stdin.read().split()
numbers = list(map(int, data[1:]))
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best)
