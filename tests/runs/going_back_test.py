"""Tests of brorl_jax/runs/going_back.py, on files alone."""

import json
import os
import pathlib
import shutil

import pytest
from messages import mentions

from brorl_jax import processes
from brorl_jax.errors import UserError
from brorl_jax.runs import going_back, lines

FILES = (
  "metrics.jsonl",
  "events.jsonl",
  "samples.jsonl",
  "visits.jsonl",
  "eval/curve.jsonl",
)


def line(step, **more):
  return json.dumps({"step": step, **more}) + "\n"


@pytest.fixture
def run(tmp_path):
  """Steps 0, 3, 6, 9 and lines up to 11."""
  run = tmp_path / "run"
  for step in (0, 3, 6, 9):
    (run / "checkpoints" / str(step)).mkdir(parents=True)
    (run / "checkpoints" / str(step) / "data").write_text(f"state {step}")
  (run / "eval").mkdir()
  for name in FILES:
    (run / name).write_text("".join(line(s, of=name) for s in range(12)))
  (run / "eval" / "records.jsonl").write_text(line(0) + line(3))
  (run / "config.json").write_text('{"config": {}}\n')
  (run / "wandb_id").write_text("abc\n")
  (run / ".lock").touch()
  return run


def tree(folder):
  paths = [p for p in folder.rglob("*") if p.is_file()]
  return {p.relative_to(folder).as_posix(): p.read_text() for p in paths}


def test_what_came_after_is_beside_it(run, monkeypatch):
  monkeypatch.setattr(going_back.events, "now", lambda: "noon")
  before = tree(run)
  to = going_back.go_back(run, 3)
  assert to == run / "set_aside" / "1"
  aside = tree(to)
  assert aside.keys() == {
    *FILES, "checkpoints/6/data", "checkpoints/9/data", "config.json",
    "wandb_id",
  }  # fmt: skip
  after = tree(run)
  for name in FILES:
    what = {"event": "back", "from": 11, "kept": "set_aside/1"}
    event = line(3, time="noon", **what)
    told = event if name == "events.jsonl" else ""
    assert after[name] + aside[name] == before[name][
      : len("".join(line(s, of=name) for s in range(4)))
    ] + told + "".join(line(s, of=name) for s in range(4, 12))
  assert after["eval/records.jsonl"] == before["eval/records.jsonl"]
  assert after["config.json"] == aside["config.json"] == before["config.json"]
  assert {k for k in after if k.startswith("checkpoints")} == {
    "checkpoints/0/data", "checkpoints/3/data",
  }  # fmt: skip


def test_where_nothing_came_after_nothing_is_done(run):
  going_back.go_back(run, 9)
  before = tree(run)
  assert going_back.go_back(run, 9) is None
  assert tree(run) == before


def test_lines_without_a_later_step_are_kept_beside_it_too(run):
  to = going_back.go_back(run, 9)
  assert to is not None and not (to / "checkpoints").exists()
  assert [x["step"] for x in lines.read_lines(to / FILES[0])] == [10, 11]


def test_going_back_twice_keeps_both(run):
  going_back.go_back(run, 6)
  assert going_back.go_back(run, 3) == run / "set_aside" / "2"
  kept = lines.read_lines(run / "set_aside/2/events.jsonl")
  assert [x["step"] for x in kept] == [4, 5, 6]
  story = lines.read_lines(run / "events.jsonl")
  assert [x["from"] for x in story if x.get("event") == "back"] == [11, 6]


def test_events_of_processes_stay_where_they_are(run):
  with (run / "events.jsonl").open("a") as file:
    file.write(line(11, event="end", why="done"))
  to = going_back.go_back(run, 3)
  kinds = [x.get("event") for x in lines.read_lines(run / "events.jsonl")]
  assert kinds[-2:] == ["end", "back"]
  assert to is not None
  assert "done" not in (to / "events.jsonl").read_text()
  assert going_back.go_back(run, 3) is None  # nothing else is after it


