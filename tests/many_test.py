"""One run by 1, 2 and 4 processes of this machine, and what ends them."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import compiling
import configured
import launchers
import messages
import numpy as np
import pytest
import safetensors.numpy
from launchers import lines

from brorl_jax.main import export
from brorl_jax.main.recorder import last_word
from brorl_jax.many import processes

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 4  # of all processes together
REWARD = """
def score(response, example):
  # About half of all responses are right, so most groups have a gradient.
  return float(len(response) % 2 == int(example["answer"]) % 2)
"""
SMALL = """
  --config=smoke --config.sampling.n=8 --config.sampling.samples=64
  --config.sampling.in_flight=64 --config.sampling.max_new_tokens=8
  --config.data.prompt_tokens=32
  --config.optim.rows=4 --config.optim.blocks=4 --config.theory.prompts=0
  --config.eval.prompts=6 --config.eval.n=2 --config.eval.every=1
  --config.run.steps=2 --config.run.save_every=1
  --config.reward.verifier=('reward.py:score',)
  --config.data.files=('train.jsonl',) --config.data.heldout_one_in=5
""".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("many")
  (folder / "reward.py").write_text(REWARD)
  lines = [{"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
    for a in range(10) for b in range(5)]  # fmt: skip
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "train.jsonl").write_text(text)
  return folder


class Many:
  """The processes of a run.

  `last` are the folder, path of modules and flags of the last one, if others.
  """

  def __init__(
    self, site, workdir, count, *words, devices=DEVICES, last=(None, None, ())
  ):
    port = launchers.free_port()
    env = os.environ | {
      "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices // count),
      "XLA_FLAGS": compiling.QUICK,
    }  # fmt: skip
    command = [sys.executable, "-m", "brorl_jax.main", f"--workdir={workdir}"]
    command += [*SMALL, *words]
    self.logs = [
      workdir.parent / f"{workdir.name}.{port}.{i}" for i in range(count)
    ]
    self.workdir, self.every = workdir, []
    for i, log in enumerate(self.logs):
      many = (f"--coordinator=127.0.0.1:{port}",
        f"--processes={count}", f"--process_id={i}")  # fmt: skip
      folder, path, more = last if i + 1 == count else (None, None, ())
      paths = {"PYTHONPATH": f"{path or ROOT}:{ROOT}"}
      with log.open("w") as out:
        self.every.append(subprocess.Popen(
          [*command, *(many if count > 1 else ()), *more], cwd=folder or site,
          env=env | paths, stdout=out, stderr=subprocess.STDOUT,
        ))  # fmt: skip

  def __enter__(self) -> "Many":
    return self

  def __exit__(self, *_) -> None:
    for one in self.every:
      one.kill()
      one.wait()

  def ended(self, *which: int, within_s: float = 400) -> list[int]:
    end = time.monotonic() + within_s
    return [self.every[i].wait(max(end - time.monotonic(), 0.1))
      for i in which or range(len(self.every))]  # fmt: skip

  def connected(self) -> None:
    while not any("processes," in self.said(i) for i in range(2)):
      assert self.every[0].poll() is None, self.said(0)
      time.sleep(0.1)

  def said(self, i: int) -> str:
    return self.logs[i].read_text()


def trained(site, workdir, count, *words, **how):
  with Many(site, workdir, count, *words, **how) as many:
    statuses = many.ended()
    assert statuses == [0] * count, "\n".join(map(many.said, range(count)))
  return workdir


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  to = workdir.parent / f"{workdir.name} exported"
  if not to.exists():
    export.run(configured.config(checkpoint=str(workdir)).policy, to)
  return safetensors.numpy.load_file(to / "model.safetensors")


# Numbers of the clock and of the mesh, and gaps that are rounding alone.
NOT_THE_SAME = (
  "time/", "score/", "memory/", "rollout/tokens_per_s",
  "rollout/samples_per_s", "rollout/slot", "policy/logp_gap", "correction/",
)  # fmt: skip


def alike(one: pathlib.Path, other: pathlib.Path) -> None:
  """Same prompts, rollouts, kept groups and evaluations; parameters to 1e-5."""
  for name in ("samples.jsonl", "eval/records.jsonl", "eval/curve.jsonl"):
    both = [[{**line, "seconds": None} for line in lines(run / name)]
      for run in (one, other)]  # fmt: skip
    assert both[0] == both[1], name
  both = [lines(run / "metrics.jsonl") for run in (one, other)]
  for a, b in zip(*both, strict=True):
    for name in (a.keys() & b.keys()) - {"step"}:
      if name.startswith(("data/", "sampling/", "reward/", "rollout/length")):
        assert a[name] == b[name], name
      elif not name.startswith(NOT_THE_SAME) and a[name] is not None:
        np.testing.assert_allclose(a[name], b[name], 1e-3, 1e-6, err_msg=name)
  first, second = weights(one), weights(other)
  assert first.keys() == second.keys()
  for name, value in first.items():
    gap = np.abs(second[name] - value).max()
    assert gap <= 1e-5 * np.abs(value).max(), (name, gap)


@pytest.fixture(scope="module")
def alone(site):
  return trained(site, site / "alone", 1)


@pytest.mark.ci
def test_two_processes_train_as_one(site, alone):
  two = trained(site, site / "two", 2)
  alike(alone, two)
  told = lines(two / "metrics.jsonl")[1]
  assert {"time/rollout_s/0", "time/rollout_s/1"} <= told.keys()
  # Dynamic sampling had to replace some prompts.
  assert min(x["sampling/pass_rate"] for x in lines(two / "metrics.jsonl")) < 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_prompts_that_get_rounds_are_drawn_together(site, count):
  """Eight prompts of 4 to 16 rollouts; who claimed one makes its rounds."""
  stop = """--config.sampling.rounds=(4,16) --config.sampling.n=16
    --config.sampling.samples=128 --config.theory.prompts=2
    --config.sampling.stop_right=2""".split()
  one = trained(site, site / f"one of {count}", 1, *stop)
  many = trained(site, site / f"{count} in rounds", count, *stop)
  alike(one, many)
  drawn = [lines(x / "visits.jsonl") for x in (one, many)]
  assert drawn[0] == drawn[1]
  assert {line["drawn"] for line in drawn[0]} == {4, 16}


@pytest.mark.slow
def test_four_processes_train_as_one(site, alone):
  alike(alone, trained(site, site / "four", 4))


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(site, alone):
  """Two copies over 2 x 2 devices, then one whose rows have two."""
  mesh = lambda **x: [f"--config.devices.mesh_{a}={n}" for a, n in x.items()]
  changes = site / "meshes"
  trained(site, changes, 2, *mesh(data=2), "--config.run.steps=1")
  trained(site, changes, 2, *(*mesh(expert=2), "--allow_config_change"))
  alike(alone, changes)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(site):
  """Two, then four on the same mesh, then one on half of the devices."""
  to = lambda steps: f"--config.run.steps={steps}"
  changes = site / "changes"
  trained(site, changes, 2, to(1))
  trained(site, changes, 4, to(2))
  trained(site, changes, 1, to(3), devices=2)
  alike(trained(site, site / "three", 1, to(3)), changes)


@pytest.mark.slow
def test_two_processes_go_back_together(site):
  """Also to a step that is damaged, which both refuse."""
  again = site / "again"
  trained(site, again, 2)
  before = exact(again)
  trained(site, again, 2, "--from_step=1")
  assert exact(again) == before
  assert (again / "set_aside" / "1" / "checkpoints" / "2").is_dir()
  (again / "checkpoints" / "1" / "extra" / "metadata").write_text("{}")
  with Many(site, again, 2, "--from_step=1") as many:
    assert many.ended(within_s=200) == [2, 2]
    line = f"checkpoint 1 in {again}/checkpoints cannot be used"
    assert line in many.said(0).splitlines()[-1]
  assert (again / "checkpoints" / "2").is_dir()


def other_config(site, folder):
  return None, None, ("--config.loss.clip_low=0.1",)


def other_data(site, folder):
  """In a file of the same name, as on the disk of another host."""
  shutil.copy(site / "reward.py", folder)
  text = (site / "train.jsonl").read_text()
  (folder / "train.jsonl").write_text(text.replace("9 + 4", "9 + 3 + 1"))
  return folder, None, ()


def other_version(site, folder):
  about = folder / "optax-9.9.dist-info"
  about.mkdir()
  (about / "METADATA").write_text("Name: optax\nVersion: 9.9\n")
  return None, folder, ()


def other_code(site, folder):
  ignore = shutil.ignore_patterns("__pycache__")
  package = folder / "brorl_jax"
  shutil.copytree(ROOT / "brorl_jax", package, ignore=ignore)
  with (package / "types.py").open("a") as file:
    file.write("# changed\n")
  return None, folder, ()


@pytest.mark.slow
@pytest.mark.parametrize("other, line", [
  (other_config, "config.loss.clip_low = 0.1, but process 0 has 0.2"),
  (other_data, "process 1 has data ... = ... but process 0 has"),
  (other_version, "process 1 has optax = '9.9', but process 0 has '0."),
  (other_code, "process 1 has the code of brorl_jax (a hash) = ... but"),
])  # fmt: skip
def test_a_process_with_something_else_is_refused(site, tmp_path, other, line):
  """Both end with this line, before anything is written."""
  workdir = site / other.__name__
  with Many(site, workdir, 2, last=other(site, tmp_path)) as many:
    assert many.ended(within_s=120) == [2, 2]
    said = [many.said(i).splitlines()[-1] for i in (0, 1)]
  assert "first step compiles" not in many.said(0)
  assert all(messages.mentions(text, line) for text in said), said
  assert not workdir.exists()


BROKEN = """
import sys, threading, time

