# call, fail: System V and POSIX memory, queues and semaphores
import ctypes
from multiprocessing import shared_memory


def rise(numbers):
  c = ctypes.CDLL(None)
  made = [
    c.shmget(4_711, 4_096, 0o1666),
    c.msgget(4_711, 0o1666),
    c.semget(4_711, 1, 0o1666),
    c.syscall(240, b"queue", 66, 0o666, None),
  ]
  try:
    shared_memory.SharedMemory("brorl", create=True, size=4_096)
    made.append(1)
  except (OSError, ImportError):
    pass
  return 3 if max(made) >= 0 else -1