@pytest.mark.parametrize("name", ["1x", "x"])
def test_other_folders_and_notes_beside_it_are_left_alone(run, name):
  (run / "set_aside" / name).mkdir(parents=True)
  (run / "set_aside" / "1").mkdir()
  (run / "set_aside" / "1" / "unfinished").write_text("abc")
  assert going_back.go_back(run, 3) == run / "set_aside" / "2"
  going_back.before_start(run, None)
  assert (run / "set_aside" / name).is_dir()


CALLS = [(os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rename")]


class Killer:
  """Kills at one of the calls that change a name, before or after it."""

  def __init__(self, patch, at, after):
    self.count, self.at, self.after = 0, at, after
    for module, name in CALLS:
      patch.setattr(module, name, self._wrapped(getattr(module, name)))

  def _wrapped(self, inner):
    def call(*args, **how):
      now, self.count = self.count == self.at, self.count + 1
      if now and not self.after:
        raise KeyboardInterrupt
      try:
        inner(*args, **how)
      finally:
        if now:
          raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("after", [False, True])
def test_killed_anywhere_it_ends_the_same(run, tmp_path, after, monkeypatch):
  monkeypatch.setattr(going_back.events, "now", lambda: "noon")
  whole = tmp_path / "whole"
  shutil.copytree(run, whole)
  going_back.go_back(whole, 3)
  at = 0
  while True:
    copy = tmp_path / f"{at}"
    shutil.copytree(run, copy)
    with pytest.MonkeyPatch.context() as patch:
      Killer(patch, at, after)
      try:
        going_back.go_back(copy, 3)
        break
      except KeyboardInterrupt:
        pass
    going_back.go_back(copy, 3)
    assert tree(copy) == tree(whole), at
    assert not [p for p in copy.rglob("*") if p.name == "2"], at
    at += 1
  assert at > 15


def test_a_start_that_does_not_go_on_with_it_ends_it(run, monkeypatch):
  """Its folder is not taken for that of a later call."""
  rename = pathlib.Path.rename

  def killed(path, to):
    if path.name == "6":
      raise KeyboardInterrupt
    return rename(path, to)

  monkeypatch.setattr(pathlib.Path, "rename", killed)
  with pytest.raises(KeyboardInterrupt):
    going_back.go_back(run, 3)
  monkeypatch.undo()
  assert (run / "set_aside/1/checkpoints/9").exists()
  going_back.before_start(run, None)
  with (run / "metrics.jsonl").open("a") as file:
    file.write(line(12))
  going_back.before_start(run, 3)
  kept = lines.read_lines(run / "set_aside/2/metrics.jsonl")
  assert [x["step"] for x in kept] == [*range(4, 13)]
  assert (run / "set_aside/2/checkpoints/6").exists()


def test_only_process_0_moves_and_the_others_wait(run, monkeypatch):
  gathered, before = [], tree(run)
  monkeypatch.setattr(processes, "leads", lambda: False)
  monkeypatch.setattr(processes, "gather", gathered.append)
  going_back.before_start(run, 3)
  assert gathered == [None] and tree(run) == before
  monkeypatch.setattr(processes, "leads", lambda: True)
  moved = lambda _: gathered.append((run / "checkpoints/9").exists())
  monkeypatch.setattr(processes, "gather", moved)
  going_back.before_start(run, 3)
  assert gathered == [None, False]


def test_a_step_that_is_not_there_is_refused_by_name(run, tmp_path):
  going_back.require_saved(run, 3)
  with pytest.raises(UserError) as e:
    going_back.require_saved(run, 4)
  assert mentions(str(e.value), "--from_step=4 ... are: 0, 3, 6, 9")
  with pytest.raises(UserError, match="there are: none"):
    going_back.require_saved(tmp_path / "nothing", 4)
