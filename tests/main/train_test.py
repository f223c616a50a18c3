"""--mode=train: the wiring, one of many processes."""

import os
import pathlib
import signal
import sys
import types

import configured
import hub_cache
import messages
import numpy as np
import pytest
import runs_for_tests as made
import tiers
from one_step import config, resolved

import brorl_jax
from brorl_jax import config as sections
from brorl_jax import loop
from brorl_jax.data import dataset
from brorl_jax.errors import UserError
from brorl_jax.main import train
from brorl_jax.many import processes
from brorl_jax.runs import checkpoints
from brorl_jax.types import RunState

ROOT = pathlib.Path(__file__).parents[2]
ASSETS = ROOT / "brorl_jax" / "assets"


@pytest.mark.ci
def test_a_run_records_the_files_and_the_commit_that_it_trains_on(
  tmp_path, monkeypatch
):
  (commit,) = hub_cache.made(tmp_path, monkeypatch, v2=ASSETS)
  path = made.problems(tmp_path / "a.jsonl", range(40))
  alone = {"data.files": (path,), "data.domains.gym.weight": 0.0}
  name = "maker/model@v2"
  this = resolved(config(prompt_tokens=80, checkpoint=name, **alone))
  parts = train._parts(this, tmp_path / "run", False, None)
  parts.scorer.close()
  assert parts.entries["files"] == dataset.file_digests(path)
  assert parts.entries["began_with"] == str(commit)


@pytest.mark.ci
def test_a_phase_says_once_what_it_changes(tmp_path, monkeypatch, capsys):
  stages = []

  def loops(state, make_stages, *_, **__):
    stages.extend(make_stages(step) for step in range(1, 5))
    return state

  monkeypatch.setattr(loop, "train", loops)
  monkeypatch.setattr(train, "finish", lambda *_: None)
  two = {"optim.lr": 0.25}
  three = {"optim.lr": 0.5, "sampling.samples": 128}
  phases = ({"from_step": 2, **two}, {"from_step": 3, **three})
  this = resolved(config(phases=phases))
  train.run(this, tmp_path / "run", allow_change=False)
  assert [x.changed for x in stages] == [None, two, three, None]
  assert [x.target for x in stages] == [4, 4, 8, 8]
  assert list(stages[3].candidates(4, RunState())) == list(range(80))
  assert "\nfrom step 3: 8 prompts x 16 rollouts; " in capsys.readouterr().out


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_is_not_of_the_run_has_no_trace(tmp_path, step):
  this = resolved(config(steps=2))
  with pytest.raises(UserError, match=f"--profile_step={step} .* 1 to 2"):
    train.run(this, tmp_path, allow_change=False, profile_step=step)
  assert not [*tmp_path.iterdir()]


@pytest.fixture
def refuses(failed, tmp_path):
  def line(**fields) -> str:
    said = failed(
      "--config=configs/smoke.py",
      f"--workdir={tmp_path / 'run'}",
      *(f"--config.{name}={value}" for name, value in fields.items()),
    )
    assert not (tmp_path / "run").exists()
    return said

  return line


@pytest.mark.parametrize("fields, line", tiers.some([
  ({"sampling.max_new_tokens": 40_000}, "sampling.max_new_tokens = 40040"),
  ({"policy.checkpoint": "nowhere"}, "checkpoint 'nowhere'"),
  ({"devices.mesh_tensor": 3}, "does not fill the 8 devices"),
  ({"data.prompt_tokens": 8}, "config.data.prompt_tokens = 8"),
  ({"data.families.gcd.settings.max_value": 0}, "gcd"),
], 3))  # fmt: skip
def test_what_does_not_fit_the_policy_is_refused(refuses, fields, line):
  assert messages.mentions(refuses(**fields), line)


@pytest.mark.parametrize(
  "verifier, text, line",
  [
    ("{}/mine.py:nothing", "", "has no function 'nothing'"),
    ("{}/mine.py:score", "score = lambda answer: 1\n",
      "(answer) ... (response"),
    ("score", "", "must be functions such as ('mine.py:score'"),
    ("{}/mine.py:score", "def score(responses, example, step): ...\n",
      "sampling.rounds = (16, 512) ... takes all responses to a prompt"),
  ],
)  # fmt: skip
def test_what_is_no_reward_is_refused(refuses, tmp_path, verifier, text, line):
  (tmp_path / "mine.py").write_text(text)
  made.dump(tmp_path / "odd.jsonl", [{"question": f"{i}?"} for i in range(40)])
  fields = {"data.files": tmp_path / "odd.jsonl",
    "data.fields": "prompt:question",
    "reward.verifier": verifier.format(tmp_path)}  # fmt: skip
  where = "config.reward.verifier = ... "
  if "rounds" in line:
    where, fields["sampling.rounds"] = "", "(16, 512)"
  assert messages.mentions(refuses(**fields), where + line)


