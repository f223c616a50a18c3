"""Tests of brorl_jax/runs/checkpoints.py."""

import itertools
import json
import os
import pathlib
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
from jax.sharding import NamedSharding, PartitionSpec
from messages import mentions

from brorl_jax.many import processes
from brorl_jax.runs import checkpoints, intact, stored
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
  return [
    (
      jax.tree_util.keystr(path),
      str(x.dtype).encode() + np.asarray(x).tobytes(),
    )
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]


class Run:
  """A directory of checkpoints as successive processes see it."""

  def __init__(self, root: pathlib.Path, keep: int = 3):
    self.root, self.keep, self.said = root, keep, []

  @property
  def folder(self) -> pathlib.Path:
    return self.root / "checkpoints"

  def open(self) -> checkpoints.Store:
    return checkpoints.Store(
      self.folder, keep=self.keep, run="mine", warn=self.said.append
    )

  def save(self, *steps: int) -> None:
    store = self.open()
    for step in steps:
      store.save(step, state_of(step), run_state_of(step))
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
def test_restores_every_bit(run, reference):
  store = run.open()
  store.save(4, state_of(4, reference=reference), run_state_of(4))
  store.close()
  state, progress = run.restore(state_of(0, reference=reference))
  assert bits(state) == bits(state_of(4, reference=reference))
  assert isinstance(state.opt[0], Moments)
  assert (state.reference is None) is not reference
  assert progress == {"tokens": 2**40 + 4, "samples": 4}


def test_restores_from_the_abstract_form_too(run):
  run.save(1)
  like = jax.eval_shape(lambda: state_of(0))
  place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like
  )
  saved = run.restore(like)
  assert is_step(saved, 1)
  assert saved[0].params["scale"].devices() == {jax.devices()[3]}


def test_keeps_the_newest_steps(run):
  run.keep = 2
  run.save(1, 2, 5, 9)
  assert run.steps() == [5, 9]
  assert is_step(run.restore(), 9)


def test_what_a_killed_run_did_not_delete_is_deleted_by_its_resume(run):
  run.save(1, 2, 3)
  run.keep = 2
  store = run.open()
  assert store.restore(state_of(0)) is not None
  store.close()
  assert stored.steps(run.folder) == [2, 3]


def test_a_save_survives_the_donation_of_the_state(run):
  """On CPU the next update writes into the very memory that was handed over."""
  update = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 3.0 + 1.0, s), donate_argnums=0
  )
  run.keep = 40
  state = {"w": jnp.arange(200_000.0), "b": jnp.ones(7)}
  seen, store = {}, run.open()
  for step in range(1, 31):
    store.save(step, state, {"tokens": step})
    seen[step] = bits(state)
    old, state = state, update(state)
    assert old["w"].is_deleted()
  store.close()
  for step in reversed(range(1, 31)):
    got, progress = run.restore(state)
    assert progress == {"tokens": step}
    assert bits(got) == seen[step]
    shutil.rmtree(run.folder / str(step))


def test_a_numpy_state_may_be_changed_after_the_save(run):
  state = {"w": np.arange(100_000.0, dtype=np.float32)}
  before, store = bits(state), run.open()
  store.save(1, state, {})
  state["w"][:] = -1.0
  store.close()
  assert bits(run.restore({"w": jnp.zeros(100_000)})[0]) == before


def test_a_mesh_does_not_forget_its_devices(run):
  mesh = jax.make_mesh((8,), ("data",))
  spread = NamedSharding(mesh, PartitionSpec("data"))
  state = {name: jax.device_put(jnp.arange(8.0), spread) for name in "abc"}
  store = run.open()
  for step in range(1, 5):
    store.save(step, state, {})
  store.close()
  assert state["a"].devices() == set(jax.devices())


