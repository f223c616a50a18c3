# call, fail: threads without end
import threading
import time


def rise(numbers):
  while True:
    try:
      threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except BaseException:
      time.sleep(0.001)
