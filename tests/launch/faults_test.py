"""Tests of launch/faults: what is damaged, counted and called; no runs."""

import signal
import subprocess
import sys
import types

import launchers
import pytest

from launch.faults import __main__ as command
from launch.faults import damage, runs, stages


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


def test_the_files_of_a_run(tmp_path):
  (tmp_path / "eval").mkdir()
  for name in (".lock", "b", "eval/a"):
    (tmp_path / name).touch()
  assert [str(p) for p in damage.files(tmp_path)] == ["b", "eval/a"]


@pytest.mark.parametrize("said, wrong", [
  ("a\nerror: it is full\n", None), ("a\n", "0 error lines"),
  ("error: a\nerror: b\n", "2 error lines"),
  ("Traceback (most recent call last):\nerror: a\n", "a traceback"),
])  # fmt: skip
def test_what_a_start_that_failed_must_say(said, wrong):
  assert runs.complaint(said) == wrong


def test_steps_are_numbers(tmp_path):
  assert runs.steps(tmp_path) == []
  for name in ("12", "3", "6.orbax-checkpoint-tmp"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert runs.steps(tmp_path) == [3, 12]


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_stage_is_the_nth_call_that_counts(monkeypatch, how):
  class Killed(Exception):
    pass

  def kill():
    raise Killed

  seen, one = [], types.ModuleType("hooked")
  one.f = lambda x: seen.append(x) or -x  # pyright: ignore
  monkeypatch.setitem(sys.modules, "hooked", one)
  monkeypatch.setattr(stages, "kill", kill)
  stages.kill_at(stages.Stage("hooked:f", 2, how, lambda x: x > 0))
  assert [one.f(x) for x in (1, -1)] == [-1, 1]
  with pytest.raises(Killed):
    one.f(2)
  assert seen == [1, -1, 2][: 3 if how == "after" else 2]


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


def test_the_script_wants_a_folder(tmp_path):
  process = launchers.start("soak.sh", "--kills=1", VENV=str(tmp_path / "venv"))
  status, _, err = launchers.ended(process)
  assert status == 1 and "--workdir=DIR is missing" in err
  assert not (tmp_path / "venv").exists()


def test_a_folder_that_is_in_use_is_refused(tmp_path, monkeypatch, capsys):
  (tmp_path / "thesis.tex").write_text("precious")
  monkeypatch.setattr(sys, "argv", ["faults", f"--workdir={tmp_path}"])
  with pytest.raises(SystemExit, match="2"):
    command.main()
  assert "is not empty" in capsys.readouterr().err
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