def test_restores_onto_another_mesh(run):
  value = jax.random.normal(jax.random.key(0), (8, 16))
  place = lambda sizes, *spec: NamedSharding(
    jax.make_mesh(sizes, ("data", "model")), PartitionSpec(*spec)
  )
  store = run.open()
  store.save(
    1, {"w": jax.device_put(value, place((4, 2), "data", "model"))}, {}
  )
  store.close()
  for target in (
    place((2, 4), "model", "data"),
    place((8, 1), None, "data"),
    place((1, 8)),
  ):
    like = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=target)}
    got = run.restore(like)[0]["w"]
    assert got.sharding == target
    np.testing.assert_array_equal(got, value)


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
  "flip": flip,
  "cut": cut,
  "empty": lambda path: path.write_bytes(b""),
  "delete": lambda path: path.unlink(),
}


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


def edit_record(change):
  def damage(folder):
    path = folder / "2" / "extra" / "metadata"
    extra = json.loads(path.read_text())
    change(extra)
    path.write_text(json.dumps(extra))

  return damage


BROKEN = {
  "emptied": lambda folder: (
    shutil.rmtree(folder / "2"),
    (folder / "2").mkdir(),
  ),
  "no state": lambda folder: shutil.rmtree(folder / "2" / "state"),
  "no record": lambda folder: shutil.rmtree(folder / "2" / "extra"),
  "no data": lambda folder: shutil.rmtree(folder / "2" / "state" / "d"),
  "readable state of another step": swap_state,
  "another run state": edit_record(lambda x: x["ledger"].update(tokens=7)),
  "another shape": edit_record(lambda x: x["leaves"].update(step="int32[2]")),
  "another digest": edit_record(lambda x: x["digest"].update(step="00")),
  "no seal": edit_record(lambda x: x.pop("seal")),
  "record is a list": lambda folder: (
    folder / "2" / "extra" / "metadata"
  ).write_text("[]"),
}


@pytest.mark.parametrize("damage", tiers.some(BROKEN.values(), 1), ids=BROKEN)
def test_falls_back_and_can_save_the_same_step_again(run, damage):
  run.save(1, 2)
  damage(run.folder)
  store = run.open()
  assert is_step(store.restore(state_of(0)), 1)
  aside = run.root / "damaged_checkpoints" / "2"
  assert mentions(run.said[0], "checkpoint 2 ... not used")
  assert run.said[0].endswith(f": see {aside}")
  assert len(run.said) == 1 and "\n" not in run.said[0]
  assert aside.is_dir()  # set aside, not deleted
  store.save(2, state_of(2), run_state_of(2))
  store.close()
  assert is_step(run.restore(), 2)
  assert len(run.said) == 1


MISFITS = {
  "dtype": (
    {"a": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros((2, 3))},
    r"a is float32\[4\].* this run needs bfloat16\[4\]",
  ),
  "shape": (
    {"a": jnp.zeros(4), "b": jnp.zeros((3, 2))},
    r"b is float32\[2, 3\].* this run needs float32\[3, 2\]",
  ),
  "missing": (
    {"a": jnp.zeros(4), "b": jnp.zeros((2, 3)), "c": jnp.zeros(1)},
    r"c is missing.* this run needs float32\[1\]",
  ),
  "extra": (
    {"a": jnp.zeros(4)},
    r"b is float32\[2, 3\].* this run needs no such array",
  ),
}


@pytest.mark.parametrize("like, message", MISFITS.values(), ids=MISFITS)
def test_refuses_another_model_and_leaves_its_steps_alone(run, like, message):
  """orbax would cast a dtype without a word."""
  store = run.open()
  for step in (1, 2):
    store.save(step, {"a": jnp.ones(4), "b": jnp.ones((2, 3))}, {})
  store.close()
  with pytest.raises(ValueError, match=f"checkpoint 2 in .*: {message}"):
    run.restore(like)
  assert run.said == []
  assert run.steps() == [1, 2]


def abstract_params(run):
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    state_of(1).params,
  )


