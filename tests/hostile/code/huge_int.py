# call, fail: a number of 30 million bits
def rise(numbers):
  return 1 << 30_000_000
