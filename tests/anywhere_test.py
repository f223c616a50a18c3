"""The wheel alone, in an empty folder: own reward, loss, data and config.

The files are those of README and configs/README, as they stand there.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import compiling
import pytest
from launchers import ran

pytestmark = pytest.mark.ci
ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = "\n".join(
  (ROOT / name).read_text() for name in ("README.md", "configs/README.md")
)
SMALL = """
  --config.sampling.n=16 --config.sampling.samples=64
  --config.sampling.in_flight=64 --config.run.steps=2 --config.eval.prompts=2
  --config.eval.n=2 --config.optim.rows=8 --config.optim.blocks=2
  --config.theory.prompts=0 --config.filter.keep=all --config.eval.every=2
""".split()


def example(name: str) -> str:
  """The file that a document shows under this name."""
  marked = rf"```python\n# {name}\n(.*?)```"
  (found,) = re.findall(marked, DOCUMENTS, re.DOTALL)
  return found


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
  """A folder with what a wheel is made of."""
  source = tmp_path_factory.mktemp("source")
  for name in ("brorl_jax", "configs"):
    shutil.copytree(ROOT / name, source / name,
      symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
  for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
    shutil.copy(ROOT / name, source)
  return source


@pytest.fixture(scope="module")
def site(source, tmp_path_factory) -> pathlib.Path:
  """A folder with the package as its wheel installs it, and nothing else."""
  to = tmp_path_factory.mktemp("site")
  pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
  subprocess.run([*pip, "wheel", "--no-deps", "-w", to, source], check=True)
  (wheel,) = to.glob("*.whl")
  install = ["install", "--no-deps", "--target", to / "site", wheel]
  subprocess.run([*pip, *install], check=True)
  return to / "site"


@pytest.fixture
def brorl(site, tmp_path):
  flags = {"XLA_FLAGS": compiling.QUICK}
  environment = os.environ | flags | {"PYTHONPATH": str(site)}

  def run(*words: str) -> subprocess.CompletedProcess:
    command = sys.executable, "-m", "brorl_jax.main", *words
    return ran(*command, cwd=tmp_path, env=environment)

  return run


def data(path: pathlib.Path) -> None:
  """Ten lines with columns that no format asked for."""
  lines = [
    {"question": f"Calculate {a} + 4.", "solution": str(a + 4), "level": a % 3}
    for a in range(10)
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics(run: pathlib.Path) -> list[dict]:
  text = (run / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_the_command_says_the_version_of_the_wheel(brorl, site):
  (wheel,) = site.parent.glob("*.whl")
  assert brorl("--version").stdout.split() == wheel.name.split("-")[:2]


@pytest.mark.slow
def test_what_is_uploaded_is_complete(source, tmp_path):
  """The wheel is made of the archive of sources, as pip may do it."""
  for name in ("build", "twine"):
    pytest.importorskip(name)
  python = [sys.executable, "-m"]
  done = ran(*python, "build", "--outdir", tmp_path, source)
  assert done.returncode == 0 and "Warning" not in done.stdout, done.stderr
  made = [*tmp_path.iterdir()]
  done = ran(*python, "twine", "check", "--strict", *made)
  assert len(made) == 2 and done.stdout.count("PASSED") == 2, done.stdout


OWN_REWARD = """--config=smoke --config.data.files=('train.jsonl',)
  --config.data.fields=prompt:question --config.data.heldout_one_in=3
  --config.reward.verifier=('my_reward.py:score',)""".split()


def test_an_own_reward_a_loss_and_a_config_are_found(brorl, tmp_path):
  """A plan imports them, reads the data and compiles nothing."""
  for name in ("my_reward.py", "my_loss.py", "mine.py"):
    (tmp_path / name).write_text(example(name))
  data(tmp_path / "train.jsonl")
  words = ["--mode=plan", "--config=mine.py", *OWN_REWARD[1:]]
  done = brorl(*words, "--config.loss.kind=my_loss.py:loss", *SMALL)
  assert done.returncode == 0, done.stderr
  assert "files: " in done.stdout and "level" not in done.stderr
  (tmp_path / "my_loss.py").write_text("")
  done = brorl(*words, "--config.loss.kind=my_loss.py:loss", *SMALL)
  assert done.returncode == 2 and "my_loss.py:loss" in done.stderr


@pytest.mark.slow
def test_an_own_loss_and_an_own_config_train(brorl, tmp_path):
  pytest.importorskip("reasoning_gym")
  (tmp_path / "my_loss.py").write_text(example("my_loss.py"))
  (tmp_path / "mine.py").write_text(example("mine.py"))
  done = brorl("--config=mine.py",
    "--workdir=run", "--config.loss.kind=my_loss.py:loss", *SMALL)  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "lr 0.0001 = " in done.stdout
  first, second = metrics(tmp_path / "run")
  assert first["optim/grad_norm"] > 0.0
  assert first["loss/total"] != second["loss/total"]
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  assert config["functions"]["loss.kind"]["name"] == "my_loss.py:loss"
