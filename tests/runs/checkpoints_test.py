"""Tests of brorl_jax/runs/checkpoints.py."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from messages import mentions, refuses

from brorl_jax.many import processes
from brorl_jax.runs import checkpoints, intact
from brorl_jax.types import State


class Moments(NamedTuple):  # as optax keeps them
  count: jax.Array
  mu: dict
  nu: dict


def state_of(step: int, *, reference: bool = False) -> State:
  """Different in every leaf at every step; holds what compares badly."""
  params = {
    "blocks": {"q": jnp.arange(24.0).reshape(2, 3, 4) * 0.1 + step},
    "scale": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-40]) * (step + 1),
  }
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  opt = (Moments(jnp.int32(step), params, half), (), jnp.bool_(step % 2))
  return State(jnp.int32(step), params, opt, params if reference else None)


def bits(tree) -> list[tuple[str, bytes]]:
  name, leaves = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
  of = lambda x: str(x.dtype).encode() + np.asarray(x).tobytes()
  return [(name(path), of(x)) for path, x in leaves(tree)]


class Run:
  def __init__(self, root: pathlib.Path, keep: int = 3):
    self.root, self.keep, self.said = root, keep, []

  @property
  def folder(self) -> pathlib.Path:
    return self.root / "checkpoints"

  def open(self, **how) -> checkpoints.Store:
    how |= dict(run="mine", warn=self.said.append)
    return checkpoints.Store(self.folder, keep=self.keep, **how)

  def save(self, *steps: int) -> None:
    self.put({step: state_of(step) for step in steps})

  def put(self, states) -> None:
    store = self.open()
    for step, state in states.items():
      store.save(step, state, run_state_of(step))
    store.close()

  def restore(self, like=None):
    store = self.open()
    try:
      return store.restore(state_of(0) if like is None else like)
    finally:
      store.close()

  def steps(self) -> list[int]:
    return sorted(int(p.name) for p in self.folder.iterdir())


def run_state_of(step: int) -> dict[str, int]:
  return {"tokens": 2**40 + step, "samples": step}


def is_step(saved, step: int) -> bool:
  state, progress = saved
  return bits(state) == bits(state_of(step)) and progress == run_state_of(step)


@pytest.fixture
def run(tmp_path):
  return Run(tmp_path)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("much", [0, 40, 2**28])
def test_restores_every_bit(run, reference, much, monkeypatch):
  monkeypatch.setattr(checkpoints, "_MUCH", much)
  run.put({4: state_of(4, reference=reference)})
  state, progress = run.restore(state_of(0, reference=reference))
  assert bits(state) == bits(state_of(4, reference=reference))
  assert isinstance(state.opt[0], Moments)
  assert (state.reference is None) is not reference
  assert progress == {"tokens": 2**40 + 4, "samples": 4}


def test_what_a_killed_run_did_not_delete_is_deleted_by_its_resume(run):
  run.save(1, 2, 3)
  run.keep = 2
  store = run.open()
  assert store.restore(state_of(0)) is not None
  store.close()
  assert checkpoints.steps(run.folder) == [2, 3]


@pytest.mark.parametrize("much", [2**28, 0])
def test_a_save_survives_the_donation_of_the_state(run, much, monkeypatch):
  """On CPU the next update writes into the very memory that was handed over."""
  update = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 3.0 + 1.0, s), donate_argnums=0
  )
  monkeypatch.setattr(checkpoints, "_MUCH", much)
  run.keep = 9
  state = {"w": jnp.arange(50_000.0), "b": jnp.ones(7)}
  seen, store = {}, run.open()
  for step in range(1, 9):
    store.save(step, state, {"tokens": step})
    seen[step] = bits(state)
    store.release()
    assert much or store.good == step
    old, state = state, update(state)
    assert old["w"].is_deleted()
  store.close()
  for step in reversed(range(1, 9)):
    state, progress = run.restore(state)
    assert (progress, bits(state)) == ({"tokens": step}, seen[step])
    shutil.rmtree(run.folder / str(step))


def test_a_save_that_fails_holds_no_update_up(run, monkeypatch):
  once, change = iter([checkpoints.Store._open]), monkeypatch.setattr
  change(checkpoints, "_MUCH", 0)
  change(checkpoints.Store, "_open", lambda self: next(once)(self))
  store = run.open()
  store.save(1, state_of(1), {})
  store.release()
  with refuses(checkpoints.Unsaved, "checkpoint 1 ... could not be saved"):
    store.wait()
  store.close()


def test_a_mesh_does_not_forget_its_devices(run):
  spread = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
  state = {name: jax.device_put(jnp.arange(8.0), spread) for name in "abc"}
  run.put({1: state, 2: state})
  assert state["a"].devices() == set(jax.devices())


def test_restores_onto_another_mesh(run):
  value = jax.random.normal(jax.random.key(0), (8, 16))
  place = lambda sizes, *spec: NamedSharding(
    jax.make_mesh(sizes, ("data", "model")), PartitionSpec(*spec)
  )
  run.put({1: {"w": jax.device_put(value, place((4, 2), "data", "model"))}})
  for target in (place((2, 4), "model", "data"), place((8, 1), None, "data")):
    got = run.restore({"w": jnp.zeros((8, 16), device=target)})[0]["w"]
    assert got.sharding == target
    np.testing.assert_array_equal(got, value)


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {"flip": flip, "cut": cut, "empty": lambda path: path.write_bytes(b""),
  "delete": lambda path: path.unlink()}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_to_any_file_never_gives_a_wrong_state(run, damage):
  """Some files are not read; then the newest step is right nevertheless."""
  run.save(1, 2)
  whole = run.root / "whole"
  run.folder.rename(whole)
  files = [p for p in sorted((whole / "2").rglob("*")) if p.is_file()]
  used = 0
  for path in files:
    shutil.copytree(whole, run.folder)
    damage(run.folder / path.relative_to(whole))
    run.said.clear()
    saved = run.restore()
    if run.said:
      assert is_step(saved, 1), path
      assert len(run.said) == 1
      assert mentions(run.said[0], "checkpoint 2 ... not used")
    else:
      assert is_step(saved, 2), path
      used += 1
    shutil.rmtree(run.folder)
  # At least the arrays, their manifest and metadata, and the record are read.
  assert len(files) - used >= 4


def swap_state(folder):
  shutil.rmtree(folder / "2" / "state")
  shutil.copytree(folder / "1" / "state", folder / "2" / "state")


def edit_record(change, step=2):
  def damage(folder):
    path = folder / f"{step}" / "extra" / "metadata"
    extra = json.loads(path.read_text())
    change(extra)
    path.write_text(json.dumps(extra))

  return damage


def empty_step(folder):
  shutil.rmtree(folder / "2")
  (folder / "2").mkdir()


BROKEN = {
  "emptied": empty_step, "readable state of another step": swap_state,
  "another run state": edit_record(lambda x: x["ledger"].update(tokens=7)),
  "another digest": edit_record(lambda x: x["digest"].update(step="00")),
}  # fmt: skip


@pytest.mark.parametrize("damage", tiers.some(BROKEN.values(), 1), ids=BROKEN)
def test_falls_back_and_can_save_the_same_step_again(run, damage):
  run.save(1, 2)
  damage(run.folder)
  store = run.open()
  assert is_step(store.restore(state_of(0)), 1)
  aside = run.root / "set_aside/1"
  assert mentions(run.said[0], "checkpoint 2 ... not used")
  assert run.said[0].endswith(f": see {aside}")
  assert len(run.said) == 1 and "\n" not in run.said[0]
  assert (aside / "checkpoints/2").is_dir()  # set aside, not deleted
  store.save(2, state_of(2), run_state_of(2))
  store.close()
  assert is_step(run.restore(), 2) and len(run.said) == 1


@pytest.mark.parametrize("like, message", [
  ({"a": "bfloat16[4]", "b": "float32[2, 3]"}, "a ... float32[4] ... needs"),
  ({"a": "float32[4]", "b": "float32[3, 2]"}, "b ... float32[2, 3]"),
  ({"a": "float32[4]", "b": "float32[2, 3]", "c": "int8[1]"}, "c ... missing"),
  ({"a": "float32[4]"}, "b ... float32[2, 3] ... no such array"),
])  # fmt: skip
def test_refuses_another_model_and_leaves_its_steps_alone(run, like, message):
  """orbax would cast a dtype without a word."""
  state = {"a": jnp.ones(4), "b": jnp.ones((2, 3))}
  run.put({1: state, 2: state})
  kinds = {k: re.match(r"(\w+)(.*)", x).groups() for k, x in like.items()}
  like = {k: jnp.zeros(json.loads(n), kind) for k, (kind, n) in kinds.items()}
  with refuses(checkpoints.Unusable, f"checkpoint 2 ... {message}"):
    run.restore(like)
  assert run.said == [] and run.steps() == [1, 2]


def abstract_params(run):
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  return jax.tree.map(of, state_of(1).params)


@pytest.mark.parametrize("step, want", [(None, 4), (2, 2)])
def test_parameters_are_read_alone(run, step, want):
  run.save(2, 4)
  files = sorted(run.folder.rglob("*"))
  got = checkpoints.read_params(run.folder, step, abstract_params(run))
  assert (got[0], bits(got[1])) == (want, bits(state_of(want).params))
  assert sorted(run.folder.rglob("*")) == files  # nothing is changed


def test_parameters_that_are_not_there_are_refused(run):
  like = abstract_params(run)
  with pytest.raises(checkpoints.Unusable, match="no checkpoint"):
    checkpoints.read_params(run.folder, None, like)
  run.save(2, 4)
  with pytest.raises(checkpoints.Unusable, match=r"no checkpoint 3 .*: 2, 4"):
    checkpoints.read_params(run.folder, 3, like)
  other = {**like, "more": like["scale"]}
  with pytest.raises(checkpoints.Unusable, match="params/more"):
    checkpoints.read_params(run.folder, None, other)


def test_parameters_that_are_not_what_was_saved_are_not_read(run):
  """Damage that orbax takes: only the digest tells."""
  run.save(2)
  path = run.folder / "2" / "extra" / "metadata"
  extra = json.loads(path.read_text())
  del extra["seal"]
  extra["digest"]["params/scale"] = "0" * 64
  path.write_text(json.dumps(intact.sealed(extra)))
  with pytest.raises(checkpoints.Unusable, match="params/scale"):
    checkpoints.read_params(run.folder, None, abstract_params(run))


def test_nothing_is_made_before_the_first_save(run):
  store = run.open()
  assert store.restore(state_of(0)) is None
  store.close()
  assert not run.folder.exists() and store.good is None


@pytest.mark.parametrize("damage", tiers.some(["record", "arrays", "gone"], 1))
def test_a_step_is_read_back_before_one_is_deleted(run, monkeypatch, damage):
  compare, kept = checkpoints.compare, []

  def rots(folder, *args):
    kept.append(run.steps())
    if folder.name == "9" and damage == "record":
      flip(folder / "extra" / "metadata")
    elif folder.name == "9" and damage == "arrays":
      files = [p for p in (folder / "state").rglob("d/*") if p.is_file()]
      for path in files:
        flip(path)
    elif folder.name == "9":
      shutil.rmtree(folder)
    compare(folder, *args)

  monkeypatch.setattr(checkpoints, "compare", rots)
  run.keep = 2
  store = run.open()
  for step in (1, 2, 5, 9):
    store.save(step, state_of(step), run_state_of(step))
  with refuses(checkpoints.Unsaved, "checkpoint 9 in ... step is 5"):
    store.close()
  assert kept == [[1], [1, 2], [1, 2, 5], [2, 5, 9]]
  assert store.good == 5 and {2, 5} <= {*run.steps()}
  store.close()  # once more is no more
  monkeypatch.undo()
  assert is_step(run.restore(), 5)


@pytest.mark.parametrize("path", ["opt/0/nu/blocks/q", "params/scale", "step"])
def test_reading_back_sees_every_array(run, path):
  run.save(1)
  folder, like = run.folder / "1", state_of(1)
  extra = intact.opened((folder / "extra" / "metadata").read_bytes())
  checkpoints.compare(folder, like, extra)
  other = json.loads(json.dumps(extra))
  other["digest"][path] = "0" * 64
  with pytest.raises(intact.Damage, match="record"):
    checkpoints.compare(folder, like, other)
  (folder / "extra" / "metadata").write_text(json.dumps(intact.sealed(other)))
  with pytest.raises(intact.Damage, match=f"{path} .*saved"):
    checkpoints.compare(folder, like, other)


def test_a_step_that_is_not_newer_is_not_left_out_in_silence(run):
  run.save(1, 5)
  store = run.open()
  with pytest.raises(checkpoints.Unsaved, match=r"checkpoint 3 .*newer step"):
    store.save(3, state_of(3), {})
    store.wait()
  store.close()


def test_a_step_of_another_run_is_not_read(run):
  run.save(1)
  like = abstract_params(run)
  assert is_step(run.restore(), 1)
  assert checkpoints.read_params(run.folder, None, like, "mine")[0] == 1
  why = "another run .* mine.* yours"
  with pytest.raises(checkpoints.Unusable, match=why):
    checkpoints.read_params(run.folder, None, like, "yours")
  with pytest.raises(checkpoints.Unusable, match=why):
    checkpoints.Store(run.folder, keep=3, run="yours").restore(state_of(0))


def limited(run, code):
  """What a process says that may open hardly more files than it has."""
  code = f"""