def test_only_a_closed_loop_is_not_printed(monkeypatch):
  said = []
  hook = lambda one: said.append(one.exc_value)
  monkeypatch.setattr(sys, "unraisablehook", hook)
  closed = RuntimeError("Event loop is closed")
  others = [RuntimeError("Event loop is open"), ValueError(str(closed))]
  tell = lambda e: sys.unraisablehook(types.SimpleNamespace(exc_value=e))
  with train.no_closed_loops():
    for error in (closed, *others):
      tell(error)
  tell(closed)
  assert said == [*others, closed]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_and_a_second_one_at_once(number):
  ended = []
  mine = lambda *_: ended.append(True)
  before = signal.signal(number, mine)
  try:
    with train.Stop() as stop:
      assert not stop()
      os.kill(os.getpid(), number)
      assert stop() and stop.asked and not ended
      last = signal.getsignal(number) == signal.SIG_DFL
      assert last == (number == signal.SIGTERM)  # SIGHUP may come twice
    assert signal.getsignal(number) is mine
    signal.signal(number, signal.SIG_IGN)
    with train.Stop():  # as nohup has it
      assert signal.getsignal(number) == signal.SIG_IGN
  finally:
    signal.signal(number, before)


def test_processes_agree_with_any_signal(monkeypatch):
  monkeypatch.setattr(processes, "gather", lambda asked: [asked, True])
  stop = train.Stop()
  assert stop() and stop.asked


@pytest.mark.parametrize("sees", [True, False])
def test_a_folder_that_some_do_not_see_is_refused(sees, monkeypatch, tmp_path):
  """Process 1 of 2; process 0 writes here, or in another folder."""
  monkeypatch.setattr(train, "_SEEN_S", 0.3)
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
    train.require_one_folder(tmp_path)
    return
  with pytest.raises(UserError, match=r"process 1 does not see .* all hosts"):
    train.require_one_folder(tmp_path)


def test_the_first_process_clears_what_it_wrote(monkeypatch, tmp_path):
  monkeypatch.setattr(processes, "alone", lambda: False)
  seen = []
  gather = lambda value: seen.append([*tmp_path.iterdir()]) or [value, value]
  monkeypatch.setattr(processes, "gather", gather)
  train.require_one_folder(tmp_path)
  assert [len(files) for files in seen[1:]] == [1, 1]
  assert not [*tmp_path.iterdir()]


def test_an_error_in_one_of_many_closes_nothing_shared(monkeypatch, tmp_path):
  called = []
  for name in ("close", "leave"):
    note = lambda _, name=name: called.append(name)
    monkeypatch.setattr(checkpoints.Store, name, note)
  store = checkpoints.Store(tmp_path, keep=1, run="mine")
  for alone in (True, False):
    monkeypatch.setattr(processes, "alone", lambda alone=alone: alone)
    with pytest.raises(OSError), train.closing(store):
      raise OSError
    with pytest.raises(loop.RunEnded), train.closing(store):
      raise loop.RunEnded(3, "all of them end, and the step is to be saved")
    with train.closing(store):
      pass
  assert called == ["close", "close", "close", "leave", "close", "close"]


def test_what_decides_the_numbers_is_named(tmp_path):
  c = configured.config(n=16)
  decide = lambda: train.decisions(
    c, {"train": "d1"}, {"my.py:f": "f1"}, tmp_path
  )
  for file in ("config.json", "model.safetensors"):
    (tmp_path / file).write_text("1")
  of = decide()
  named = {"data train": "d1", "function my.py:f": "f1"}
  assert of.items() >= {**named, "config.sampling.n": 16}.items()
  fields = sections.flat(sections.as_dict(c))
  assert {f"config.{name}" for name in fields} <= of.keys()
  assert {"jax", "Python", "the code of brorl_jax (a hash)"} <= of.keys()
  assert decide() == of
  for file, text in (("config.json", "2"), ("model.safetensors", "12")):
    (tmp_path / file).write_text(text)
    changed, of = of, decide()
    differ = {k for k in of if of[k] != changed[k]}
    assert differ == {"the policy's files (a hash)"}


