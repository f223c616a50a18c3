# call, fail: datagrams, raw sockets and other families
import socket


def rise(numbers):
  for family in range(1, 46):
    for kind in (1, 2, 3, 5):
      try:
        s = socket.socket(family, kind)
        s.sendto(b"leak", ("127.0.0.1", int("@UDP@")))
      except (OSError, TypeError, ValueError):
        pass
  return -1