import resource, sys
sys.path[:0] = {[str(p) for p in pathlib.Path(__file__).parents[:2]]!r}
import checkpoints_test as t
run = t.Run(t.pathlib.Path({str(run.root)!r}))
like, store = t.state_of(0), run.open()
{code}
"""
  return subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )  # fmt: skip


def test_one_of_several_that_cannot_read_changes_nothing(run, monkeypatch):
  """The others may have read theirs: all must go on from the same step."""
  run.save(1, 2)
  for path in (run.folder / "2" / "state").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  monkeypatch.setattr(processes, "alone", lambda: False)
  monkeypatch.setattr(processes, "gather", lambda value: [value])
  with refuses(checkpoints.Unreachable, "process 0 cannot read ... move it"):
    run.restore()
  assert run.steps() == [1, 2] and run.said == []


@pytest.mark.ci
def test_a_full_disk_and_too_many_open_files_are_no_damage(run):
  """Under tensorstore's own writes and reads."""
  run.save(1)
  done = limited(
    run,
    """
whole = store.restore(like)
def limit(kind, most):
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (hard if most is None else most, hard))
limit(resource.RLIMIT_FSIZE, 100)
try:
  store.save(2, {"w": t.jnp.arange(1e6)}, {})
  store.wait()
except t.checkpoints.Unsaved as e:
  print("unsaved:", e)
limit(resource.RLIMIT_FSIZE, None)
t.checkpoints.steps = lambda directory: [1]
limit(resource.RLIMIT_NOFILE, 0)  # what is open stays open
try:
  store.restore(like)
except t.checkpoints.Unreachable as e:
  print("unreachable:", e)
""",
  )
  full = "unsaved ... File too large ... step is 1"
  assert mentions(done.stdout, full), done.stderr
  assert mentions(done.stdout, "unreachable ... checkpoint 1 ... open files")
  assert is_step(run.restore(), 1) and run.said == []


