# call, fail: timers that fire for ever
import signal


def rise(numbers):
  signal.signal(signal.SIGALRM, lambda *a: None)
  signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)
  while True:
    signal.pause()
