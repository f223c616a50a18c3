"""The commands and snippets of the documents and of the configs' heads run."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import compiling
import configured
import jax
import numpy as np
import pytest
import runs_for_tests as made
import tiers
from absl.testing import flagsaver
from messages import mentions

from brorl_jax import main
from brorl_jax.configs import simulate
from brorl_jax.errors import UserError
from brorl_jax.main import __main__ as command_line
from brorl_jax.main import settings
from brorl_jax.main import simulate as simulate_command
from brorl_jax.many import meshes
from brorl_jax.rl import simulator
from brorl_jax.runs import folder

ROOT = pathlib.Path(__file__).parents[2]
# Short forms: the same command, with these overrides.
SHORT = {
  "train": """--config.sampling.n=32 --config.sampling.samples=64
    --config.sampling.in_flight=0 --config.optim.minibatches=2
    --config.run.steps=1 --config.eval.prompts=2 --config.eval.n=2
    --config.optim.blocks=4""",
  "evaluate": """--config.eval.prompts=2 --config.eval.n=2
    --config.devices.mesh_fsdp=1 --config.data.prompt_tokens=400
    --config.sampling.max_new_tokens=6""",
  "simulate": """--config.steps=3 --config.vocab=500 --config.correct=50
    --config.n=(4,64) --config.dense_n=()""",
  "warmup": "--config.optim.row_tokens=64 --config.devices.mesh_fsdp=1",
}
LEAVES = {
  "train": "report/index.html",
  "report": "report/index.html",
  "evaluate": "eval/summary.json",
  "export": "model.safetensors",
  "warmup": "model.safetensors",
  "simulate": "report/figure3.png",
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


def mode_of(command):
  return (re.findall(r"--mode=(\w+)", command) or ["train"])[0]


def by_tier():
  """Training and a second evaluation are slow."""
  for command in commands():
    long = mode_of(command) == "train" and "=DIR" not in command
    slow = long or "harder.py" in command
    yield tiers.at_night(command) if slow else command


def test_documents_name_the_two_arms_and_the_warmup():
  text = "\n".join(commands())
  for config in ("n512", "n16", "sft", "simulate"):
    assert f"--config=configs/{config}.py" in text


@pytest.fixture
def run(monkeypatch, capsys):
  """Runs the command; its status, standard output and errors."""
  make = lambda **_: meshes.over([jax.devices()[:1]], meshes.ONE)

  def of(*words):
    if mode_of(" ".join(words)) == "train" and "=DIR" not in " ".join(words):
      done = subprocess.run(
        [sys.executable, "-m", "brorl_jax.main", *words],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": compiling.QUICK},
        capture_output=True,
        text=True,
        timeout=240,
      )
      return done.returncode, done.stdout, done.stderr
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["brorl", *words])
    monkeypatch.setattr(command_line.os, "_exit", sys.exit)
    monkeypatch.setattr(main, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    monkeypatch.setattr(meshes, "make_mesh", make)
    status = 0
    with flagsaver.flagsaver():
      try:
        command_line.main(settings.parse_flags(sys.argv))
      except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()

  return of


@pytest.mark.ci
@pytest.mark.parametrize("command", list(by_tier()))
def test_command_runs(run, command, tmp_path):
  words, mode, out = (
    shlex.split(command)[3:],
    mode_of(command),
    tmp_path / "run",
  )
  words = [w for w in words if not w.startswith("--workdir=")]
  words += [f"--workdir={out}", *SHORT.get(mode, "").split()]
  if mode == "report":
    words += [f"--workdir={made.run(tmp_path / 'b')}"]
    made.run(out)
  if mode == "warmup":  # on the embedded policy
    made.dump(tmp_path / "pairs.jsonl", PAIRS)
    words = [w for w in words if "=DIR" not in w and "=pairs" not in w]
    words += [f"--config.data.files={tmp_path}/pairs.jsonl"]
  if mode in ("evaluate", "export"):
    made.with_checkpoints(tmp_path / "trained", configured.config(), (1,))
    trained = f"=={tmp_path / 'trained'}"[1:]
    words = [re.sub(r"(?<=checkpoint)=runs/.*", trained, w) for w in words]
  status, _, said = run(*words)
  if "--config.policy.checkpoint=DIR" in words:  # a model that is not here
    assert (status, said.count("\n")) == (2, 1)
    assert "error: checkpoint 'DIR' is not a directory;" in said
    return
  assert status == 0, said
  assert (out / LEAVES[mode]).exists()
  assert mode != "report" or "backend" not in said


@pytest.mark.parametrize(
  "flags, status",
  [
    (["--help"], 1),
    (["--config=n512", "--workdir=w", "--config.sampling.n=3"], 2),
    (["--config=n512", "--workdir=w", "--config.optim.lr=-1"], 2),
  ],
)
def test_flags_are_read_before_anything_is_loaded(flags, status):
  """Help, and wrong values of a field and between fields, take no second."""
  result = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "brorl_jax.main", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == status
  if status == 2:
    assert "error: config." in result.stderr
  else:
    names = "config workdir mode compilation_cache from_step profile_step"
    names += " [no]allow_config_change [no]begin_again prompts"
    for flag in names.split():
      assert f"--{flag}" in result.stdout
  slow = "jax", "flax", "transformers", "reasoning_gym", "orbax", "matplotlib"
  for library in slow:
    assert not re.search(rf"\| +{library}$", result.stderr, re.MULTILINE)


def snippets():
  """The Python of the documents, but for files of a reader."""
  text = "\n".join(path.read_text() for path in DOCUMENTS)
  found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  return [s for s in found if not re.match(r"# \w+\.py\n", s)]


@pytest.mark.ci
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("snippet", snippets())
def test_snippet_runs(snippet, monkeypatch):
  monkeypatch.chdir(ROOT)
  with contextlib.redirect_stdout(io.StringIO()) as said:
    exec(snippet, {})
  assert said.getvalue().strip()


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
  how = {k: c[k] for k in ("steps", "vocab", "correct", "seeding", "anchor")}
  how |= {"surrogate": simulator.weighted_by_probability, "n": n}
  one = lambda key: simulator.simulate(
    key, optimizer=optimizer, centred=c.centred, **how
  )
  return jax.tree.map(lambda *x: np.stack(x), *map(one, keys))


@pytest.mark.ci
def test_the_report_of_the_simulator_is_that_of_its_runs(tmp_path, monkeypatch):
  """And a report of other steps is not overwritten."""
  drawn = {}
  note = lambda name: lambda path, runs: drawn.update({name: runs})
  for name in ("figure3", "sweep"):
    monkeypatch.setattr(simulate_command.figures, name, note(name))
  c = small()
  simulate_command.run(c, tmp_path, allow_change=False)
  out = tmp_path / "report"
  runs = json.loads((out / "simulate.json").read_text())["runs"]
  every = [("adamw", 4), ("adamw", 8), ("adamw", 16), ("sgd", 4), ("sgd", 16)]
  kinds = lambda runs: [(r["optimizer"], r["n"]) for r in runs]
  assert kinds(runs) == kinds(drawn["sweep"]) == every
  assert kinds(drawn["figure3"]) == [("adamw", 4), ("adamw", 16)]
  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  for run in (runs[0], runs[-1]):
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
  other = small()
  other.steps = 7
  with pytest.raises(UserError, match=r"steps = 6 \(now 7\)"):
    simulate_command.run(other, tmp_path, allow_change=False)
  assert json.loads((out / "simulate.json").read_text())["runs"] == runs


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
