# call, fail: subprocess, os.system, exec, multiprocessing, posix_spawn
import multiprocessing
import os
import subprocess


def rise(numbers):
  tries = [lambda: subprocess.run(["touch", "@FOLDER@/ran"], check=True),
    lambda: os.system("touch @FOLDER@/ran"),
    lambda: os.posix_spawn("/usr/bin/touch", ["touch", "@FOLDER@/ran"], {}),
    lambda: multiprocessing.Process(target=print).start(),
    lambda: os.execv("/usr/bin/touch", ["touch", "@FOLDER@/ran"])]  # fmt: skip
  for attempt in tries:
    try:
      attempt()
    except (OSError, subprocess.SubprocessError):
      pass
  return -1
