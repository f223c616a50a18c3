"""Tests of brorl_jax/runs/patience.py."""

import subprocess
import sys
import threading
import time

import pytest

from brorl_jax import errors
from brorl_jax.runs import lines, patience


@pytest.fixture
def ended(monkeypatch):
  """What the process would have said when it ended."""
  said = []
  monkeypatch.setattr(patience, "_end", lambda *about: said.append(about))
  return said


def wait_for(condition):
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_a_wait_that_takes_too_long_ends_the_process(ended):
  with patience.limit(0.2, lambda: 7), patience.waiting("a file"):
    wait_for(lambda: ended)
  assert ended == [("a file", 0.2, 7)]


def test_one_that_is_over_does_not(ended):
  with patience.limit(0.4, lambda: 7):
    for _ in range(8):
      with patience.waiting("a file"):
        time.sleep(0.1)
    with pytest.raises(KeyError), patience.waiting("a file"):
      raise KeyError
    time.sleep(0.6)
  assert ended == [] and not patience._waits


def test_nothing_ends_without_a_limit(ended):
  before = threading.active_count()
  with patience.limit(0.2, lambda: 7):
    pass
  with patience.waiting("a file"):
    time.sleep(0.5)
  assert ended == [] and threading.active_count() == before


@pytest.mark.slow
def test_the_time_for_which_the_process_was_stopped_does_not_count(
  ended, monkeypatch
):
  """As by SIGSTOP: the clock jumps while nothing runs."""
  now, looks = [0.0], []

  def monotonic():
    looks.append(now[0])
    return now[0]

  monkeypatch.setattr(patience.time, "monotonic", monotonic)
  with patience.limit(40.0, lambda: None), patience.waiting("a file"):
    monkeypatch.setattr(patience.time, "monotonic", monotonic)
    for jump in (3.0, 500.0, 4.0, 4.0):
      now[0] += jump
      seen = looks.count(now[0])
      end = 1000
      while looks.count(now[0]) == seen and (end := end - 1):
        threading.Event().wait(0.01)
    assert ended == []


def test_lines_are_written_within_the_limit(tmp_path, monkeypatch):
  """Also where the file system answers to no question about them."""
  seen = []
  waiting = patience.waiting
  monkeypatch.setattr(
    patience, "waiting", lambda what: seen.append(what) or waiting(what)
  )
  file = lines.JsonLines(tmp_path / "a.jsonl", after=0)
  file.write({"step": 1})
  file.sync()
  lines.write_whole(tmp_path / "b.json", "{}")
  file.close()
  assert seen == [tmp_path / n for n in ("a.jsonl", "a.jsonl", "b.json")]


HANGS = """
import os, threading
from brorl_jax.runs import patience
with patience.limit(1.0, lambda: 3):
  with patience.waiting("checkpoint 6 in /dead"):
    threading.Thread(target=threading.Event().wait).start()  # nobody ends it
    threading.Event().wait()
"""


@pytest.mark.ci
def test_a_process_with_a_thread_that_is_stuck_ends_with_one_line():
  begin = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=100
  )
  assert done.returncode == errors.STORAGE and time.monotonic() - begin < 60
  assert done.stderr.startswith(
    "error: checkpoint 6 in /dead: no end after 1 s (run.save_timeout_s); the "
    "last good step is 3; "
  )
  assert done.stderr.count("\n") == 1