def broken():
  while not hasattr(train := sys.modules.get("brorl_jax.loop"), "_save"):
    time.sleep(0.01)
  real = train._sample

  def sample(stages, step, *rest):
    if step == 2:
      raise FloatingPointError("step 2: sampled logp is not finite")
    return real(stages, step, *rest)

  train._sample = sample

threading.Thread(target=broken, daemon=True).start()
"""


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_line(site, tmp_path):
  """In the middle of sampling, while the step before is being saved."""
  (tmp_path / "sitecustomize.py").write_text(BROKEN)
  workdir = site / "broken"
  with Many(site, workdir, 2, last=(None, tmp_path, ())) as many:
    assert many.ended(within_s=300) == [2, 2]
    said = [many.said(i).splitlines()[-1] for i in (0, 1)]
  line = "step 2: sampled logp is not finite"
  assert said == [f"error: process 1 stopped: {line}", f"error: {line}"]
  trained(site, workdir, 2)
  assert [x["step"] for x in lines(workdir / "metrics.jsonl")] == [1, 2]


def exact(run: pathlib.Path) -> dict:
  """All numbers of a run but those of the clock, and the bits of its state.

  Which process samples a prompt is a matter of time, and with it the slots that
  wait.
  """
  timed = ("time/", "score/", "memory/", "seconds", "rollout/samples_per_s")
  timed += ("rollout/tokens_per_s", "rollout/slot_occupancy")
  files = "metrics.jsonl", "samples.jsonl", "eval/records.jsonl"
  keep = lambda line: {k: v for k, v in line.items() if not k.startswith(timed)}
  read = lambda name: [keep(line) for line in lines(run / name)]
  last = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name))
  extra = json.loads((last / "extra" / "metadata").read_text())
  return {**{name: read(name) for name in files}, last.name: extra["digest"]}


THREE, METRICS = "--config.run.steps=3", "metrics.jsonl"


class Timed(NamedTuple):
  """A run of two processes that nobody disturbed."""

  words: list[str]
  numbers: dict
  seconds: float  # from when all have connected


@pytest.fixture(scope="module", params=[0, 1])
def undisturbed(site, request) -> Timed:
  """Without rollouts that cross a step, and with them."""
  words = [THREE, f"--config.run.max_age={request.param}"]
  words += ["--config.sampling.slots=2"] * request.param
  workdir = site / f"undisturbed {request.param}"
  with Many(site, workdir, 2, *words) as many:
    many.connected()
    start = time.monotonic()
    assert many.ended() == [0, 0], many.said(0)
    took = time.monotonic() - start
  told = [line.get("rollout/age_mean") for line in lines(workdir / METRICS)]
  assert (told[1] > 0) == request.param
  return Timed(words, exact(workdir), took)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_one_of_two_goes_at_any_moment(site, undisturbed, how, moment):
  """The other ends too, and the same command resumes as if nothing had been."""
  words = undisturbed.words
  workdir, victim = site / f"{how} {moment} {words[1]}", moment % 2
  with Many(site, workdir, 2, *words) as many:
    many.connected()
    time.sleep((moment + 0.5) / 10 * undisturbed.seconds)
    if many.every[victim].poll() is not None:
      pytest.skip("the machine was faster than before: the run is over")
    many.every[victim].send_signal(getattr(signal, how))
    (status,) = many.ended(1 - victim, within_s=60)
    line = many.said(1 - victim).splitlines()[-1]
    if how == "SIGTERM":
      statuses = {status, *many.ended(within_s=60)}
      if statuses == {0}:
        pytest.skip("the run was over when the signal was seen")
      assert statuses == {75}
      last = [many.said(i).splitlines()[-1] for i in (0, 1)]
      if "SIGTERM" in "".join(last):  # before training began
        assert last[victim] == "stopped; the same command resumes"
        assert last[1 - victim].startswith(f"error: process {victim} stopped:")
      else:
        assert re.fullmatch(
          r"stopped after step \d; the same command resumes", last[0]
        )
    else:
      assert status == processes.LOST
      assert re.fullmatch(
        rf"error: process {victim} of 2 \(.*\) has (ended|said nothing for "
        r"30 s); this one ends; the same command resumes", line,
      )  # fmt: skip
      if victim == 1 and (story := workdir / "events.jsonl").exists():
        assert last_word(story) == line.removeprefix("error: ")
  assert exact(trained(site, workdir, 2, *words)) == undisturbed.numbers
