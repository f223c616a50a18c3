"""A run on a bandit, with its real folder: lost, damaged, full, begun again."""

import dataclasses
import errno
import functools
import hashlib
import json
import os
import pathlib
import shutil
import threading
import time
import types

import configured
import jax
import jax.numpy as jnp
import pytest
import tiers
from loop_test import State, bandit
from messages import mentions

from brorl_jax import errors
from brorl_jax.errors import UserError
from brorl_jax.main import train as train_command
from brorl_jax.main.recorder import NO_WORD, OF_PROCESS
from brorl_jax.plan import resolve
from brorl_jax.runs import checkpoints, folder, lines
from brorl_jax.stages.examples import Examples
from brorl_jax.verdicts.base import Example

EVERY = {"metrics.jsonl", "samples.jsonl", "events.jsonl"}
EVERY |= {"eval/curve.jsonl", "eval/records.jsonl"}


def config(**changes):
  small = dict(steps=12, save_every=3, eval_every=4, keep_checkpoints=3)
  small |= dict(eval_prompts=2, eval_n=2)
  return configured.config(**small | changes)


def measure(step, params, heldout):
  """Two prompts with two samples each, right once anything was learned."""
  del step, heldout
  right = bool(params[2] > 0)
  said = {"domain": "gym", "task": "t", "tokens": 1, "truncated": False}
  said |= {"score": float(right), "pass": right, "reason": ""}
  said |= {"status": "pass" if right else "fail"}
  yield [{"id": name, "sample": n, "answer": "2", **said}
    for name in "ab" for n in range(2)]  # fmt: skip


class One(Examples):
  def __init__(self):
    self.log_lines = ["examples"]

  def example(self, step, p):
    del step, p
    return Example("q", "gym", "t", [], {})

  def asked(self, example):
    return example.id

  def decode(self, ids):
    return ["2" for _ in ids]


@functools.cache
def resolved():
  c = config()
  return resolve.resolve(c, resolve.here(c.devices))


class Run:
  def __init__(self, patch, workdir):
    self.patch, self.dir, self.stages = patch, workdir, bandit()
    self.closed, self.measure = 0, measure
    patch.setattr(train_command, "_parts", self._parts)
    patch.setattr(train_command, "stages", lambda *_: self.stages)
    measured = lambda *args: self.measure(*args[-3:])
    patch.setattr(train_command, "records_of_step", measured)
    patch.setattr(train_command, "finish", lambda *_, **__: None)
    # Its state is another.
    patch.setattr(train_command.states, "saved", lambda state: state)
    patch.setattr(train_command.states, "restored", lambda state, like: state)

  def _parts(self, *_):
    judge = types.SimpleNamespace(replaced=dict, log_lines=[], episodes=False)
    judge.close = self._end
    state = State(jnp.zeros(3), jnp.int32(0), jnp.zeros(3))
    found = {"data": {"seed": "0"}, "functions": {}}
    return train_command._Parts(One(), judge, [], state, found)

  def _end(self):
    self.closed += 1

  def start(
    self, *, begin_again=False, allow_change=False, from_step=None, **changes
  ):
    train_command.run(
      dataclasses.replace(resolved(), config=config(**changes)), self.dir,
      allow_change=allow_change, begin_again=begin_again, from_step=from_step,
    )  # fmt: skip

  def refused(self, **how):
    """The one line of a start that changes not a byte."""
    before = tree(self.dir)
    said = self.stopped(**how)
    assert tree(self.dir) == before
    return said

  def stopped(self, **how):
    with pytest.raises(UserError) as e:
      self.start(**how)
    assert "\n" not in str(e.value)
    self.status = e.value.status
    return str(e.value)

  def lines(self, name):
    timed = ("time", "score/", "memory/", "rollout/", "seconds")
    return [{k: v for k, v in line.items() if not k.startswith(timed)}
      for line in lines.read_lines(self.dir / name)]  # fmt: skip

  def all(self):
    said = {name: self.lines(name) for name in EVERY}
    said["events.jsonl"] = [
      e for e in said["events.jsonl"] if e["event"] not in OF_PROCESS
    ]
    return said, self.record(self.steps()[-1])

  def told(self, event):
    every = self.lines("events.jsonl")
    return [(e["step"], e.get("why")) for e in every if e["event"] == event]

  def steps(self):
    return checkpoints.steps(self.dir / "checkpoints")

  def record(self, step):
    path = self.dir / "checkpoints" / str(step) / "extra" / "metadata"
    return json.loads(path.read_text())


