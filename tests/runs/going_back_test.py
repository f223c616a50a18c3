"""Tests of brorl_jax/runs/going_back.py, on files alone."""

import os
import pathlib
import shutil

import pytest

from brorl_jax.many import processes
from brorl_jax.runs import going_back, stored


@pytest.fixture
def run(tmp_path):
  """Steps 0, 3, 6, 9."""
  run = tmp_path / "run"
  for step in (0, 3, 6, 9):
    save(run, step)
  (run / "metrics.jsonl").write_text('{"step": 1}\n')
  (run / "config.json").write_text('{"config": {}}\n')
  (run / "wandb_id").write_text("abc\n")
  (run / ".lock").touch()
  return run


def save(run, step):
  (run / "checkpoints" / str(step)).mkdir(parents=True)
  (run / "checkpoints" / str(step) / "data").write_text(f"state {step}")


def tree(folder):
  paths = [p for p in folder.rglob("*") if p.is_file()]
  return {p.relative_to(folder).as_posix(): p.read_text() for p in paths}


def test_later_checkpoints_are_beside_it(run, capsys):
  before = tree(run)
  going_back.before_start(run, 3)
  assert f"moved later checkpoints to {run}/set_aside/1\n" in (
    capsys.readouterr().out
  )
  aside = tree(run / "set_aside" / "1")
  assert aside == {
    name: before[name]
    for name in (
      "checkpoints/6/data", "checkpoints/9/data", "config.json", "wandb_id",
    )
  }  # fmt: skip
  left = {k: v for k, v in tree(run).items() if not k.startswith("set_aside")}
  assert left.keys() == before.keys() - aside.keys() | {"config.json"}
  assert left.items() <= before.items()


def test_where_nothing_came_after_nothing_is_done(run):
  before = tree(run)
  for step in (9, None):
    going_back.before_start(run, step)
    assert tree(run) == before


def test_going_back_twice_keeps_both(run):
  (run / "set_aside" / "x").mkdir(parents=True)
  going_back.before_start(run, 6)
  save(run, 9)
  going_back.before_start(run, 3)
  steps = lambda n: stored.steps(run / f"set_aside/{n}/checkpoints")
  assert (steps(1), steps(2)) == ([9], [6, 9])


CALLS = [(os, "replace"), (os, "mkdir"), (os, "rename")]


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
def test_killed_anywhere_it_ends_the_same(run, tmp_path, after):
  whole = tmp_path / "whole"
  shutil.copytree(run, whole)
  going_back.before_start(whole, 3)
  at = 0
  while True:
    copy = tmp_path / f"{at}"
    shutil.copytree(run, copy)
    with pytest.MonkeyPatch.context() as patch:
      Killer(patch, at, after)
      try:
        going_back.before_start(copy, 3)
        break
      except KeyboardInterrupt:
        pass
    going_back.before_start(copy, 3)
    assert tree(copy) == tree(whole), at
    at += 1
  assert at > 6


def test_a_start_that_does_not_go_on_with_it_ends_it(run, monkeypatch):
  """Its folder is not taken for that of a later call."""
  rename = pathlib.Path.rename

  def killed(path, to):
    if path.name == "6":
      raise KeyboardInterrupt
    return rename(path, to)

  monkeypatch.setattr(pathlib.Path, "rename", killed)
  with pytest.raises(KeyboardInterrupt):
    going_back.before_start(run, 3)
  monkeypatch.undo()
  going_back.before_start(run, None)
  assert stored.steps(run / "set_aside/1/checkpoints") == [9]
  save(run, 9)
  going_back.before_start(run, 3)
  assert stored.steps(run / "set_aside/2/checkpoints") == [6, 9]


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