@pytest.mark.parametrize("step, want", [(None, 4), (2, 2)])
def test_parameters_are_read_alone(run, step, want):
  run.save(2, 4)
  files = sorted(run.folder.rglob("*"))
  got = checkpoints.read_params(run.folder, step, abstract_params(run))
  assert got[0] == want
  assert bits(got[1]) == bits(state_of(want).params)
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


@pytest.mark.parametrize("part", ["extra/metadata", "state"])
def test_damaged_parameters_are_not_read(run, part):
  run.save(2)
  like = abstract_params(run)
  where = run.folder / "2" / part
  files = [where] if where.is_file() else sorted(where.rglob("*"))
  seen = 0
  for path in files:
    if not path.is_file() or not (whole := path.read_bytes()):
      continue
    middle = len(whole) // 2
    flipped = bytes([whole[middle] ^ 4])
    path.write_bytes(whole[:middle] + flipped + whole[middle + 1 :])
    try:
      got = checkpoints.read_params(run.folder, None, like)
    except checkpoints.Unusable as e:
      assert "\n" not in str(e) and "checkpoint 2 in" in str(e)
      seen += 1
    else:  # of the optimizer, or of no importance
      assert bits(got[1]) == bits(state_of(2).params)
    path.write_bytes(whole)
  assert seen


def test_a_run_state_with_numbers_as_keys_is_read_as_it_was_saved(run):
  progress = {"usual": {7: 3, 30: 5, 100: 1}, "beyond": {2: 1, 10: 2}}
  store = run.open()
  store.save(1, state_of(1), progress)
  store.close()
  _, got = run.restore()
  assert got == json.loads(json.dumps(progress)) and run.said == []
  assert checkpoints.read_params(run.folder, 1, abstract_params(run))[0] == 1


def test_nothing_is_made_before_the_first_save(run):
  store = run.open()
  assert store.restore(state_of(0)) is None
  store.close()
  assert not run.folder.exists() and store.good is None


@pytest.mark.parametrize("damage", tiers.some(["record", "arrays", "gone"], 1))
def test_a_step_is_read_back_before_an_older_one_is_deleted(
  run, monkeypatch, damage
):
  compare, kept = stored.compare, []

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

  monkeypatch.setattr(stored, "compare", rots)
  run.keep = 2
  store = run.open()
  for step in (1, 2, 5, 9):
    store.save(step, state_of(step), run_state_of(step))
  with pytest.raises(checkpoints.Unsaved, match="step is 5") as e:
    store.close()
  assert "\n" not in str(e.value) and "checkpoint 9 in " in str(e.value)
  assert kept == [[1], [1, 2], [1, 2, 5], [2, 5, 9]]
  assert store.good == 5 and {2, 5} <= {*run.steps()}
  store.close()  # once more is no more
  monkeypatch.undo()
  assert is_step(run.restore(), 5)


@pytest.mark.parametrize("path", ["opt/0/nu/blocks/q", "params/scale", "step"])
def test_reading_back_sees_every_array(run, path):
  run.save(1)
  folder, like = run.folder / "1", state_of(1)
  extra = intact.opened(json.loads((folder / "extra" / "metadata").read_text()))
  stored.compare(folder, like, extra)
  other = json.loads(json.dumps(extra))
  other["digest"][path] = "0" * 64
  with pytest.raises(intact.Damage, match="record"):
    stored.compare(folder, like, other)
  text = json.dumps(intact.sealed(other))
  (folder / "extra" / "metadata").write_text(text)
  with pytest.raises(intact.Damage, match=f"{path} .*saved"):
    stored.compare(folder, like, other)


def test_a_step_that_is_not_newer_is_not_left_out_in_silence(run):
  run.save(1, 5)
  store = run.open()
  with pytest.raises(checkpoints.Unsaved, match=r"checkpoint 3 .*newer step"):
    store.save(3, state_of(3), {})
    store.wait()
  store.close()


def test_the_newest_whole_step_is_known(run):
  store = run.open()
  store.save(1, state_of(1), {})
  assert store.good is None
  store.wait()
  assert store.good == 1
  store.close()
  store = run.open()
  store.restore(state_of(0))
  assert store.good == 1


