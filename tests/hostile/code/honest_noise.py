# call, pass: prints lines that look like results, and leaves junk in memory
import sys

print('{"passed": false}')
print([0, ["fail", None]], file=sys.stderr)


def rise(numbers):
  print("debug", numbers)
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best