def tree(workdir):
  """Every file and folder below but the lock, with a digest of its bytes."""
  return {
    path.relative_to(workdir).as_posix(): (
      hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    )
    for path in workdir.rglob("*")
    if path.name != ".lock"
  }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    run = Run(patch, tmp_path_factory.mktemp("whole") / "run")
    run.start()
    yield run


@pytest.fixture
def new(monkeypatch, tmp_path):
  return Run(monkeypatch, tmp_path / "run")


@pytest.fixture
def run(whole, monkeypatch, tmp_path):
  shutil.copytree(whole.dir, tmp_path / "run")
  return Run(monkeypatch, tmp_path / "run")


def killed(*_):
  raise KeyboardInterrupt


def fail_at(run, step, do):
  update = bandit().update

  def at(state, *args):
    if int(state.step) == step - 1:
      do()
    return update(state, *args)

  run.stages = bandit(update=at)


def damage(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def damage_step(run, step):
  damage(run.dir / "checkpoints" / str(step) / "extra" / "metadata")


def cut_lines(path, count, tail=b""):
  kept = path.read_bytes().splitlines(keepends=True)[:count]
  path.write_bytes(b"".join(kept) + tail)


# ----------------------------------------------------- what a run leaves


def test_a_run_leaves_steps_that_can_be_gone_on_from(whole):
  assert whole.steps() == [6, 9, 12]
  assert [x["step"] for x in whole.lines("metrics.jsonl")] == [*range(1, 13)]
  assert [x["step"] for x in whole.lines("eval/curve.jsonl")] == [0, 4, 8, 12]
  assert len(whole.lines("eval/records.jsonl")) == 4 * 4


def test_an_undisturbed_run_uses_its_own_steps(run, capsys):
  before = tree(run.dir)
  run.start()
  assert "not used" not in capsys.readouterr().out
  after = tree(run.dir)
  names = lambda tree: {k for k in tree if "tfevents" not in k}
  assert names(after) == names(before)
  for name in EVERY | {k for k in before if k.startswith("checkpoints")}:
    assert after[name] == before[name], name


@pytest.mark.ci
@pytest.mark.parametrize("steps", tiers.some([1, 3, 4, 8], 2, 3))
def test_it_goes_on_to_the_same_lines_and_the_same_state(whole, new, steps):
  fail_at(new, steps + 1, killed)
  with pytest.raises(KeyboardInterrupt):
    new.start()
  seen = [x["step"] for x in new.lines("metrics.jsonl")]
  assert seen == [*range(1, steps + 1)]
  new.stages = bandit()
  new.start()
  assert new.all() == whole.all()
  assert new.told("resume") == [(steps // 3 * 3, None)]


@pytest.mark.ci
def test_a_run_killed_before_any_line_begins(whole, new, monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(checkpoints.Store, "save", killed)
    new.start()
  assert {p.name for p in new.dir.iterdir()} >= {"config.json", "eval"}
  new.start()
  assert new.all() == whole.all()


def test_every_file_is_on_disk_before_a_step_is_saved(new, monkeypatch):
  seen, before, fsync, save = set(), {}, os.fsync, checkpoints.Store.save

  def spy(at):
    seen.add(os.readlink(f"/proc/self/fd/{at}"))
    fsync(at)

  def saves(self, step, *args):
    self.wait()  # it syncs files of its own in another thread
    before[step] = set(seen)
    seen.clear()
    save(self, step, *args)

  monkeypatch.setattr(os, "fsync", spy)
  monkeypatch.setattr(checkpoints.Store, "save", saves)
  new.start(steps=3)
  files = {f"{new.dir}/{name}" for name in EVERY}
  assert before.keys() == {0, 3}
  for paths in before.values():
    assert paths >= files | {f"{new.dir}", f"{new.dir}/eval"}


# --------------------------------------------------- begun again over itself


def lose_all(run):
  for step in run.steps():
    damage_step(run, step)


def lose_folder(run):
  shutil.rmtree(run.dir / "checkpoints")


LOST = {"all damaged": (lose_all, "checkpoints ... 12 ... record"),
  "no folder": (lose_folder, "metrics.jsonl ... checkpoints")}  # fmt: skip


@pytest.mark.parametrize("lose, why", LOST.values(), ids=LOST)
def test_a_run_is_never_begun_again_over_itself(run, lose, why):
  lose(run)
  for _ in range(2):  # as a queue that tries again
    said = run.refused()
    assert mentions(said, why)
    assert "no file was changed" in said and "--begin_again" in said
  assert run.closed == 2


@pytest.mark.ci
@pytest.mark.parametrize("lose, why", LOST.values(), ids=LOST)
def test_begin_again_moves_the_old_files_aside(whole, run, capsys, lose, why):
  lose(run)
  before = tree(run.dir)
  run.start(begin_again=True)
  assert tree(run.dir / "set_aside" / "1") == before
  said, _ = whole.all(), capsys.readouterr()
  assert (run.all(), run.told("resume")) == (said, [])


def test_begin_again_takes_another_config_and_goes_on_afterwards(run):
  run.start(begin_again=True, lr=0.5, steps=3)
  assert run.refused(lr=0.25)
  run.start(lr=0.5, steps=4)
  assert [x["step"] for x in run.lines("metrics.jsonl")] == [1, 2, 3, 4]
  run.start(begin_again=True, steps=3)
  assert sorted(p.name for p in (run.dir / "set_aside").iterdir()) == ["1", "2"]
  assert len(lines.read_lines(run.dir / "set_aside/1/metrics.jsonl")) == 12


@pytest.mark.parametrize("count", tiers.some([1, 2, 3, 5], 1))
def test_begin_again_that_is_killed_loses_nothing(run, monkeypatch, count):
  rename, moved, before = pathlib.Path.rename, [], tree(run.dir)

  def killed(path, to):
    if path.parent == run.dir:
      if len(moved) == count:
        raise KeyboardInterrupt
      moved.append(path.name)
    return rename(path, to)

  monkeypatch.setattr(pathlib.Path, "rename", killed)
  with pytest.raises(KeyboardInterrupt):
    run.start(begin_again=True)
  assert moved and "config.json" not in moved
  monkeypatch.setattr(pathlib.Path, "rename", rename)
  run.refused()
  run.start(begin_again=True)
  assert tree(run.dir / "set_aside/1") | tree(run.dir / "set_aside/2") == before


def test_begin_again_leaves_alone_what_is_no_training_run(run, tmp_path):
  other = tmp_path / "thesis"
  other.mkdir()
  (other / "a.tex").touch()
  run.dir = other
  assert "do not belong to a run" in run.refused(begin_again=True)
  assert [p.name for p in other.iterdir()] == ["a.tex"]


# ------------------------------------------------- what cannot be read at all


@pytest.mark.parametrize("error, words", [
  (OSError(errno.EIO, "Input/output error", "x"), "Input/output error"),
  (ValueError("RESOURCE_EXHAUSTED: Out of memory"), "RESOURCE_EXHAUSTED"),
])  # fmt: skip
def test_what_cannot_be_read_is_no_damage(run, monkeypatch, error, words):
  damage_step(run, 12)
  read = checkpoints.read_step

  def fails(folder, *args):
    if folder.name == "9":
      raise error
    return read(folder, *args)

  monkeypatch.setattr(checkpoints, "read_step", fails)
  said = run.refused()
  assert mentions(said, f"checkpoint 9 ... {run.dir}/checkpoints")
  assert words in said and "--begin_again" not in said
  monkeypatch.setattr(checkpoints, "read_step", read)
  run.start()  # and nothing is lost when it can
  assert run.told("resume") == [(9, None)]


def test_lines_that_cannot_be_read_are_no_damage(run, monkeypatch):
  def fails(path, *_, **__):
    raise OSError(errno.EIO, "Input/output error", str(path))

  monkeypatch.setattr(lines, "_read", fails)
  said = run.refused()
  assert said.startswith(f"{run.dir}/eval/records.jsonl: Input/output error; ")
  assert "--begin_again" not in said


# ------------------------------------------------------------------- damage


def test_damage_is_set_aside_once_an_older_step_is_in_hand(whole, run):
  damage_step(run, 12)
  run.start()
  assert run.all() == whole.all()
  aside = run.dir / "set_aside"
  assert (aside / "1/checkpoints/12").is_dir()
  ((step, warning),) = run.told("warning")
  assert step == 9
  assert mentions(warning, f"checkpoint 12 ... record ... saved ... {aside}/1")
  assert run.told("resume") == [(9, None)]
  damage_step(run, 12)
  run.start()
  assert (aside / "2/checkpoints/12").is_dir()


@pytest.mark.ci
def test_a_step_of_another_run_is_not_used(run, monkeypatch, tmp_path, capsys):
  other = Run(monkeypatch, tmp_path / "other")
  other.start(seed=1)
  shutil.rmtree(run.dir / "checkpoints/12")
  shutil.copytree(other.dir / "checkpoints/12", run.dir / "checkpoints/12")
  run.start()
  ids = [folder.stored(one.dir, "run") for one in (other, run)]
  assert ids[0] != ids[1]
  out = capsys.readouterr().out
  assert mentions(out, f"checkpoint 12 ... {ids[0]} ... {ids[1]}")
  shutil.rmtree(run.dir / "checkpoints")
  shutil.copytree(other.dir / "checkpoints", run.dir / "checkpoints")
  assert mentions(run.refused(), f"{ids[0]} ... {ids[1]}")


def test_the_identity_of_a_run_stays_when_its_config_changes(run):
  before = folder.stored(run.dir, "run")
  assert run.record(12)["run"] == before
  run.start(lr=0.5, steps=15, allow_change=True)
  assert folder.stored(run.dir, "run") == before == run.record(15)["run"]
  assert run.record(15)["run"] == before


# -------------------------------------------------------- lines behind steps


@pytest.mark.parametrize("tail, left, back", [
  (b"", 11, 9), (b'{"step": 11, "x', 9, 9), (b"\0" * 90 + b"\n", 8, 6)
], ids=["cut", "torn", "zeros"])  # fmt: skip
def test_a_run_goes_back_to_what_its_lines_cover(whole, run, tail, left, back):
  cut_lines(run.dir / "metrics.jsonl", left, tail)
  run.start()
  assert run.all() == whole.all()
  aside = checkpoints.steps(run.dir / "set_aside/1/checkpoints")
  assert aside == [s for s in (9, 12) if s > back]
  assert run.told("resume") == [(back, None)]
  step, warning = run.told("warning")[0]
  path = run.dir / "metrics.jsonl"
  assert step == back
  assert mentions(warning, f"checkpoint 12 ... {path} ... step {left}")


def test_a_run_whose_lines_cover_no_step_is_refused(run):
  cut_lines(run.dir / "metrics.jsonl", 5)
  assert mentions(run.refused(), "step 12 ... step 5 ... --begin_again")


def test_a_damaged_line_before_whole_ones_is_refused(run):
  path = run.dir / "metrics.jsonl"
  kept = path.read_text().splitlines(keepends=True)
  for bad in ("[]\n", '{"step": "2"}\n', "{\n", "\0\n"):
    path.write_text(kept[0] + bad + "".join(kept[2:]))
    assert f"{path}, line 2: " in run.refused()
  path.write_text("".join(kept[:4] + kept[5:]))
  assert mentions(run.refused(), f"{path}, line 5 ... step ... 5")


@pytest.mark.parametrize("name, left, back, lacks", [
  ("eval/curve.jsonl", 2, 6, "eval ... step 8"),
  ("eval/records.jsonl", 15, 9, "eval ... step 12"),
])  # fmt: skip
def test_evaluations_are_lines_like_others(whole, run, name, left, back, lacks):
  cut_lines(run.dir / name, left)
  run.start()
  assert (run.all(), run.told("resume")) == (whole.all(), [(back, None)])
  assert any(mentions(why, lacks) for _, why in run.told("warning"))


@pytest.mark.parametrize("name", ["eval/curve.jsonl", "eval/records.jsonl"])
def test_evaluations_that_are_gone_are_refused(run, name):
  (run.dir / name).unlink()
  assert "--begin_again" in run.refused()


def test_the_last_evaluation_is_one_of_them(run):
  run.start(steps=13)  # which is no multiple of eval_every
  cut_lines(run.dir / "eval/curve.jsonl", 4)
  run.start(steps=13)
  assert [x["step"] for x in run.lines("eval/curve.jsonl")][-2:] == [12, 13]
  assert run.told("resume")[-1] == (12, None)


def test_starts_with_another_interval_have_evaluations_of_both(run):
  run.start(steps=18, eval_every=6, allow_change=True)
  assert [x["step"] for x in run.lines("eval/curve.jsonl")] == [0, 4, 8, 12, 18]
  run.start(steps=19, eval_every=6)
  assert run.told("warning") == []


@pytest.mark.parametrize("name", ["samples.jsonl", "events.jsonl"])
@pytest.mark.parametrize("bad", [b"[]", b"\xff\0"])
def test_a_bad_line_of_samples_or_events_is_left_out(run, name, bad):
  path = run.dir / name
  whole = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b"".join([whole[0], bad + b"\n", *whole[1:]]))
  run.start(steps=13)
  assert path.read_bytes().startswith(b"".join(whole))
  ((step, why),) = run.told("warning")
  assert step == 12 and mentions(why, f"{path}, line 2")


# ------------------------------------------------- faults while a run goes on


def test_checkpoints_that_are_removed_are_not_made_again(new, monkeypatch):
  there = new.dir / "checkpoints"
  # No step is being saved then.
  monkeypatch.setattr(checkpoints.Store, "check", checkpoints.Store.wait)
  fail_at(new, 5, lambda: shutil.rmtree(there))
  said = new.stopped()
  assert new.status == errors.STORAGE
  assert mentions(said, f"{there} ... removed")
  assert mentions(said, "checkpoint 6")
  assert mentions(said, "last good step is 3")
  assert not there.exists()
  new.stages = bandit()
  assert "--begin_again" in new.refused()


PLACES = (*sorted(EVERY), "config.json", "checkpoints")


class Failing:
  def __init__(self, file):
    self._file = file

  def write(self, data):
    self._file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")

  def close(self):
    self._file.close()


def break_at(patch, place, step):
  """From a step on, this file or folder of a run cannot be written."""
  error = OSError(errno.ENOSPC, "No space left on device")
  write, save = lines.JsonLines.write, checkpoints.ocp.CheckpointManager.save

  def writes(self, *some):
    if str(self._path).endswith(place) and some[0]["step"] >= step:
      self._file = Failing(self._file)
    write(self, *some)

  def saves(self, at, **how):
    if at >= step:
      raise error
    return save(self, at, **how)

  def replaces(source, to):
    if str(to).endswith(place):
      raise error
    os.rename(source, to)

  if place == "checkpoints":
    patch.setattr(checkpoints.ocp.CheckpointManager, "save", saves)
  elif place == "config.json":
    patch.setattr(os, "replace", replaces)
  else:
    patch.setattr(lines.JsonLines, "write", writes)


@pytest.mark.ci
@pytest.mark.parametrize("place", tiers.some(PLACES, 3, 4))
def test_a_full_disk_is_one_line_and_the_run_goes_on(whole, tmp_path, place):
  with pytest.MonkeyPatch.context() as patch:
    run = Run(patch, tmp_path / "run")
    break_at(patch, place, 4)
    said = run.stopped()
  assert run.status == errors.STORAGE
  assert mentions(said, f"{run.dir}/{place} ... No space left on device")
  step = "none" if place == "config.json" else 3
  assert mentions(said, f"last good step is {step}")
  with pytest.MonkeyPatch.context() as patch:
    run = Run(patch, run.dir)
    run.start()
    assert run.all() == whole.all()


@pytest.mark.ci
def test_a_slow_disk_does_not_hold_up_the_steps(whole, new, monkeypatch):
  """All up to the next step that is saved; and the numbers are the same."""
  seen, compare = {}, checkpoints.compare

  def slow(where, *args):
    if where.name == "3":
      end = time.monotonic() + 60
      while len(new.lines("metrics.jsonl")) < 6 and time.monotonic() < end:
        time.sleep(0.01)
      seen[3] = len(new.lines("metrics.jsonl"))
    compare(where, *args)

  monkeypatch.setattr(checkpoints, "compare", slow)
  new.start()
  assert seen == {3: 6} and new.all() == whole.all()


def test_a_failed_save_ends_a_run_once_a_step_sees_it(new, monkeypatch):
  begun, failed = threading.Event(), threading.Event()

  def fails(where, *args):
    if where.name == "3":
      begun.wait(60)  # or step 4 would see it on a busy machine
      failed.set()
      raise OSError(errno.EIO, "Input/output error", str(where))

  monkeypatch.setattr(checkpoints, "compare", fails)

  def wait():
    begun.set()
    failed.wait(60)
    time.sleep(0.5)

  fail_at(new, 5, wait)
  said = new.stopped(save_every=3)
  assert mentions(said, "checkpoint 3 ... Input/output ... step is 0")
  assert len(new.lines("metrics.jsonl")) == 4


# --------------------------------------------- the best step, and the way back


def test_only_a_step_that_was_evaluated_has_a_score(whole):
  assert [whole.record(s).get("score") for s in (6, 9, 12)] == [None, None, 1.0]


@pytest.fixture
def long(whole, monkeypatch, tmp_path):
  run = Run(monkeypatch, tmp_path / "long")
  run.start(keep_checkpoints=99)
  return run


@pytest.mark.ci
@pytest.mark.parametrize("step", tiers.some([0, 6, 12], 1, 2))
def test_a_run_goes_back_and_ends_as_it_did(whole, long, step):
  long.start(from_step=step, keep_checkpoints=99)
  assert long.all() == whole.all() and long.steps() == [0, 3, 6, 9, 12]
  aside = long.dir / "set_aside" / "1"
  if step == 12:
    assert not aside.exists()
    return
  (resume,) = [e for e in long.lines("events.jsonl") if e["event"] == "resume"]
  assert (resume["again"], resume["after"]) == (12 - step, "done")
  left = checkpoints.steps(aside / "checkpoints")
  assert left == [s for s in (3, 6, 9, 12) if s > step]


def test_a_run_can_go_another_way_from_there(long):
  long.start(from_step=6, keep_checkpoints=99, lr=0.5, allow_change=True)
  events = [e["event"] for e in long.lines("events.jsonl")]
  assert {"resume", "config"} <= {*events}
  assert (long.dir / "set_aside/1/config.json").exists()


def test_a_step_that_was_not_saved_is_not_gone_back_to(run):
  assert mentions(run.refused(from_step=7), "checkpoint 7 ... 6, 9, 12")


@pytest.mark.ci
def test_an_end_by_an_error_is_an_event(new):
  def fails():
    raise FloatingPointError("step 8: x is nan")

  fail_at(new, 8, fails)
  assert "step 8: x is nan" in new.stopped()
  assert new.told("end") == [(7, "step 8: x is nan")]
  new.stages = bandit()
  new.start()
  assert new.told("end") == [(7, "step 8: x is nan"), (12, "done")]
  assert new.told("resume") == [(6, None)]


@pytest.mark.ci
def test_events_of_processes_stay_and_those_of_training_are_written_again(new):
  told = lambda state, progress: (state, progress, "always")
  fail_at(new, 6, killed)
  new.stages = new.stages._replace(reference=told)
  with pytest.raises(KeyboardInterrupt):
    new.start()
  new.stages = bandit(reference=told)
  new.start(steps=7)
  kinds = [(e["step"], e["event"]) for e in new.lines("events.jsonl")]
  reset = "reference reset"
  assert kinds == [
    (0, "start"), *((step, reset) for step in (1, 2, 3)), (3, "resume"),
    *((step, reset) for step in (4, 5, 6, 7)), (7, "end"),
  ]  # fmt: skip
  (resume,) = [e for e in new.lines("events.jsonl") if e["event"] == "resume"]
  assert (resume["again"], resume["after"]) == (2, NO_WORD)


# ------------------------------------------------------------------ the start


def test_another_machine_is_told(run, monkeypatch, capsys):
  here = folder.here()
  assert folder.stored(run.dir, "machine") == here
  assert here["cpus"] == len(os.sched_getaffinity(0))
  assert here["devices"] == {jax.devices()[0].device_kind: len(jax.devices())}
  monkeypatch.setattr(folder, "here", lambda: here | {"cpus": 96})
  run.start(steps=13)
  said = f"not bit-identical from here: cpus {here['cpus']} -> 96"
  assert f"warning: {said}\n" in capsys.readouterr().out
  assert run.told("warning") == [(12, said)]
  run.start(steps=14)
  assert len(run.told("warning")) == 1  # the same as the last time


def test_a_config_that_is_gone_can_be_made_anew(run, monkeypatch, tmp_path):
  path = run.dir / "config.json"
  for lose in (path.unlink, path.touch):
    lose()
    said = run.refused()
    assert str(path) in said and "another workdir" in said
  other = Run(monkeypatch, tmp_path / "other")
  other.start(steps=1)
  shutil.copy(other.dir / "config.json", path)
  run.start(steps=13)
  assert run.told("resume") == [(12, None)]
