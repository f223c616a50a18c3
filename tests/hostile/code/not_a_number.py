# call, fail: nan and infinity
def rise(numbers):
  return float("nan") if len(numbers) % 2 else float("inf")
