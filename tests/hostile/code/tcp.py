# call, fail: connects, listens, asks for names
import socket
import urllib.request


def rise(numbers):
  for attempt in (
    lambda: socket.create_connection(("127.0.0.1", int("@TCP@")), 1).send(b"x"),
    lambda: socket.socket(socket.AF_INET6).connect(("::1", int("@TCP@"))),
    lambda: socket.create_server(("", 0)),
    lambda: socket.getaddrinfo("leak.example.com", 80),
    lambda: urllib.request.urlopen("http://127.0.0.1:@TCP@/leak", timeout=1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),  # MPTCP
  ):
    try:
      attempt()
    except OSError:
      pass
  return -1
