"""Tests of brorl_jax/main/recorder.py."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from brorl_jax import evaluate, meshes
from brorl_jax.main.commands import evaluate as evaluate_command
from brorl_jax.main.commands import plan
from brorl_jax.main.recorder import Recorder
from brorl_jax.rl import stats
from brorl_jax.runs import metrics, trackers


@pytest.mark.ci
def test_record_of_one_held_out_prompt_has_no_interval(wired, tmp_path):
  one = {"id": "q", "domain": "math", "task": "m", "tokens": 3, "reason": ""}
  one |= {"truncated": False, "score": 1.0, "pass": True, "status": "pass"}
  chunks = [[one | {"sample": n, "answer": "8"} for n in range(2)]]
  measure = lambda params, heldout: iter(chunks)
  c, _, examples, *_ = wired
  recorder = Recorder(c, tmp_path, examples, [], lambda step: measure, {}, {})
  recorder.start(-1)
  assert recorder.evaluate(0, None) == 1.0
  recorder.close()
  (line,) = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  assert (line["pass_at_1"], line["half_width"]) == (1.0, None)


@pytest.mark.ci
def test_wandb_gets_all_of_a_run_whenever_it_starts(
  wired, tmp_path, monkeypatch
):
  one = {"id": "q", "domain": "math", "task": "m", "tokens": 3, "reason": ""}
  one |= {"truncated": False, "score": 1.0, "pass": True, "status": "pass"}
  chunks = [[one | {"sample": n, "answer": "8"} for n in range(2)]]
  measure = lambda params, heldout: iter(chunks)
  c, _, examples, *_, kept, _ = wired
  c = dataclasses.replace(c, run=dataclasses.replace(c.run, wandb="mine"))
  told = []

  class Board:
    where = "somewhere"

    def __init__(self, workdir, project, *, config, done, warn):
      told.append((workdir, project, config["run"]["wandb"], [*done]))

    def write(self, step, scalars):
      told.append((step, dict(scalars)))

    def close(self):
      told.append("closed")

  monkeypatch.setattr(trackers, "Wandb", Board)
  recorder = Recorder(c, tmp_path, examples, [], lambda step: measure, {}, {})
  recorder.start(-1)
  recorder.evaluate(0, None)
  recorder.step(1, {"reward/mean": 0.5, "policy/kl_ref": None}, kept)
  recorder.evaluate(1, None)
  recorder.step(2, {"reward/mean": 0.75, "policy/kl_ref": None}, kept)
  recorder.close()
  score = {"eval/pass_at_1/m": 1.0, "eval/pass_at_1": 1.0}
  assert told == [
    (tmp_path, "mine", "mine", []),
    (0, score),
    (1, {"reward/mean": 0.5}),
    (1, score),
    (2, {"reward/mean": 0.75}),
    "closed",
  ]
  told.clear()
  monkeypatch.setattr(Recorder, "lacks", lambda self, step: None)
  again = Recorder(c, tmp_path, examples, [], lambda step: measure, {}, {})
  again.start(1)  # the checkpoint is that of step 1
  again.close()
  assert told[0][3] == [(0, score), (1, {"reward/mean": 0.5, **score})]


@pytest.mark.ci
def test_record_writes_what_a_step_and_an_evaluation_show(wired, tmp_path):
  c, policy, examples, scorer, _, state, kept, mesh = wired
  heldout = examples.heldout()
  plans = plan.make(c, policy, axes=meshes.of(mesh), keep_reference=True)
  measure = evaluate_command.measure(
    c, policy, examples, scorer, mesh, plans.evaluations, plans.chunk
  )
  steps = []
  by_step = lambda step: steps.append(step) or measure
  recorder = Recorder(
    c,
    tmp_path,
    examples,
    heldout,
    by_step,
    {},
    {"sandbox": 1},
    lambda: {"score/replaced_workers": 3},
  )
  recorder.start(-1)
  score = recorder.evaluate(0, state.params)
  recorder.step(1, {"reward/mean": 0.5}, kept)
  recorder.evaluate(1, state.params)
  recorder.close()
  assert steps == [0, 1]
  assert json.loads((tmp_path / "config.json").read_text())["sandbox"] == 1
  (line,) = metrics.read_lines(tmp_path / "metrics.jsonl")
  assert line["score/replaced_workers"] == 3 and line["reward/mean"] == 0.5
  curve = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  # The same draws each time: a gain is paired.
  assert curve[0]["rates"] == curve[1]["rates"]
  assert 0.0 < score == curve[0]["pass_at_1"] < 1.0
  records = metrics.read_lines(tmp_path / "eval" / "records.jsonl")
  assert len(records) == 2 * 8 * 2 * 4
  for step, line in enumerate(curve):
    said = evaluate.summary([r for r in records if r["step"] == step])
    assert line["summary"] == said
    assert line["pass_at_1"] == pytest.approx(said["all"]["pass_at_k"]["1"])
    by_task = said["by_domain"]["gym"]["by_task"]
    want = {
      task: numbers["pass_at_k"]["1"] for task, numbers in by_task.items()
    }
    assert line["by_family"] == want
    mean, half = stats.mean_interval(jnp.array(line["rates"]))
    assert (line["pass_at_1"], line["half_width"]) == (mean, half)
    assert len(line["rates"]) == 16
  assert {r["id"].split("/")[1] for r in records} == {"heldout"}
  samples = metrics.read_lines(tmp_path / "samples.jsonl")
  assert len(samples) == c.run.samples_shown
  for p, line in enumerate(samples):
    example = examples.example(1, p)
    assert (line["id"], line["domain"]) == (example.id, "gym")
    assert line["gold"] == example.entry["answer"]
    assert (line["verdict"] == "pass") == (line["reward"] == 1.0)
    assert (line["answer"] == line["gold"]) >= (line["verdict"] == "pass")
    assert line["seconds"] >= 0.0 and (line["reason"] == "") == line["reward"]
    n = kept.scores.reward[p] == line["reward"]
    assert n.any()


def lines_of(workdir, steps):
  """What a run leaves that was evaluated before its first step alone."""
  text = "".join(json.dumps({"step": i}) + "\n" for i in range(1, steps + 1))
  (workdir / "metrics.jsonl").write_text(text)
  (workdir / "eval").mkdir(exist_ok=True)
  (workdir / "eval" / "curve.jsonl").write_text('{"step": 0}\n')


def test_record_refuses_a_run_whose_lines_are_gone(wired, tmp_path):
  c, _, examples, *_ = wired
  recorder = lambda: Recorder(
    c, tmp_path, examples, [], lambda *_: None, {}, {}
  )
  with pytest.raises(metrics.Damaged, match=r"no step 3.* step 0"):
    recorder().start(3)
  lines = [json.dumps({"step": i}) for i in (1, 2, 3)]
  (tmp_path / "metrics.jsonl").write_text("\n".join(["{", *lines]) + "\n")
  with pytest.raises(metrics.Damaged, match=r"metrics\.jsonl, line 1"):
    recorder().start(3)
  lines_of(tmp_path, 3)
  with pytest.raises(metrics.Damaged, match=r"has steps of a run, .* no"):
    recorder().start(-1)
  one = recorder()
  assert [one.lacks(step) is None for step in (0, 3, 4)] == [True, True, False]
  one.start(3)
  one.close()


def test_record_keeps_events_once(wired, tmp_path, capsys):
  lines_of(tmp_path, 2)
  open_at = lambda done: (
    recorder := Recorder(
      wired[0], tmp_path, wired[2], [], lambda step: None, {}, {}
    ),
    recorder.start(done),
  )[0]
  recorder = open_at(2)
  for step in (1, 2, 3):
    recorder.event(step, {"event": "reference reset", "why": "KL"})
  recorder.close()
  told = capsys.readouterr().err
  assert "step 3/60  event: reference reset, why: KL\n" in told
  recorder = open_at(2)  # killed before step 3 was saved
  recorder.event(3, {"event": "phase", "changed": {"n": 32}})
  recorder.close()
  reset = {"event": "reference reset", "why": "KL"}
  assert metrics.read_lines(tmp_path / "events.jsonl") == [
    {"step": 2, "event": "resume"},
    {"step": 1, **reset},
    {"step": 2, **reset},
    {"step": 2, "event": "resume"},
    {"step": 3, "event": "phase", "changed": {"n": 32}},
  ]


def test_a_resume_with_another_config_is_an_event(wired, tmp_path):
  lines_of(tmp_path, 2)
  for done, changed in ((2, {"n": 512}), (2, {})):  # killed before step 3
    recorder = Recorder(
      wired[0], tmp_path, wired[2], [], lambda step: None, changed, {}
    )
    recorder.start(done)
    recorder.close()
  assert metrics.read_lines(tmp_path / "events.jsonl") == [
    {"step": 2, "event": "resume"},
    {"step": 2, "event": "config", "changed": {"n": 512}},
    {"step": 2, "event": "resume"},
  ]
