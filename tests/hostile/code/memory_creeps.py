# call, fail: more and more memory, whatever is said
def rise(numbers):
  held = []
  while True:
    try:
      held.append(bytearray(1 << 20))
    except MemoryError:
      pass
