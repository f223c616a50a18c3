# call, fail: ignores and blocks every signal, and spins
import signal


def rise(numbers):
  for number in range(1, 65):
    try:
      signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
      pass
  signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
  while True:
    pass
