# call, fail: a text of 100 MB
def rise(numbers):
  return "3" * 100_000_000
