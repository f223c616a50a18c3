"""The commands and snippets of the documents and of the configs' heads run."""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import compiling
import jax
import numpy as np
import pytest
import runs_for_tests as made
import tiers
from messages import mentions

from brorl_jax.configs import simulate
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.main import simulate as simulate_command
from brorl_jax.rl import simulator
from brorl_jax.runs import folder

ROOT = pathlib.Path(__file__).parents[2]
# Short forms: the same command, with these overrides.
SHORT = {
  "train": [
    "--config.sampling.n=32",
    "--config.sampling.samples=64",
    "--config.sampling.in_flight=0",
    "--config.optim.minibatches=2",
    "--config.run.steps=1",
    "--config.eval.prompts=2",
    "--config.eval.n=2",
    "--config.optim.blocks=4",
  ],
  "evaluate": ["--config.eval.prompts=2", "--config.eval.n=2"],
  "simulate": [
    "--config.steps=3",
    "--config.vocab=2000",
    "--config.correct=100",
    "--config.n=(4,512)",
    "--config.dense_n=()",
  ],
}
DOCUMENTS = (
  ROOT / "README.md",
  ROOT / "configs" / "README.md",
  *sorted(ROOT.glob("brorl_jax/*/README.md")),
)
PAIRS = [{"prompt": f"{i} + 1?", "response": str(i + 1)} for i in range(60)]


