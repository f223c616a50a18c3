# call, fail: results without end
import os

while True:
  for fd in range(3, 256):
    try:
      os.write(fd, bytes(1 << 16))
    except OSError:
      pass
