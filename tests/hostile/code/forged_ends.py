# stdio, fail: says of tests to come that they ended well, and writes to them
import os
import struct

for fd in range(3, 256):
  try:
    os.write(fd, struct.pack("=B40s", 0, b"") * 50 + b".")
    os.write(fd, b"3\n")
  except OSError:
    pass
os._exit(0)
