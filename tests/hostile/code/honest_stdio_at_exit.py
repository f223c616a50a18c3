# stdio, pass: prints what it gathered when the interpreter ends
import atexit
import io
import sys

sys.stdout = io.StringIO()
atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))
_, *numbers = map(int, open(0).read().split())
best = run = 0
for i, n in enumerate(numbers):
  run = run + 1 if i and n > numbers[i - 1] else 1
  best = max(best, run)
print(best)
