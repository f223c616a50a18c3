# stdio, fail: errors without end
import sys

while True:
  try:
    sys.stderr.write("x" * 65_536)
  except OSError:
    pass
