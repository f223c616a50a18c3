# call, fail: leaves a folder that cannot be opened to be removed
import os


def rise(numbers):
  os.makedirs("a/b/c", exist_ok=True)
  os.umask(0o777)
  for name in ("a/x", "x"):
    try:
      os.mkdir(name)
      open(f"{name}/y", "w").close()
    except OSError:
      pass
  return -1
