# call, fail: off by less than a careless tolerance
def rise(numbers):
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best + 1e-7
