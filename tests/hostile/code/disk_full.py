# call, fail: fills every place it can write to
import os


def rise(numbers):
  total = 0
  for i in range(1_000):
    try:
      with open(f"f{i}", "wb") as file:
        for _ in range(64):
          file.write(bytes(1 << 20))
          file.flush()
          total += 1 << 20
    except OSError:
      if i > 100:
        break
  sparse = os.open("sparse", os.O_RDWR | os.O_CREAT)
  try:
    os.ftruncate(sparse, 1 << 40)
    total += 1 << 40
  except OSError:
    pass
  return 3 if total > 64 << 20 else -1
