"""Tests of brorl_jax/runs/lock.py."""

import subprocess
import sys

import pytest

from brorl_jax.errors import UserError
from brorl_jax.runs import lock

HOLD = """
import pathlib, sys
from brorl_jax.runs import lock
with lock.hold(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  sys.stdin.read()
"""


def test_two_processes_do_not_share_a_folder(tmp_path):
  workdir = tmp_path / "runs" / "run"
  other = subprocess.Popen(
    [sys.executable, "-c", HOLD, workdir],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert other.stdout.readline() == "held\n"
  in_use = pytest.raises(UserError, match=f"in use by process {other.pid};")
  with in_use, lock.hold(workdir):
    pass
  other.kill()  # a lock ends with its process, however it ends
  other.communicate()
  with lock.hold(workdir):
    pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  refused = pytest.raises(UserError, match="cannot be written")
  with refused as error, lock.hold(tmp_path / "file" / "run"):
    pass
  assert "\n" not in str(error.value)