def test_a_step_under_another_number_is_not_read(run):
  run.save(1, 2)
  (run.folder / "2").rename(run.folder / "3")
  with pytest.raises(checkpoints.Unusable, match=r"checkpoint 3 .*step 2"):
    checkpoints.read_params(run.folder, None, abstract_params(run))
  assert is_step(run.restore(), 1)
  assert mentions(run.said[0], "state ... step 2")


def test_a_step_of_another_run_is_not_read(run):
  store = checkpoints.Store(run.folder, keep=3, run="mine")
  store.save(1, state_of(1), run_state_of(1))
  store.close()
  like = abstract_params(run)
  assert is_step(run.restore(), 1)
  assert checkpoints.read_params(run.folder, None, like, "mine")[0] == 1
  why = "another run: mine.* yours"
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
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )


@pytest.mark.ci
def test_too_many_open_files_are_no_damage(run):
  run.save(1, 2)
  files = sorted(run.root.rglob("*"))
  done = limited(
    run,
    """
import os
t.stored.steps = lambda directory: [1, 2]
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
try:
  store.restore(like)
except t.checkpoints.Unreachable as e:
  print("unreachable:", e)
""",
  )
  assert mentions(done.stdout, "unreachable ... checkpoint 2"), done.stderr
  assert "Too many open files" in done.stdout
  assert sorted(run.root.rglob("*")) == files
  assert is_step(run.restore(), 2)


def test_one_of_several_processes_changes_nothing_when_it_cannot_read(
  run, monkeypatch
):
  """The others may have read theirs: all must go on from the same step."""
  run.save(1, 2)
  for path in (run.folder / "2" / "state").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  monkeypatch.setattr(processes, "alone", lambda: False)
  monkeypatch.setattr(processes, "gather", lambda value: [value])
  with pytest.raises(
    checkpoints.Unreachable,
    match=r"process 0 cannot read .*/2: .* move it away",
  ):
    run.restore()
  assert run.steps() == [1, 2] and run.said == []


def test_a_step_that_vanishes_while_it_is_read_is_no_damage(run, monkeypatch):
  run.save(1, 2)

  def gone(folder, *_):
    shutil.rmtree(run.folder)
    raise FileNotFoundError(2, "gone", str(folder))

  monkeypatch.setattr(stored, "read", gone)
  with pytest.raises(checkpoints.Unreachable, match="it is missing"):
    run.restore()


# ---------------------------------------- a thread of its own, and slow storage


class Slow:
  """A disk on which a step is read back only when it is let go."""

  def __init__(self, monkeypatch):
    self.go, self.began = threading.Event(), threading.Event()
    self.error, self.threads = None, []
    inner = stored.compare

    def compare(*args):
      self.threads.append(threading.current_thread())
      self.began.set()
      assert self.go.wait(60)
      if self.error is not None:
        raise self.error
      inner(*args)

    monkeypatch.setattr(stored, "compare", compare)

  def hold(self):
    self.go.clear()
    self.began.clear()


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


def test_arrays_of_an_accelerator_are_read_before_they_may_be_donated(
  run, monkeypatch
):
  """orbax copies them in the thread that calls it."""
  save, threads = checkpoints.ocp.CheckpointManager.save, []

  def spy(*args, **how):
    threads.append(threading.current_thread())
    return save(*args, **how)

  monkeypatch.setattr(checkpoints.ocp.CheckpointManager, "save", spy)
  store, slow = run.open(), Slow(monkeypatch)
  slow.go.set()
  store.save(1, state_of(1), run_state_of(1))
  store.wait()
  monkeypatch.setattr(checkpoints, "_on_host", lambda x: False)
  store.save(2, state_of(2), run_state_of(2))
  store.close()
  assert [t is threading.main_thread() for t in threads] == [False, True]
  assert threading.main_thread() not in slow.threads
  assert is_step(run.restore(), 2)


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