def commands():
  """Every `python -m brorl_jax.main` of the documents, once.

  What differs in the work folder and the number of steps alone is the same.
  """
  found = {}
  for path in (*DOCUMENTS, *sorted(ROOT.glob("configs/*.py"))):
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m brorl_jax\.main[^\n`#]*", text):
      command = " ".join(line.split())
      if "--" not in command:  # it is only named
        continue
      alike = re.sub(r" --(workdir|config\.steps)=\S+", "", command)
      found.setdefault(alike, command)
  return sorted(found.values())


QUICK_START = "python -m brorl_jax.main --config=configs/n512.py"


def mode_of(command):
  return (re.findall(r"--mode=(\w+)", command) or ["train"])[0]


# They do what another one does, with other numbers.
ALIKE = (
  "harder.py",
  "smoke.py",
  "domain.py:math",
  "prorl_v1",
  "n16.py",
  "domain.py:code",
  "domain.py:instructions",
  "domain.py:stem",
  "n512_equal_samples",
  "sweep",
)


def by_tier():
  """Commands like another one's are slow; all run outside of a desk's tier."""
  for command in commands():
    if command.startswith(f"{QUICK_START} --workdir"):
      continue
    alike = any(f"configs/{name}" in command for name in ALIKE)
    yield tiers.at_night(command) if alike else command


def test_documents_name_the_two_arms_and_the_warmup():
  text = "\n".join(commands())
  for config in ("n512", "n16", "sft", "simulate"):
    assert f"--config=configs/{config}.py" in text


@pytest.fixture(scope="module")
def start():
  """Runs Python, which compiles as tests do."""
  flags = {"XLA_FLAGS": compiling.QUICK}
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


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
  """The run of the quick start, in its short form."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  words = shlex.split(QUICK_START)[1:]
  result = start(*words, f"--workdir={workdir}", *SHORT["train"])
  assert result.returncode == 0, result.stderr
  return workdir, result


@pytest.mark.ci
def test_quick_start_runs(trained):
  assert f"{QUICK_START} --workdir=runs/n512" in commands()
  assert (trained[0] / "report" / "index.html").exists()


@pytest.mark.ci
@pytest.mark.parametrize("command", list(by_tier()))
def test_command_runs(start, command, tmp_path, request):
  _, *words = shlex.split(command)
  mode = mode_of(command)
  words = [w for w in words if not w.startswith("--workdir=")]
  if "--config=configs/sft.py" in words:  # on the embedded policy
    made.dump(tmp_path / "pairs.jsonl", PAIRS)
    words = [w for w in words if not w.startswith("--config.")]
    words += [f"--config.data.files={tmp_path}/pairs.jsonl"]
    words += ["--config.optim.row_tokens=64", f"--workdir={tmp_path}/run"]
  else:
    words += [f"--workdir={tmp_path}/run", *SHORT.get(mode, [])]
  if "--config.policy.checkpoint=DIR" in words:  # a model that nobody has here
    words += ["--config.optim.minibatches=1"]
    result = start(*words)
    assert result.returncode == 2
    assert "error: checkpoint 'DIR' is not a directory;" in result.stderr
    assert result.stderr.count("\n") == 1
    return
  if "--config.policy.checkpoint=runs/" in command:
    before, _ = request.getfixturevalue("trained")
    (run,) = [
      w for w in words if w.startswith("--config.policy.checkpoint=runs/")
    ]
    words[words.index(run)] = f"--config.policy.checkpoint={before}"
  if mode == "report":
    words = [w for w in words if not w.startswith("--workdir=")]
    words += [f"--workdir={made.run(tmp_path / name)}" for name in ("run", "b")]
  result = start(*words)
  assert result.returncode == 0, result.stderr
  leaves = {
    "train": "report/index.html",
    "report": "report/index.html",
    "evaluate": "eval/summary.json",
    "export": "model.safetensors",
    "warmup": "model.safetensors",
    "simulate": "report/figure3.png",
  }
  assert (tmp_path / "run" / leaves[mode]).exists()
  assert mode != "report" or "backend" not in result.stderr


def test_help_is_fast_and_names_the_flags():
  result = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "brorl_jax.main", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  some = ("--config", "--workdir", "--mode", "--compilation_cache")
  some += ("--from_step", "--profile_step")
  for flag in (*some, "--[no]allow_config_change", "--[no]begin_again"):
    assert flag in result.stdout
  # What takes seconds is not loaded.
  slow = "jax", "flax", "transformers", "reasoning_gym", "orbax", "matplotlib"
  for library in slow:
    assert not re.search(rf"\| +{library}$", result.stderr, re.MULTILINE)


def test_a_wrong_value_is_told_before_anything_is_loaded(tmp_path):
  """One of a field, and one that does not go with another."""
  for flag in ("--config.sampling.n=3", "--config.optim.lr=-1"):
    result = subprocess.run(
      [
        *(sys.executable, "-X", "importtime", "-m", "brorl_jax.main"),
        *("--config=configs/n512.py", f"--workdir={tmp_path}/run", flag),
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert result.returncode == 2 and "error: config." in result.stderr
    for library in ("jax", "flax", "transformers", "reasoning_gym"):
      assert not re.search(rf"\| +{library}$", result.stderr, re.MULTILINE)


def section(path, heading):
  """A section of a document, up to the next heading of its level."""
  return path.read_text().split(f"\n## {heading}")[1].split("\n## ")[0]


def snippets():
  """The Python of the documents, but for files of a reader."""
  text = "\n".join(path.read_text() for path in DOCUMENTS)
  found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  return [s for s in found if not re.match(r"# \w+\.py\n", s)]


@pytest.mark.ci
@pytest.mark.parametrize("snippet", snippets())
def test_snippet_runs(snippet):
  result = subprocess.run(
    [sys.executable, "-W", "error", "-c", snippet],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": compiling.QUICK},
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


@pytest.mark.ci
def test_the_report_of_the_simulator_is_that_of_its_runs(tmp_path, monkeypatch):
  drawn = {}
  for name in ("figure3", "sweep"):
    draw = getattr(simulate_command.figures, name)
    monkeypatch.setattr(
      simulate_command.figures,
      name,
      lambda path, runs, name=name, draw=draw: (
        drawn.update({name: [(r["optimizer"], r["n"]) for r in runs]}),
        draw(path, runs),
      ),
    )
  c = small()
  simulate_command.run(c, tmp_path / "run", allow_change=False)
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


@pytest.mark.ci
def test_a_report_of_other_steps_is_not_overwritten(tmp_path):
  simulate_command.run(small(), tmp_path, allow_change=False)
  before = (tmp_path / "report" / "simulate.json").read_bytes()
  other = small()
  other.steps = 7
  with pytest.raises(UserError, match=r"steps = 6 \(now 7\)"):
    simulate_command.run(other, tmp_path, allow_change=False)
  assert (tmp_path / "report" / "simulate.json").read_bytes() == before
  simulate_command.run(other, tmp_path, allow_change=True)
  after = json.loads((tmp_path / "report" / "simulate.json").read_text())
  assert after["config"]["steps"] == 7


def test_what_is_not_finite_is_no_report(tmp_path):
  line = "config.lr = 1e+38 ... N = 4"
  with pytest.raises(UserError) as error:
    simulate_command.run(small(lr=1e38), tmp_path, allow_change=False)
  assert mentions(str(error.value), line)
  assert [path.name for path in tmp_path.iterdir()] == [".lock"]
  # The folder is still free for the same command with another rate.
  folder.check(json.loads(small().to_json()), tmp_path, allow_change=False)
  bad = simulator.AdamW(1e38, 0.9, 0.999, 1e-8, 0.01)
  with pytest.raises(UserError, match=r"config\.sgd_lr = 300\.0"):
    simulate_command.sweep(small(), "sgd", bad, 4)


@pytest.mark.parametrize(
  "change, line",
  [
    (dict(n=(0,)), "config.n = (0,) ... of at least 1"),
    (dict(n=()), "config.n = () ... one number"),
    (dict(dense_n=(4.5,)), "config.dense_n = (4.5,) ... integers"),
    (dict(b1=1.0), "config.b1 = 1.0 ... at least 0 ... below 1"),
    (dict(lr=0.0), "config.lr = 0.0 must be positive"),
    (dict(anchor=float("nan")), "config.anchor = nan ... finite ... None"),
  ],
)
def test_settings_of_the_simulator_are_refused(change, line):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(**change)
  with pytest.raises(UserError) as error:
    settings.check(c, simulate_command.rules)
  assert mentions(str(error.value), line)
