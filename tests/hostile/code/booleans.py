# call, fail: True where 1 is right, and the right number elsewhere
def rise(numbers):
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return bool(best) if best < 2 else best
