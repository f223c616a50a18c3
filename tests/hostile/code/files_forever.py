# call, fail: empty files and folders in folders, without end
import os


def rise(numbers):
  made = 0
  for i in range(200_000):
    try:
      os.mkdir(f"d{i}")
      made += 1
      if i % 7 == 0:
        os.chdir(f"d{i}")
    except OSError:
      break
  return 3 if made > 5_000 else -1
