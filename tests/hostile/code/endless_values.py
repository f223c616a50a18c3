# call, fail: values that contain themselves, are deep, or wide as 2**40
def rise(numbers):
  loop = []
  loop.append(loop)
  deep = wide = []
  for _ in range(100_000):
    deep = [deep]
  for _ in range(40):
    wide = [wide, wide]
  return [loop, deep, wide][len(numbers) % 3]
