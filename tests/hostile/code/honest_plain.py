# call, pass: a right solution
def rise(numbers):
  best = run = 0
  last = None
  for n in numbers:
    run = run + 1 if last is not None and n > last else 1
    best, last = max(best, run), n
  return best