# ----------------------------------------------------------------- from Python

ROWS = [{"prompt": f"A number below {k}?", "answer": str(k)} for k in range(64)]


async def odd(response, example):
  return float(any(digit in response for digit in "13579"))


def two(messages, example):
  if len(messages) == 2:
    return "Lower?"
  return float(messages[-1]["content"] < messages[1]["content"])


def from_python(workdir, *, steps=3, tokens=6, **more):
  changes = {"run.steps": steps, "eval.n": 2, "sampling.max_new_tokens": tokens}
  changes |= {"sampling.n": 16, "sampling.samples": 64}
  how = {"changes": changes, "reward": odd, "data": ROWS} | more
  return brorl_jax.train("n512:tiny", workdir, **how)


@pytest.mark.parametrize("how", [
  {}, pytest.param({"reward": two, "tokens": 24}, marks=pytest.mark.ci),
])  # fmt: skip
def test_training_from_python_stops_resumes_and_shows_what_it_did(
  tmp_path, how
):
  """As a run that nothing stopped, bit for bit; also if responses are episodes
  of two turns."""
  told = {}

  def stops(step, metrics):
    told[step] = metrics["reward/mean"]
    return step == 2

  stopped = from_python(tmp_path / "a", callbacks=[stops], **how)
  assert stopped.stopped == 2 and stopped.metrics["step"].tolist() == [1, 2]
  assert [*told.values()] == stopped.metrics["reward/mean"].tolist()
  run = from_python(tmp_path / "a", **how)
  whole = from_python(tmp_path / "b", **how)
  assert run.stopped is None
  for name in ("step", "reward/mean", "policy/entropy", "optim/grad_norm"):
    np.testing.assert_array_equal(run.metrics[name], whole.metrics[name])
  assert [*run.evaluations] == [0, 3] and run.samples[0]["step"] == 1
  assert len(run.policy.sample("A number below 7?", n=2)) == 2
  lines = run.plot().axes[0].lines
  np.testing.assert_array_equal(
    lines[0].get_ydata(), run.metrics["reward/mean"]
  )


@pytest.mark.parametrize("wrong, why", [
  ({"changes": {"optim.lrr": 1.0}}, "no changes: optim.lrr; did you mean"),
  ({"changes": {"optim.lr": "fast"}}, "fast"),
  ({"data": ["missing.jsonl"]}, "missing.jsonl"),
  ({"reward": lambda answer: 1.0}, "takes (answer)"),
  ({"reward": two, "changes": {"run.max_age": 1}}, "run.max_age must be 0"),
  ({"reward": [two, odd]}, "one takes messages; use it alone"),
  ({"reward": [odd, odd]}, "two functions of one name ... python:odd"),
  ({"config": "n521"}, "n521"),
])  # fmt: skip
def test_what_training_from_python_refuses(tmp_path, wrong, why):
  how = {"config": "n512:tiny", "reward": odd, "data": ROWS} | wrong
  with messages.refuses(UserError, why):
    brorl_jax.train(workdir=tmp_path / "run", **how)


def test_rows_of_a_folder_are_not_others(tmp_path):
  path = train._written(tmp_path / "run.jsonl", ROWS, anew=False)
  assert train._written(path, ROWS, anew=False).read_text().count("\n") == 64
  with messages.refuses(
    UserError, "run.jsonl has other rows ... begin_again=True"
  ):
    train._written(path, ROWS[1:], anew=False)
  assert train._written(path, ROWS[1:], anew=True).read_text().count("\n") == 63


def test_what_python_shows_is_public():
  assert {*dir(brorl_jax)} == {*brorl_jax.__all__, "__version__"}
  for name in brorl_jax.__all__:
    assert getattr(brorl_jax, name) is not None
  assert callable(brorl_jax.train) and brorl_jax.rl.losses.LOSSES
  assert brorl_jax.verdicts.math.verify(r"\boxed{4}", "4").status == "pass"
  assert {*dir(brorl_jax.verdicts)} == {*brorl_jax.verdicts.__all__}
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    getattr(brorl_jax, "trian")  # noqa: B009
