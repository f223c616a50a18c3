# call, pass: touches 200 MB
def rise(numbers):
  block = bytearray(200 << 20)
  block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
  best = run = 0
  for i, n in enumerate(numbers):
    run = run + 1 if i and n > numbers[i - 1] else 1
    best = max(best, run)
  return best