# ------------------------------------------------- another thread, slow storage


class Slow:
  """A disk on which a step is read back only when it is let go."""

  def __init__(self, monkeypatch):
    self.go, self.began = threading.Event(), threading.Event()
    self.threads, inner = [], checkpoints.compare

    def compare(*args):
      self.threads.append(threading.current_thread())
      self.began.set()
      assert self.go.wait(60)
      inner(*args)

    monkeypatch.setattr(checkpoints, "compare", compare)


def test_a_clock_that_jumps_ends_no_save(run, monkeypatch):
  """orbax takes the time of a save from the wall clock: 86400 s, in a jump."""
  calls, now = itertools.count(), time.time
  monkeypatch.setattr(time, "time", lambda: now() + 3600.0 * next(calls))
  run.save(1, 2)
  assert next(calls) > 2 and is_step(run.restore(), 2)


def test_the_first_line_waits_for_the_first_step(run, monkeypatch):
  """Lines without any step would look like a run that lost its steps."""
  store, slow = run.open(), Slow(monkeypatch)
  store.save(0, state_of(0), run_state_of(0))
  assert slow.began.wait(60)
  threading.Timer(0.3, slow.go.set).start()
  store.check()
  assert slow.go.is_set() and store.good == 0
  store.close()


def test_several_processes_compare_together(run, monkeypatch):
  """In the thread that calls collectives, and at every step."""
  monkeypatch.setattr(processes, "alone", lambda: False)
  monkeypatch.setattr(processes, "gather", lambda value: [value])
  store, slow = run.open(), Slow(monkeypatch)
  slow.go.set()
  for step in (1, 2):
    store.save(step, state_of(step), run_state_of(step))
    assert store.good == (1 if step == 2 else None)
    store.check()
    assert store.good == step
  assert {*slow.threads} == {threading.main_thread()}
  store.close()


