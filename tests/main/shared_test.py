"""Tests of brorl_jax/main/shared.py."""

import os
import signal
import sys
import types

import configured
import numpy as np
import one_step
import pytest

from brorl_jax import config, train
from brorl_jax.errors import UserError
from brorl_jax.main import train as shared
from brorl_jax.main.recorder import Recorder, Together
from brorl_jax.many import processes
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import checkpoints


class Spy(Recorder):
  """Notes what it is asked."""

  def __init__(self):
    self.asked = []

  def _ask(self, name, answer=None):
    self.asked.append(name)
    return answer

  lacks = lambda self, step: self._ask("lacks", "no line")
  start = lambda self, done: self._ask("start")
  evaluate = lambda self, step, params: self._ask("evaluate", 0.75)
  measured = lambda self, step, params: self._ask("measured", iter([[1], [3]]))
  event = lambda self, step, what: self._ask("event")
  step = lambda self, step, scalars, kept, sampled: self._ask("step")
  sync = lambda self: self._ask("sync")


def use(together):
  """Calls every method; what they return."""
  together.start(3)
  out = [together.lacks(3), together.evaluate(3, None)]
  together.event(3, {})
  kept = one_step.groups([[1, 0]])
  drawn = SampledGroups(kept, np.ones(1, bool), 1, {}, [1.0])
  together.step(3, {}, kept, drawn)
  together.sync()
  return out


def test_only_a_closed_loop_is_not_printed(monkeypatch):
  said = []
  hook = lambda one: said.append(one.exc_value)
  monkeypatch.setattr(sys, "unraisablehook", hook)
  errors = [
    RuntimeError("Event loop is closed"),
    RuntimeError("Event loop is closed twice"),
    ValueError("Event loop is closed"),
  ]
  tell = lambda error: sys.unraisablehook(
    types.SimpleNamespace(exc_value=error)
  )
  with shared.no_closed_loops():
    for error in errors:
      tell(error)
  assert said == errors[1:]
  tell(errors[0])
  assert said == [*errors[1:], errors[0]]


def test_process_0_has_the_files():
  recorder = Spy()
  assert use(Together(recorder)) == ["no line", 0.75]
  assert recorder.asked == [
    "start", "lacks", "evaluate", "event", "step", "sync",
  ]  # fmt: skip


def test_another_process_only_measures_and_is_told(monkeypatch):
  told = iter([None, "no line", 0.75])
  given = []
  monkeypatch.setattr(processes, "leads", lambda: False)
  monkeypatch.setattr(
    processes, "first", lambda x: given.append(x) or next(told)
  )
  recorder = Spy()
  together = Together(recorder)
  assert not together.started
  assert use(together) == ["no line", 0.75] and together.started
  assert recorder.asked == ["measured"] and given == [None, None, 0.0]


def test_a_signal_ends_the_run_after_the_step_and_a_second_one_at_once():
  ended = []
  mine = lambda *_: ended.append(True)
  before = signal.signal(signal.SIGTERM, mine)
  try:
    with shared.Stop() as stop:
      assert not stop()
      os.kill(os.getpid(), signal.SIGTERM)
      assert stop() and stop.asked and not ended
      assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is mine
  finally:
    signal.signal(signal.SIGTERM, before)


def test_processes_agree_with_any_signal(monkeypatch):
  monkeypatch.setattr(processes, "gather", lambda asked: [asked, True])
  stop = shared.Stop()
  assert stop() and stop.asked


@pytest.mark.parametrize("sees", [True, False])
def test_a_folder_that_a_process_does_not_see_is_refused(
  sees, monkeypatch, tmp_path
):
  """Process 1 of 2; process 0 writes here, or in a folder of its own."""
  monkeypatch.setattr(shared, "_SEEN_S", 0.3)
  monkeypatch.setattr(processes, "alone", lambda: False)
  monkeypatch.setattr(processes, "leads", lambda: False)
  monkeypatch.setattr(processes, "first", lambda value: "token")
  there = tmp_path if sees else tmp_path / "other"

  def gather(value):
    if value is None:
      there.mkdir(exist_ok=True)
      (there / ".shared").write_text("token")
    return [True, value]

  monkeypatch.setattr(processes, "gather", gather)
  if sees:
    shared.require_one_folder(tmp_path)
    return
  with pytest.raises(UserError, match=r"process 1 does not see .* all hosts"):
    shared.require_one_folder(tmp_path)


def test_the_first_process_clears_what_it_wrote(monkeypatch, tmp_path):
  monkeypatch.setattr(processes, "alone", lambda: False)
  seen = []
  gather = lambda value: seen.append([*tmp_path.iterdir()]) or [value, value]
  monkeypatch.setattr(processes, "gather", gather)
  shared.require_one_folder(tmp_path)
  assert [len(files) for files in seen[1:]] == [1, 1]
  assert not [*tmp_path.iterdir()]


def test_an_error_in_one_of_many_closes_nothing_that_needs_the_others(
  monkeypatch, tmp_path
):
  called = []
  for name in ("close", "leave"):
    note = lambda _, name=name: called.append(name)
    monkeypatch.setattr(checkpoints.Store, name, note)
  store = checkpoints.Store(tmp_path, keep=1, run="mine")
  for alone in (True, False):
    monkeypatch.setattr(processes, "alone", lambda alone=alone: alone)
    with pytest.raises(OSError), shared.closing(store):
      raise OSError
    with pytest.raises(train.RunEnded), shared.closing(store):
      raise train.RunEnded(3, "all of them end, and the step is to be saved")
    with shared.closing(store):
      pass
  assert called == ["close", "close", "close", "leave", "close", "close"]


@pytest.mark.parametrize(
  "name, value",
  [("config.sampling.n", 16), ("data train", "d1"), ("function my.py:f", "f1")],
)
def test_what_decides_the_numbers_is_named(name, value, tmp_path):
  c = configured.config(n=16)
  decide = lambda: shared.decisions(
    c, {"train": "d1"}, {"my.py:f": "f1"}, tmp_path
  )
  for file in ("config.json", "model.safetensors"):
    (tmp_path / file).write_text("1")
  of = decide()
  assert of[name] == value
  fields = config.flat(config.as_dict(c))
  assert {f"config.{name}" for name in fields} <= of.keys()
  assert {"jax", "Python", "the code of brorl_jax (a hash)"} <= of.keys()
  again = decide()
  assert again == of
  for file, text in (("config.json", "2"), ("model.safetensors", "12")):
    (tmp_path / file).write_text(text)
    changed, of = of, decide()
    assert {k for k in of if of[k] != changed[k]} == {
      "the policy's files (a hash)"
    }
