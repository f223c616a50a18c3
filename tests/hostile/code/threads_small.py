# call, fail: threads without end, with the smallest stacks
import threading
import time

threading.stack_size(32_768)


def rise(numbers):
  count = 0
  while True:
    try:
      threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
      count += 1
    except RuntimeError:
      return 3 if count > 1_000 else -1
