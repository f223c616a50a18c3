# call, fail: SystemExit(0) in every call
def rise(numbers):
  raise SystemExit(0)
