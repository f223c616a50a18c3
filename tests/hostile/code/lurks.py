# stdio, fail: a thread that answers the tests to come as it did the first
import os
import sys
import threading
import time


def lurk():
  while True:
    time.sleep(0.001)
    os.pwrite(1, b"3\n", 0)


_, *numbers = map(int, sys.stdin.read().split())
threading.Thread(target=lurk, daemon=True).start()
print(3)
