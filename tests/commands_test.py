"""The commands in the README and in the headers of the configs run."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Short forms: the same command, with these overrides.
SHORT = {
  "train": [
    "--config.samples=1024",
    "--config.round_samples=1024",
    "--config.steps=1",
    "--config.eval_prompts=2",
    "--config.eval_n=2",
    "--config.blocks=4",
  ],
  "simulate": ["--config.steps=3", "--config.vocab=20000"],
  "warmup": [
    "--config.puzzles=100",
    "--config.steps=2",
    "--config.mixed_steps=2",
    "--config.batch=8",
  ],
}


def commands():
  """Every `python -m brorl_jax.main` of the documents, once."""
  found = []
  for path in (ROOT / "README.md", *sorted(ROOT.glob("configs/*.py"))):
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m brorl_jax\.main[^\n`#]*", text):
      found.append(" ".join(line.split()))
  return sorted(set(found))


def test_documents_name_the_two_arms_and_the_warmup():
  text = "\n".join(commands())
  for config in ("n512", "n16", "warmup", "simulate"):
    assert f"--config=configs/{config}.py" in text


@pytest.mark.parametrize("command", commands())
def test_command_runs(command, tmp_path):
  _, *words = shlex.split(command)
  named = [w.removeprefix("--mode=") for w in words if w.startswith("--mode=")]
  mode = (named or ["train"])[0]
  words = [w for w in words if not w.startswith("--workdir=")]
  result = subprocess.run(
    [sys.executable, *words, f"--workdir={tmp_path}/run", *SHORT[mode]],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert result.returncode == 0, result.stderr
  leaves = {
    "train": "report/learning_curve.png",
    "warmup": "model.safetensors",
    "simulate": "report/figure3.png",
  }
  assert (tmp_path / "run" / leaves[mode]).exists()


def test_help_is_fast_and_names_the_flags():
  result = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "brorl_jax.main", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  for flag in ("--config", "--workdir", "--mode", "--[no]allow_config_change"):
    assert flag in result.stdout
  # What takes seconds is not loaded.
  for library in ("jax", "flax", "transformers", "reasoning_gym"):
    assert not re.search(rf"\| +{library}$", result.stderr, re.MULTILINE)


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
