# call, fail: never returns
def rise(numbers):
  while True:
    pass