@pytest.mark.parametrize("item", ["state", "2.orbax"])
def test_a_folder_that_is_not_made_is_an_error_at_once(run, monkeypatch, item):
  """orbax would wait for it for five minutes."""
  store, mkdir = run.open(), os.mkdir
  store.save(1, state_of(1), run_state_of(1))
  store.wait()

  def full(path, *args, **how):
    if pathlib.Path(path).name.startswith(item):
      raise OSError(28, "No space left on device", str(path))
    mkdir(path, *args, **how)

  monkeypatch.setattr(os, "mkdir", full)
  begin = time.monotonic()
  with pytest.raises(checkpoints.Unsaved, match=r"No space left.* step is 1"):
    store.save(2, state_of(2), run_state_of(2))
  assert time.monotonic() - begin < 60
  store.close()


# ------------------------------------------------------------- which steps stay


def scored(run, scores, **how):
  store = checkpoints.Store(run.folder, keep=run.keep, run="mine", **how)
  for step, score in scores.items():
    store.save(step, state_of(step), run_state_of(step), score)
  store.close()


@pytest.mark.ci
def test_the_best_step_survives_more_saves_and_a_restart(run):
  run.keep, like = 2, state_of(0).params
  assert run.open().best(like) is None
  scored(run, {0: 0.1, 1: 0.5, 2: None, 3: 0.5})
  assert run.steps() == [1, 2, 3]
  step, score, params = run.open().best(like)
  assert (step, score) == (1, 0.5) and bits(params) == bits(state_of(1).params)
  scored(run, {4: 0.4, 5: None, 6: 0.5, 7: 0.5})
  assert run.steps() == [1, 6, 7]
  scored(run, {8: 0.6, 9: None, 10: 0.2})
  assert run.steps() == [8, 9, 10]
  assert checkpoints.read_params(run.folder, 8, abstract_params(run))[0] == 8


