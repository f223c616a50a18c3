# call, fail: empties its argument and answers for that
def rise(numbers):
  numbers.clear()
  return 0
