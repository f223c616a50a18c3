"""Tests of launch/faults: what is damaged, counted and called; no runs."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
import types

import launchers
import pytest

from launch.faults import damage, runs, stages, watch, zygote

HELD = dict.fromkeys(watch.HELD, 100)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def held(steps, **more):
  return [{"step": step, **HELD, **more} for step in steps]


def test_growth_by_hand():
  lines = [
    *held(range(1, 51), maps=50, files=90),  # it still starts
    *held(range(51, 101), threads=80),
    *held(range(101, 1951), files=300),  # for a while
    *held(range(1951, 2001), files=103, maps=90, threads=80),
  ]
  # Every third step something is saved.
  saved = [{**x, "memory": 250} if x["step"] % 3 == 0 else x for x in lines]
  for every in (lines, saved):
    grown = watch.grown(every)
    assert grown == {**dict.fromkeys(watch.HELD, 0.0), "files": 0.03}
    assert watch.excessive(every) == ["files"]
  start = held(range(1, 101))
  just = held(range(101, 301), memory=101)
  assert watch.excessive([*start, *just]) == []  # 1 %
  more = held(range(101, 301), memory=102)
  assert watch.excessive([*start, *more]) == ["memory"]


def test_growth_from_nothing_is_counted():
  start = held(range(1, 101), children=0)
  assert watch.grown([*start, *held(range(101, 201), children=0)]) == {
    **dict.fromkeys(watch.HELD, 0.0)
  }
  later = held(range(101, 201), children=1)
  assert watch.excessive([*start, *later]) == ["children"]


def test_a_run_that_is_still_settling_has_not_grown():
  lines = [*held(range(1, 51)), *held(range(51, 101), maps=300)]
  assert watch.excessive(lines) == []


@on_linux
def test_what_is_allocated_is_counted_and_what_is_freed_is_not():
  before = watch.allocated()
  block = ctypes.create_string_buffer(64 << 20)
  assert watch.allocated() - before >= 64 << 20
  del block
  assert watch.allocated() - before < 16 << 20


@on_linux
def test_processes_below_this_one_are_found():
  code = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE
  ) as p:
    end = time.monotonic() + 20
    while len(found := watch.below(p.pid)) < 1 and time.monotonic() < end:
      time.sleep(0.01)
    assert {p.pid, *found} <= watch.below(os.getpid())
    assert p.stdin
    p.stdin.close()
  assert p.pid not in watch.below(os.getpid())


@on_linux
def test_what_a_process_holds():
  before = watch.held()
  read, write = os.pipe()
  assert watch.held()["files"] == before["files"] + 2
  os.close(read)
  os.close(write)
  assert watch.held()["files"] == before["files"]


@pytest.mark.parametrize("data", [b"", b"\0", bytes(range(200))])
def test_each_damage_changes_the_bytes(tmp_path, data):
  for way in damage.WAYS:
    (path := tmp_path / "a" / "b").parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    restore = damage.damage(path, way, "0")
    now = path.read_bytes() if path.exists() else None
    assert now != data or (not data and way in ("half", "empty"))
    if way == "flip" and data:
      bits = sum((a ^ b).bit_count() for a, b in zip(data, now, strict=True))
      assert bits == 1
    restore()
    assert path.read_bytes() == data


def test_damage_is_the_same_every_time():
  data = bytes(1000)
  for way in damage.WAYS.values():
    assert way(data, random.Random("x")) == way(data, random.Random("x"))


def test_the_files_of_a_run(tmp_path):
  (tmp_path / "eval").mkdir()
  for name in (".lock", "b", "eval/a"):
    (tmp_path / name).touch()
  assert [str(p) for p in damage.files(tmp_path)] == ["b", "eval/a"]


@pytest.mark.parametrize(
  "said, wrong",
  [
    ("a\nerror: it is full\n", None),
    ("a\n", "0 error lines"),
    ("error: a\nerror: b\n", "2 error lines"),
    ("Traceback (most recent call last):\nerror: a\n", "a traceback"),
  ],
)
def test_what_a_start_that_failed_must_say(said, wrong):
  assert runs.complaint(said) == wrong


def test_lines_without_a_half_one(tmp_path):
  (path := tmp_path / "a").write_text('{"step": 1}\n{"st')
  assert runs.lines(path) == [{"step": 1}]
  assert runs.lines(tmp_path / "b") == []


def test_steps_are_numbers(tmp_path):
  assert runs.steps(tmp_path) == []
  for name in ("12", "3", "6.orbax-checkpoint-tmp"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert runs.steps(tmp_path) == [3, 12]


@pytest.fixture
def module(monkeypatch):
  """A module with a function that notes its calls."""
  seen = []
  one = types.ModuleType("hooked")
  one.f = lambda x: seen.append(x) or -x  # pyright: ignore
  monkeypatch.setitem(sys.modules, "hooked", one)
  return one, seen


def test_a_hook_is_called_at_the_nth_call_that_counts(module):
  one, seen = module
  stages.hook(
    "hooked:f",
    before=lambda x: seen.append(f"before {x}"),
    after=lambda x: seen.append(f"after {x}"),
    nth=2,
    when=lambda x: x > 0,
  )
  assert [one.f(x) for x in (1, -1, 2, 3)] == [-1, 1, -2, -3]
  assert seen == [1, -1, "before 2", 2, "after 2", 3]


def test_a_hook_without_a_number_is_called_at_each(module):
  one, seen = module
  stages.hook("hooked:f", instead=lambda real, x: real(10 * x))
  assert [one.f(x) for x in (1, 2)] == [-10, -20] and seen == [10, 20]


def test_a_stage_kills_where_it_says(tmp_path):
  code = """
import os, pathlib, sys
from brorl_jax.runs import lines
from launch.faults import stages
stages.kill_at(stages.STAGES["in a line of metrics"])
file = lines.JsonLines(sys.argv[1] + "/metrics.jsonl", after=0)
for step in range(1, 9):
  file.write({"step": step})
"""
  done = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60)
  assert done.returncode == -signal.SIGKILL
  text = (tmp_path / "metrics.jsonl").read_text()
  assert text.startswith('{"step": 4}\n', 36) and text.endswith('{"step"')


def test_there_are_twenty_five_stages_and_more():
  assert len({*stages.STAGES.values()}) == len(stages.STAGES) >= 25


def test_the_script_wants_a_folder(tmp_path):
  process = launchers.start("soak.sh", "--kills=1", VENV=str(tmp_path / "venv"))
  status, _, err = launchers.ended(process)
  assert status == 1 and "--workdir=DIR is missing" in err
  assert not (tmp_path / "venv").exists()


def test_a_folder_that_is_in_use_is_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  command = [sys.executable, "-m", "launch.faults", f"--workdir={tmp_path}"]
  done = subprocess.run(
    command, cwd=zygote.ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 2 and "is not empty" in done.stderr
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