def test_the_score_is_in_the_sealed_record(run):
  scored(run, {1: 0.25, 2: None})
  assert checkpoints._score(run.folder / "1") == 0.25
  assert checkpoints._score(run.folder / "2") is None
  edit_record(lambda x: x.update(score=0.75), 1)(run.folder)
  assert checkpoints._score(run.folder / "1") is None  # the seal is broken


def test_a_step_whose_score_cannot_be_read_now_is_not_deleted(run, monkeypatch):
  run.keep = 1
  scored(run, {1: 0.5})
  record = checkpoints._record

  def fails(folder, *args):
    if folder.name == "1":
      raise OSError(5, "Input/output error", str(folder))
    return record(folder, *args)

  monkeypatch.setattr(checkpoints, "_record", fails)
  with pytest.raises(checkpoints.Unsaved, match="Input/output error"):
    scored(run, {2: 0.4, 3: 0.4})
  assert 1 in run.steps()


def test_a_run_goes_back_to_a_step_that_can_be_used(run):
  run.save(1, 2, 3)
  flip(run.folder / "2" / "extra" / "metadata")
  before = sorted(run.root.rglob("*"))
  to = lambda step: run.open(from_step=step)
  back = lambda step, **how: to(step).restore(state_of(0), **how)
  with refuses(checkpoints.NoWayBack, "checkpoint 2 ... 1, 3"):
    back(2)
  with refuses(checkpoints.NoWayBack, "checkpoint 3 ... no line"):
    back(3, lacks=lambda step: "no line")
  with refuses(checkpoints.NoWayBack, "checkpoint 4 ... 1, 2, 3"):
    back(4)
  assert sorted(run.root.rglob("*")) == before and run.said == []
  (run.root / "config.json").write_text("{}")
  assert is_step(back(1), 1) and run.steps() == [1]
  assert checkpoints.steps(run.root / "set_aside/1/checkpoints") == [2, 3]


