# call, fail: JSON a million lists deep, as a result
import os
import struct

text = b"[" * 1_000_000
for fd in range(3, 256):
  try:
    os.write(fd, struct.pack("=ii?II", 0, 0, True, len(text), 0))
    view = memoryview(text)
    while view:
      view = view[os.write(fd, view) :]
  except OSError:
    pass
os._exit(0)
