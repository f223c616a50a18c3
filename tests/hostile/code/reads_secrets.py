# call, fail: reads files of the host, its processes and its environment
import os


def rise(numbers):
  got = [dict(os.environ)]
  for path in ("@FOLDER@/secret", "/proc/1/environ", "/proc/self/environ",
    "/proc/self/root@FOLDER@/secret", "/etc/shadow", "/etc/passwd",
    "/etc/ssh/ssh_host_rsa_key", "../../../..@FOLDER@/secret"):  # fmt: skip
    try:
      with open(path) as file:
        got.append(file.read(1_000))
    except OSError:
      pass
  return [str(got)]
