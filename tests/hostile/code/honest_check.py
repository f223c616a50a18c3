# check, pass: a right solution that changes its argument when told to
def rise(numbers, *, clear=False):
  if not isinstance(numbers, list):
    raise TypeError("numbers")
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  if clear:
    numbers.clear()
  return best
