"""The commands in the README and in the headers of the configs run."""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
import runs_for_tests as made

from brorl_jax.main import folder, programs, settings, simulating
from brorl_jax.rl import simulator
from configs import revival, simulate

ROOT = pathlib.Path(__file__).parents[1]
# Short forms: the same command, with these overrides.
SHORT = {
  "train": [
    "--config.samples=1024",
    "--config.in_flight=1024",
    "--config.steps=1",
    "--config.eval_prompts=2",
    "--config.eval_n=2",
    "--config.blocks=4",
  ],
  "evaluate": ["--config.eval_prompts=2", "--config.eval_n=2"],
  "simulate": ["--config.steps=3", "--config.vocab=20000"],
  "warmup": [
    "--config.puzzles=100",
    "--config.steps=2",
    "--config.mixed_steps=2",
    "--config.batch=8",
  ],
}


def commands():
  """Every `python -m brorl_jax.main` of the documents, once.

  What differs in the work folder and the number of steps alone is the same.
  """
  found = {}
  for path in (ROOT / "README.md", *sorted(ROOT.glob("configs/*.py"))):
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m brorl_jax\.main[^\n`#]*", text):
      command = " ".join(line.split())
      alike = re.sub(r" --(workdir|config\.steps)=\S+", "", command)
      found.setdefault(alike, command)
  return sorted(found.values())


def test_documents_name_the_two_arms_and_the_warmup():
  text = "\n".join(commands())
  for config in ("n512", "n16", "warmup", "simulate"):
    assert f"--config=configs/{config}.py" in text


@pytest.fixture(scope="module")
def start():
  """Runs Python, which compiles without LLVM's optimizations."""
  flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  return functools.partial(run, env=os.environ | flags)


def run(*words, env):
  return subprocess.run(
    [sys.executable, *words],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    timeout=240,
  )


@pytest.mark.parametrize("command", commands())
def test_command_runs(start, command, tmp_path):
  _, *words = shlex.split(command)
  named = [w.removeprefix("--mode=") for w in words if w.startswith("--mode=")]
  mode = (named or ["train"])[0]
  words = [w for w in words if not w.startswith("--workdir=")]
  words += [f"--workdir={tmp_path}/run", *SHORT.get(mode, [])]
  if "--config.checkpoint=DIR" in words:  # a model that nobody has here
    words += ["--config.minibatches=1"]
    result = start(*words)
    assert result.returncode == 2
    assert result.stderr == "error: checkpoint 'DIR' is not a directory\n"
    return
  if "--config.checkpoint=runs/" in command:
    train = ["-m", "brorl_jax.main", "--config=configs/n512.py"]
    trained = start(*train, f"--workdir={tmp_path}/before", *SHORT["train"])
    assert trained.returncode == 0, trained.stderr
    (run,) = [w for w in words if w.startswith("--config.checkpoint=runs/")]
    words[words.index(run)] = f"--config.checkpoint={tmp_path}/before"
  if mode == "report":
    words = [w for w in words if not w.startswith("--workdir=")]
    words += [f"--workdir={made.run(tmp_path / name)}" for name in ("run", "b")]
  result = start(*words)
  assert result.returncode == 0, result.stderr
  leaves = {
    "train": "report/learning_curve.png",
    "report": "report/index.html",
    "evaluate": "eval/summary.json",
    "export": "model.safetensors",
    "warmup": "model.safetensors",
    "simulate": "report/figure3.png",
  }
  assert (tmp_path / "run" / leaves[mode]).exists()
  said = f"{programs.says()}\n" in result.stdout + result.stderr
  assert said == (mode in ("train", "evaluate", "warmup", "simulate"))


def test_help_is_fast_and_names_the_flags():
  result = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "brorl_jax.main", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  some = ("--config", "--workdir", "--mode", "--compilation_cache")
  for flag in (*some, "--[no]allow_config_change", "--[no]begin_again"):
    assert flag in result.stdout
  # What takes seconds is not loaded.
  for library in ("jax", "flax", "transformers", "reasoning_gym"):
    assert not re.search(rf"\| +{library}$", result.stderr, re.MULTILINE)


def test_the_revival_section_says_what_was_off():
  """As the config of its arms has it, and as its numbers are."""
  text = " ".join((ROOT / "README.md").read_text().split())
  section = text.split("## Does N = 512 revive")[1].split(" ## ")[0]
  arms = [revival.get_config(f"{wing}/n512_paper") for wing in revival.WINGS]
  assert {c.kl_weight for c in arms} == {0.0} and "No KL term" in section
  assert "none of its resets" in section
  wings = [c.keep == "all" for c in arms]
  assert (sum(wings), len(wings)) == (3, 4)
  assert "No dynamic sampling on three of the four wings" in section
  assert {c.minibatches for c in arms} == {1} and "One update" in section
  lost = 2.3e-5
  found = 1.0 - (1.0 - lost) ** 512
  assert f"{lost:.1e}".replace("e-05", "e-5") in section
  assert f"probability of {found:.1%} at best".replace("%", " %") in section


def test_no_scores_of_untuned_rates_are_compared():
  """Nor is a rule of rates drawn from those of arms that cannot gain."""
  text = (ROOT / "README.md").read_text()
  first = text.split("## Your own model")[0]
  (table,) = [x for x in first.split("\n\n") if "rollouts generated |" in x]
  assert "pass@1" not in table and "learns faster" not in text
  assert "2.83" not in text


def snippets():
  """The Python of the README."""
  text = (ROOT / "README.md").read_text()
  return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("snippet", snippets(), ids=["mathematics", "sampler"])
def test_snippet_runs(snippet):
  result = subprocess.run(
    [sys.executable, "-W", "error", "-c", snippet],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.strip()


# -------------------------------------------------------------- the simulator


def small(**change):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(
      n=(4, 16), dense_n=(8,), steps=6, vocab=600, correct=50, seeds=3, **change
    )
  return c


def reference(c, optimizer, n):
  keys = jax.random.split(jax.random.key(c.seed), c.seeds)
  runs = [
    simulator.simulate(
      key,
      n=n,
      steps=c.steps,
      vocab=c.vocab,
      correct=c.correct,
      seeding=c.seeding,
      anchor=c.anchor,
      surrogate=simulator.weighted_by_probability,
      optimizer=optimizer,
      centred=c.centred,
    )
    for key in keys
  ]
  return jax.tree.map(lambda *x: np.stack(x), *runs)


def test_the_report_of_the_simulator_is_that_of_its_runs(tmp_path, monkeypatch):
  drawn = {}
  for name in ("figure3", "sweep"):
    draw = getattr(simulating.report, name)
    monkeypatch.setattr(
      simulating.report,
      name,
      lambda path, runs, name=name, draw=draw: (
        drawn.update({name: [(r["optimizer"], r["n"]) for r in runs]}),
        draw(path, runs),
      ),
    )
  c = small()
  simulating.run(c, tmp_path / "run", allow_change=False)
  out = tmp_path / "run" / "report"
  runs = json.loads((out / "simulate.json").read_text())["runs"]
  every = [("adamw", 4), ("adamw", 8), ("adamw", 16), ("sgd", 4), ("sgd", 16)]
  assert [(r["optimizer"], r["n"]) for r in runs] == drawn["sweep"] == every
  assert drawn["figure3"] == [("adamw", 4), ("adamw", 16)]

  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  for run in runs:
    sgd = run["optimizer"] == "sgd"
    with jax.enable_x64(sgd):
      optimizer = simulator.Sgd(c.sgd_lr) if sgd else adamw
      want = reference(c, optimizer, run["n"])
    # float32 would be off by 1e-8; the file keeps 12 digits
    same = dict(rtol=0, atol=2e-12 if sgd else 2e-7)
    for name in ("correct_mass", "improved_fraction"):
      mean = getattr(want, name).mean(axis=0, dtype=np.float64)
      np.testing.assert_allclose(run[name], mean, **same)
    worst = want.worst_drop.min(axis=0)
    np.testing.assert_allclose(run["worst_drop"], worst, **same)
    assert np.ptp(want.worst_drop[:, -1]) > 3 * same["atol"]
    last = want.correct_mass[:, -1]
    np.testing.assert_allclose(run["correct_mass_by_seed"], last, **same)

  table = (out / "table.txt").read_text()
  assert [line.split()[:2] for line in table.splitlines()[1:-1]] == [
    [optimizer, str(n)] for optimizer, n in every
  ]
  for name in ("figure3.png", "sweep.png"):
    assert (out / name).stat().st_size > 10_000


def test_a_report_of_other_steps_is_not_overwritten(tmp_path):
  simulating.run(small(), tmp_path, allow_change=False)
  before = (tmp_path / "report" / "simulate.json").read_bytes()
  other = small()
  other.steps = 7
  with pytest.raises(settings.UserError, match=r"steps = 6 \(now 7\)"):
    simulating.run(other, tmp_path, allow_change=False)
  assert (tmp_path / "report" / "simulate.json").read_bytes() == before
  simulating.run(other, tmp_path, allow_change=True)
  after = json.loads((tmp_path / "report" / "simulate.json").read_text())
  assert after["config"]["steps"] == 7


def test_what_is_not_finite_is_no_report(tmp_path):
  line = "adamw with N = 4 does not stay finite; lower config.lr = 1e+38"
  with pytest.raises(settings.UserError, match=re.escape(line)):
    simulating.run(small(lr=1e38), tmp_path, allow_change=False)
  assert [path.name for path in tmp_path.iterdir()] == [".lock"]
  # The folder is still free for the same command with another rate.
  folder.check(small(), tmp_path, allow_change=False)
  bad = simulator.AdamW(1e38, 0.9, 0.999, 1e-8, 0.01)
  with pytest.raises(
    settings.UserError, match=r"lower config\.sgd_lr = 300\.0"
  ):
    simulating.sweep(small(), "sgd", bad, 4)


@pytest.mark.parametrize(
  "change, line",
  [
    (dict(n=(4.5,)), "config.n = (4.5,) must be integers of at least 1"),
    (dict(n=("4",)), "config.n = ('4',) must be integers of at least 1"),
    (dict(n=(0,)), "config.n = (0,) must be integers of at least 1"),
    (dict(n=()), "config.n = () must be one number or more"),
    (dict(dense_n=(4.5,)), "config.dense_n = (4.5,) must be integers of at"),
    (dict(b1=1.0), "config.b1 = 1.0 must be at least 0 and below 1"),
    (dict(b2=-0.1), "config.b2 = -0.1 must be at least 0 and below 1"),
    (dict(lr=0.0), "config.lr = 0.0 must be positive"),
    (dict(anchor=float("nan")), "config.anchor = nan must be finite, or None"),
    (dict(seeding=float("inf")), "config.seeding = inf must be finite"),
  ],
)
def test_settings_of_the_simulator_are_refused(change, line):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(**change)
  with pytest.raises(settings.UserError, match=re.escape(line)):
    settings.check_simulation(c, ("probability",))


@pytest.mark.parametrize(
  "change", [{}, dict(b1=0.0, b2=0.0), dict(anchor=None), dict(dense_n=())]
)
def test_settings_of_the_simulator_are_accepted(change):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(**change)
  settings.check_simulation(c, ("probability",))


def test_the_anchor_may_be_left_out(tmp_path):
  simulating.run(small(anchor=None), tmp_path, allow_change=False)
  stored = json.loads((tmp_path / "report" / "simulate.json").read_text())
  assert stored["config"]["anchor"] is None
