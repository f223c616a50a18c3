"""Tests of brorl_jax/runs/lock.py."""

import os
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
  with pytest.raises(UserError, match=f"is in use by process {other.pid};"):
    lock.hold(workdir)
  other.kill()  # a lock ends with its process, however it ends
  other.communicate()
  with lock.hold(workdir):
    pass


def test_a_refused_start_leaves_the_folder_as_it_was(tmp_path):
  with lock.hold(tmp_path) as held:
    held.undo()
  assert list(tmp_path.iterdir()) == []
  before = "12345\n"  # the process that used it last
  (tmp_path / lock.NAME).write_text(before)
  with lock.hold(tmp_path) as held:
    assert (tmp_path / lock.NAME).read_text() == f"{os.getpid()}\n"
    held.undo()
  assert (tmp_path / lock.NAME).read_text() == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot be written") as error:
    lock.hold(tmp_path / "file" / "run")
  assert "\n" not in str(error.value)
