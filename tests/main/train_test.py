"""Tests of brorl_jax/main/train.py: the wiring."""

import json
import pathlib

import jax
import pytest
import tiers
from messages import mentions
from one_step import config

from brorl_jax.data import dataset
from brorl_jax.errors import UserError
from brorl_jax.main import train as train_command
from brorl_jax.many import meshes
from brorl_jax.model import huggingface, target
from brorl_jax.plan import resolve
from brorl_jax.plan.resolve import Machine
from brorl_jax.types import RunState

ASSETS = pathlib.Path(huggingface.__file__).parents[1] / "assets"


def resolved(**changes):
  """The run of a config on one device."""
  mesh = meshes.over([jax.devices()[:1]], meshes.ONE)
  machine = Machine(meshes.ONE, target.here(), 1, mesh)
  return resolve.resolve(config(**changes), machine)


@pytest.mark.ci
def test_a_run_records_the_files_that_it_trains_on(tmp_path):
  path = tmp_path / "a.jsonl"
  lines = [
    {"id": f"q-{i}", "domain": "math", "prompt": f"{i} + 5?", "answer": f"{i}"}
    for i in range(40)
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  alone = {"data.files": (str(path),), "data.domains.gym.weight": 0.0}
  this = resolved(prompt_tokens=80, **alone)
  parts = train_command._parts(this, tmp_path / "run", anew=False)
  parts.scorer.close()
  assert parts.entries["files"] == dataset.file_digests(str(path))


@pytest.mark.ci
def test_a_phase_says_once_what_it_changes(tmp_path, monkeypatch, capsys):
  made = []

  def train(state, make_stages, *_, **__):
    made.extend(make_stages(step) for step in range(1, 5))
    return state

  monkeypatch.setattr(train_command.train, "train", train)
  monkeypatch.setattr(train_command.load_runs, "read", lambda *_: None)
  monkeypatch.setattr(train_command.report, "publish", lambda *_: None)
  two = {"optim.lr": 0.25}
  three = {"optim.lr": 0.5, "sampling.samples": 128}
  this = resolved(phases=({"from_step": 2, **two}, {"from_step": 3, **three}))
  train_command.run(this, tmp_path / "run", allow_change=False)
  assert [stages.changed for stages in made] == [None, two, three, None]
  assert [stages.target for stages in made] == [4, 4, 8, 8]
  assert list(made[3].candidates(4, RunState())) == list(range(80))
  said = capsys.readouterr().out
  assert "\nfrom step 3: 8 prompts x 16 rollouts; " in said


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_is_not_of_the_run_has_no_trace(tmp_path, step):
  this = resolved(steps=2)
  with pytest.raises(UserError, match=f"--profile_step={step} .* 1 to 2"):
    train_command.run(this, tmp_path, allow_change=False, profile_step=step)
  assert not [*tmp_path.iterdir()]


# ------------------------------------------- refused before anything is written


@pytest.fixture
def refuses(failed, tmp_path):
  """The line in which a run of n512.py with other fields is refused."""

  def line(**fields) -> str:
    said = failed(
      "--config=configs/smoke.py",
      f"--workdir={tmp_path / 'run'}",
      *(f"--config.{name}={value}" for name, value in fields.items()),
    )
    assert not (tmp_path / "run").exists()
    return said

  return line


@pytest.mark.parametrize(
  "fields, line",
  tiers.some(
    [
      ({"sampling.max_new_tokens": 40_000}, "sampling.max_new_tokens = 40040"),
      ({"policy.checkpoint": "nowhere"}, "checkpoint 'nowhere'"),
      ({"devices.mesh_tensor": 3}, "does not fill the 8 devices"),
      ({"data.prompt_tokens": 8}, "config.data.prompt_tokens = 8"),
      ({"data.families.gcd.settings.max_value": 0}, "gcd"),
    ],
    3,
  ),
)
def test_what_does_not_fit_the_policy_is_refused(refuses, fields, line):
  assert mentions(refuses(**fields), line)


@pytest.mark.parametrize(
  "verifier, text, line",
  [
    ("mine.py:nothing", "", "has no function 'nothing'"),
    (
      "mine.py:score",
      "score = lambda answer: 1\n",
      "takes (answer) ... (response",
    ),
    ("mine.py:score", "x = 1 / 0\n", "line 1: ZeroDivisionError"),
    ("absent.py:score", "", "absent.py does not exist"),
    ("score", "", "must be functions such as ('mine.py:score'"),
  ],
)
def test_what_is_no_reward_is_refused(refuses, tmp_path, verifier, text, line):
  (tmp_path / "mine.py").write_text(text)
  (tmp_path / "odd.jsonl").write_text(
    "".join(f'{{"question": "{i} + {i}?"}}\n' for i in range(40))
  )
  if ":" in verifier:
    verifier = f"{tmp_path}/{verifier}"
  said = refuses(
    **{
      "data.files": tmp_path / "odd.jsonl",
      "data.fields": "prompt:question",
      "reward.verifier": verifier,
    }
  )
  assert mentions(said, f"config.reward.verifier = ... {line}")


@pytest.mark.ci
@pytest.mark.parametrize("damage", ["truncate", "garbage", "tokenizer"])
def test_a_damaged_policy_is_refused(refuses, tmp_path, damage):
  policy = tmp_path / "policy"
  policy.mkdir()
  for file in ASSETS.iterdir():
    if file.is_file():
      (policy / file.name).write_bytes(file.read_bytes())
  name = "tokenizer.json" if damage == "tokenizer" else "model.safetensors"
  content = (policy / name).read_bytes()
  half = content[: len(content) // 2]
  content = half if damage != "garbage" else b"\xff" * 64 + content[64:]
  (policy / name).write_bytes(content)
  assert name in refuses(**{"policy.checkpoint": policy})
