# call, fail: writes, truncates, renames and removes files of the host
import os
import shutil


def rise(numbers):
  secret = "@FOLDER@/secret"
  for attempt in (
    lambda: open("@FOLDER@/new", "w").write("x"),
    lambda: open(secret, "a").write("x"),
    lambda: os.open(secret, os.O_RDONLY | os.O_TRUNC),
    lambda: os.truncate(secret, 0),
    lambda: os.rename(secret, "@FOLDER@/other"),
    lambda: os.remove(secret),
    lambda: os.mkdir("@FOLDER@/folder"),
    lambda: shutil.rmtree("@FOLDER@"),
    lambda: os.chmod(secret, 0o777),
    lambda: os.utime(secret, (0, 0)),
    lambda: os.chown(secret, 0, 0),
    lambda: os.setxattr(secret, "user.x", b"x"),
  ):
    try:
      attempt()
    except OSError:
      pass
  return -1