@pytest.mark.parametrize("item", ["state", "extra", "2.orbax"])
def test_a_folder_that_cannot_be_made_is_an_error_at_once(
  run, monkeypatch, item
):
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
  store.save(2, state_of(2), run_state_of(2))
  with pytest.raises(checkpoints.Unsaved, match=r"No space left.* step is 1"):
    store.wait()
  assert time.monotonic() - begin < 60
  store.close()


@pytest.mark.ci
def test_a_file_that_may_not_grow_is_one_line(run):
  """As on a full disk or beyond a quota, under tensorstore's own writes."""
  run.save(1)
  done = limited(
    run,
    """
store.restore(like)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
  store.save(2, {"w": t.jnp.arange(1e6)}, {})
  store.wait()
except t.checkpoints.Unsaved as e:
  print("unsaved:", e)
""",
  )
  assert mentions(done.stdout, "unsaved ... File too large ... step is 1")
  assert is_step(run.restore(), 1)


# ------------------------------------------------------------- which steps stay


def scored(run, scores, **how):
  """Saves steps with their scores."""
  store = checkpoints.Store(run.folder, keep=run.keep, run="mine", **how)
  for step, score in scores.items():
    store.save(step, state_of(step), run_state_of(step), score)
  store.close()


@pytest.mark.ci
def test_the_best_step_survives_20_more_saves_and_a_restart(run):
  run.keep = 2
  scored(run, {0: 0.1, 1: 0.5, 2: None, 3: 0.5})
  assert run.steps() == [1, 2, 3]
  scored(run, {step: 0.4 if step % 2 else None for step in range(4, 14)})
  scored(run, {step: 0.5 for step in range(14, 24)})
  assert run.steps() == [1, 22, 23]
  scored(run, {24: 0.6, 25: None, 26: 0.2})
  assert run.steps() == [24, 25, 26]
  assert checkpoints.read_params(run.folder, 24, abstract_params(run))[0] == 24


def test_multiples_stay(run):
  run.keep = 1
  scored(run, dict.fromkeys(range(1, 8)), keep_every=3)
  assert run.steps() == [3, 6, 7]


def test_the_score_is_in_the_sealed_record(run):
  scored(run, {1: 0.25, 2: None})
  assert stored.score(run.folder / "1") == 0.25
  assert stored.score(run.folder / "2") is None
  path = run.folder / "1" / "extra" / "metadata"
  record = json.loads(path.read_text())
  path.write_text(json.dumps(record | {"score": 0.75}))
  assert stored.score(run.folder / "1") is None  # the seal is broken
  for odd in ("a", [], None):
    del record["seal"]
    record = intact.sealed(record | {"score": odd})
    path.write_text(json.dumps(record))
    assert stored.score(run.folder / "1") is None


def test_a_step_whose_score_cannot_be_read_now_is_not_deleted(run, monkeypatch):
  run.keep = 1
  scored(run, {1: 0.5})
  record = stored._record

  def fails(folder, *args):
    if folder.name == "1":
      raise OSError(5, "Input/output error", str(folder))
    return record(folder, *args)

  monkeypatch.setattr(stored, "_record", fails)
  with pytest.raises(checkpoints.Unsaved, match="Input/output error"):
    scored(run, {2: 0.4, 3: 0.4})
  assert 1 in run.steps()


def test_a_step_can_be_required(run):
  run.save(1, 2, 3)
  flip(run.folder / "2" / "extra" / "metadata")
  before = sorted(run.root.rglob("*"))
  store = run.open()
  store.require(1, state_of(0))
  with pytest.raises(checkpoints.NoWayBack, match=r"point 2 .* also: 1, 3"):
    store.require(2, state_of(0))
  with pytest.raises(checkpoints.NoWayBack, match=r"3 .*used \(no line\)"):
    store.require(3, state_of(0), lambda step: "no line")
  with pytest.raises(checkpoints.Unusable, match="this run needs"):
    store.require(1, state_of(0, reference=True))
  store.close()
  assert sorted(run.root.rglob("*")) == before and run.said == []
