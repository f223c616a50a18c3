"""The commands and snippets of the documents and of the configs' heads run."""

import contextlib
import io
import os
import pathlib
import re
import shlex
import sys

import compiling
import configured
import jax
import published_sets
import pytest
import runs_for_tests as made
import tiers
from absl.testing import flagsaver
from launchers import ran

from brorl_jax import main
from brorl_jax.main import __main__ as command_line
from brorl_jax.main import settings
from brorl_jax.many import meshes

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
    --config.n=(4,64)""",
}
LEAVES = {"train": "report/index.html", "report": "report/index.html",
  "evaluate": "eval/summary.json", "export": "model.safetensors",
  "simulate": "report/figure3.png", "prepare": "eurus2.jsonl"}  # fmt: skip
DOCUMENTS = (ROOT / "README.md", ROOT / "configs" / "README.md",
  *sorted(ROOT.glob("brorl_jax/*/README.md")))  # fmt: skip


def commands():
  """Every `python -m brorl_jax.main` of the documents, once.

  What differs in the work folder and the number of steps alone is the same.
  """
  found = {}
  for path in (*DOCUMENTS, *sorted(ROOT.glob("configs/*.py"))):
    text = path.read_text().replace("\\\n", " ")
    if path.parent == ROOT:  # but for files that a reader brings, and answers
      short = (
        r"(?m)^brorl (?!.*(?:--mode=sample|--mode=serve|train\.jsonl|my_))"
      )
      text = re.sub(short, "python -m brorl_jax.main ", text)
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
  for command in commands():
    long = mode_of(command) == "train" and "=DIR" not in command
    slow = long or "harder.py" in command
    yield tiers.at_night(command) if slow else command


@pytest.fixture
def run(monkeypatch, capsys):
  make = lambda **_: meshes.over([jax.devices()[:1]], meshes.ONE)

  def of(*words):
    if mode_of(" ".join(words)) == "train" and "=DIR" not in " ".join(words):
      quick = os.environ | {"XLA_FLAGS": compiling.QUICK}
      done = ran(sys.executable, "-m", "brorl_jax.main", *words, env=quick)
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
  words, mode = shlex.split(command)[3:], mode_of(command)
  out = tmp_path / "run"
  words = [w for w in words if not w.startswith("--workdir=")]
  words += [f"--workdir={out}", *SHORT.get(mode, "").split()]
  if mode == "prepare":
    for name, path in published_sets.sets(tmp_path / "sets").items():
      words = [
        re.sub(rf"(?<=[=,]){name}\b", f"{name}={path}", w) for w in words
      ]
  if mode == "report":
    words += [f"--workdir={made.run(tmp_path / 'b')}"]
    made.run(out)
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
  assert mode == "plan" or (out / LEAVES[mode]).exists()
  assert mode != "report" or "backend" not in said


@pytest.mark.parametrize("flags, status", [
  (["--help"], 0),
  (["--config=n512", "--workdir=w", "--config.sampling.n=3"], 2),
  (["--config=n512", "--workdir=w", "--config.optim.lr=-1"], 2),
])  # fmt: skip
def test_flags_are_read_before_anything_is_loaded(flags, status):
  """Help, and wrong values of a field and between fields, take no second."""
  command = sys.executable, "-X", "importtime", "-m", "brorl_jax.main"
  result = ran(*command, *flags, timeout=60)
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
@pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("snippet", snippets())
def test_snippet_runs(snippet, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "brorl_jax").symlink_to(ROOT / "brorl_jax")
  with contextlib.redirect_stdout(io.StringIO()) as said:
    exec(snippet, {})
  assert said.getvalue().strip()