@pytest.mark.parametrize("scores, newest, every, deleted", [
  ({0: None, 5: None}, 3, 0, []),
  ({0: None, 5: None, 10: None, 15: None}, 2, 0, [0, 5]),
  ({0: 0.1, 5: 0.7, 10: None, 15: 0.6, 20: 0.2}, 1, 0, [0, 10, 15]),
  ({0: 0.5, 5: 0.5, 10: 0.5, 15: 0.5}, 1, 0, [5, 10]),  # the earliest
  ({0: -1.0, 5: -2.0, 10: -3.0}, 1, 0, [5]),
  ({5: None, 10: None, 15: 0.0, 20: None, 25: None}, 1, 10, [5]),
])  # fmt: skip
def test_what_is_deleted(scores, newest, every, deleted):
  assert checkpoints.superfluous(scores, newest=newest, every=every) == deleted


@given(
  st.dictionaries(st.integers(0, 60), st.none() | st.integers(0, 3).map(float)),
  st.integers(1, 5), st.integers(0, 9),
)  # fmt: skip
def test_what_stays(scores, newest, every):
  """And deleting once is enough."""
  deleted = checkpoints.superfluous(scores, newest=newest, every=every)
  stays = {s: x for s, x in scores.items() if s not in deleted}
  assert {*sorted(scores)[-newest:]} <= stays.keys()
  assert {s for s in scores if every and s % every == 0} <= stays.keys()
  known = [x for x in scores.values() if x is not None]
  if known:
    assert min(s for s, x in scores.items() if x == max(known)) in stays
  assert len(stays) <= newest + 1 + (61 // every + 1 if every else 0)
  assert checkpoints.superfluous(stays, newest=newest, every=every) == []


# ------------------------------------------- going back, on files alone


@pytest.fixture
def saved(tmp_path):
  saved = tmp_path / "run"
  for step in (0, 3, 6, 9):
    save(saved, step)
  (saved / "metrics.jsonl").write_text('{"step": 1}\n')
  (saved / "config.json").write_text('{"config": {}}\n')
  (saved / "wandb_id").write_text("abc\n")
  (saved / ".lock").touch()
  return saved


def go_back(saved, step):
  said, where = [], saved / "checkpoints"
  store = checkpoints.Store(where, keep=9, run="mine", warn=said.append)
  later = [s for s in checkpoints.steps(where) if step is not None and s > step]
  store._set_aside([(s, "later") for s in reversed(later)])
  assert len(said) == len(later)
  return pathlib.Path(said[0].split()[-1]) if said else None


def save(saved, step):
  (saved / "checkpoints" / str(step)).mkdir(parents=True)
  (saved / "checkpoints" / str(step) / "data").write_text(f"state {step}")


def test_going_back_twice_keeps_both(saved):
  (saved / "set_aside" / "x").mkdir(parents=True)
  go_back(saved, 6)
  save(saved, 9)
  go_back(saved, 3)
  steps = lambda n: checkpoints.steps(saved / f"set_aside/{n}/checkpoints")
  assert (steps(1), steps(2)) == ([9], [6, 9])


def test_killed_anywhere_nothing_is_lost(saved, tmp_path):
  """At each call that changes a name; the next start moves the rest."""
  for at in itertools.count():
    copy, count = tmp_path / f"{at}", itertools.count()
    shutil.copytree(saved, copy)

    def killed(inner, *args, count=count, at=at, **how):
      if next(count) == at:
        raise KeyboardInterrupt
      return inner(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
      for name in ("replace", "mkdir", "rename"):
        inner = functools.partial(killed, getattr(os, name))
        patch.setattr(os, name, inner)
      with contextlib.suppress(KeyboardInterrupt):
        go_back(copy, 3)
        break
    go_back(copy, 3)
    assert checkpoints.steps(copy / "checkpoints") == [0, 3]
    for step in (6, 9):
      (found,) = copy.glob(f"set_aside/*/checkpoints/{step}/data")
      assert found.read_text() == f"state {step}"
      assert (found.parents[2] / "config.json").exists()
    assert [*copy.glob("set_aside/*/wandb_id")]
    assert not (copy / "wandb_id").exists()
  assert at > 5
