"""Tests of brorl_jax/main/commands/train.py: the wiring."""

import json

import jax
import pytest
from one_step import config

from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.main.commands import train as train_command
from brorl_jax.model import sharding
from brorl_jax.runs.run_state import RunState
from brorl_jax.tasks.data import dataset


@pytest.mark.ci
def test_a_run_records_the_files_that_it_trains_on(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  lines = [
    {"id": f"q-{i}", "domain": "math", "prompt": f"{i} + 5?", "answer": f"{i}"}
    for i in range(40)
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  monkeypatch.setattr(sharding, "make_mesh", lambda data, model: mesh)
  alone = {"data.files": (str(path),), "data.domains.gym.weight": 0.0}
  c = config(prompt_tokens=80, **alone)
  parts = train_command._parts(c, tmp_path / "run", allow_change=False)
  parts.scorer.close()
  assert parts.entries["files"] == dataset.file_digests(str(path))


@pytest.mark.ci
def test_a_phase_says_once_what_it_changes(wired):
  _, policy, examples, scorer, *_, mesh = wired
  change = {"optim.lr": 0.5, "sampling.samples": 128}
  c = config(
    phases=({"from_step": 2, "optim.lr": 0.25}, {"from_step": 3, **change})
  )
  one, _, three = settings.phases(c)
  phase = train_command.phase(
    three, examples, scorer, policy, mesh, keep_reference=True
  )
  assert phase.stages(3).changed == change
  assert phase.stages(4).changed is None
  assert phase.since == 3 and phase.stages(4).target == 128 // 16
  assert phase.summary.startswith("from step 3: 8 prompts x 16 rollouts; ")
  assert list(phase.stages(4).candidates(4, RunState())) == list(range(80))
  first = train_command.phase(
    one, examples, scorer, policy, mesh, keep_reference=True
  )
  assert first.stages(1).changed is None


def test_a_mesh_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="3"):
    sharding.make_mesh(3, 1)


def test_a_line_that_is_no_evaluation_is_one_line_at_the_end(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
  (tmp_path / "eval").mkdir()
  (tmp_path / "eval" / "curve.jsonl").write_text('{"step": 0}\n')
  with pytest.raises(
    UserError, match=r"curve\.jsonl, line 1: not an evaluation"
  ) as error:
    train_command.finish(tmp_path, title="a run")
  assert "\n" not in str(error.value)
