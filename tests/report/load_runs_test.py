"""Tests of brorl_jax/report/load_runs.py: what it reads and refuses."""

import json

import pytest
import runs_for_tests as made
from messages import mentions

from brorl_jax.errors import UserError
from brorl_jax.report import load_runs
from brorl_jax.runs import metrics

REMEDY = "folder"  # what mends most damage


def refusal(path):
  with pytest.raises(UserError) as error:
    load_runs.read(path, "a")
  (line,) = str(error.value).splitlines()
  return line


def test_folders_of_one_name_have_different_names(tmp_path):
  paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
  assert load_runs.short_names(paths) == ["x/run", "y/run"]
  assert load_runs.short_names([*paths, tmp_path / "y" / "b"])[2] == "y/b"
  assert load_runs.short_names([paths[0], tmp_path / "b"]) == ["run", "b"]


def test_a_run_ends_with_its_last_finished_evaluation(tmp_path):
  """The next one is being written, as are the next metrics."""
  path = made.run(tmp_path / "a")
  append("eval/records.jsonl", json.dumps(record()) + '\n{"st')(path)
  append("metrics.jsonl", '{"step": 4, "time')(path)
  run = load_runs.read(path, "a")
  assert [e.step for e in run.evaluations] == [0, 1, 3]
  assert len(run.metrics) == 3 and run.evaluated is None


def record():
  return made.records(4, made.PASSES[3])[0]


@pytest.mark.parametrize("kind", [made.run, made.evaluation])
@pytest.mark.parametrize("field, value", [("status", None), ("score", "1")])
def test_a_damaged_record_is_named(tmp_path, kind, field, value):
  path = kind(tmp_path / "a")
  file = path / "eval" / "records.jsonl"
  lines = metrics.read_lines(file)
  lines[2][field] = value
  made.dump(file, lines)
  said = f"{file}, line 3 ... {field!r} ... {json.dumps(value)} ... {REMEDY}"
  assert mentions(refusal(path), said)


def append(name, text):
  def damage(run):
    with (run / name).open("a") as file:
      file.write(text)

  return damage


def write(name, text):
  return lambda run: (run / name).write_text(text)


def remove(*names):
  return lambda run: [(run / name).unlink() for name in names]


def steps(first, last):
  lines = made.metric_lines(last)[first - 1 :]
  return lambda run: made.dump(run / "metrics.jsonl", lines)


def fourth(**values):
  line = made.metric_lines(4)[3] | values
  return append("metrics.jsonl", json.dumps(line) + "\n")


@pytest.mark.parametrize("damage, line", [
  (remove("config.json"), "{} ... config.json"),
  (write("config.json", "{"), "{}/config.json ... line 1 ... " + REMEDY),
  (write("config.json", '{"model_type": "qwen2"}'), "{}/config.json"),
  (remove("metrics.jsonl", "eval/records.jsonl"), "{} ... evaluation"),
  (remove("eval/curve.jsonl"), "{} ... no finished evaluation"),
  (write("eval/curve.jsonl", '{"step": 0'), "{} ... no finished evaluation"),
  (remove("metrics.jsonl"), "{} ... evaluation is not finished"),
  (append("metrics.jsonl", "nonsense\n"), "{}/metrics.jsonl, line 4"),
  (append("metrics.jsonl", '{"step": 4}\n'),
    "{}/metrics.jsonl, line 4 ... 'time/step_s' ... " + REMEDY),
  (fourth(**{"time/step_s": "x"}),
    "{}/metrics.jsonl, line 4: 'time/step_s' ... \"x\" ... " + REMEDY),
  # No sum of such numbers is finite.
  (fourth(**{"time/cpu_s": 1e18}), "{}/metrics.jsonl, line 4: 'time/cpu_s'"),
  (fourth(step=4.0), "{}/metrics.jsonl, line 4: 'step' ... 4.0"),
  (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"),
    "{}/metrics.jsonl, line 1: 'utf-8' ... 0xff ... 0 ... " + REMEDY),
  (append("eval/curve.jsonl", "[]\n"), "{}/eval/curve.jsonl, line 4"),
  (append("eval/curve.jsonl", '{"step": 2}\n'),
    "{}/eval/records.jsonl ... [0, 1, 3] ... [0, 1, 3, 2]"),
  (steps(1, 2), "{}/metrics.jsonl ... 1 to 3 ... " + REMEDY),
  (steps(2, 3), "{}/metrics.jsonl ... 1 to 3 ... " + REMEDY),
])  # fmt: skip
def test_a_folder_that_is_damaged_or_no_run(tmp_path, damage, line):
  path = made.run(tmp_path / "a")
  damage(path)
  assert mentions(refusal(path), line.format(path))


def test_an_evaluation_without_records_is_refused(tmp_path):
  path = made.evaluation(tmp_path / "a")
  (path / "eval" / "records.jsonl").write_text("")
  assert mentions(refusal(path), f"{path}/eval/records.jsonl ... []")


@pytest.mark.parametrize("change, said", [
  (lambda lines: [*lines, lines[-1]], "sample 1 of 'aime/7'"),
  (
    lambda lines: [
      x | ({"id": x["id"] + "0"} if x["step"] == 3 else {}) for x in lines
    ],
    "held-out prompts ... steps 3 and 0",
  ),
  (lambda lines: [x for x in lines if x["step"] != 3 or x["sample"] == 0],
    "samples ... steps 3 and 0"),
])  # fmt: skip
def test_records_that_do_not_fit_together(tmp_path, change, said):
  path = made.run(tmp_path / "a")
  file = path / "eval" / "records.jsonl"
  made.dump(file, change(metrics.read_lines(file)))
  assert mentions(refusal(path), f"{file}: {said}")


@pytest.mark.parametrize("line", ["[]", '{"step": 1}', '{"event": "end"}', "{"])
def test_a_line_that_is_no_event_is_named(tmp_path, line):
  path = made.run(tmp_path / "a")
  (path / "events.jsonl").write_text(f"{line}\n")
  assert mentions(refusal(path), f"{path}/events.jsonl, line 1 ... {REMEDY}")


@pytest.mark.parametrize("field", ["step", "prompt", "reward"])
def test_a_line_that_is_no_sample_is_named(tmp_path, field):
  path = made.run(tmp_path / "a")
  line = dict.fromkeys(("task", "prompt", "response", "verdict", "reason"), "")
  line |= {"step": 1, "tokens": 1, "reward": 0.5, "gold": None}
  damaged = {k: v for k, v in line.items() if k != field}
  made.dump(path / "samples.jsonl", [line, damaged])
  said = f"{path}/samples.jsonl, line 2: {field!r} ... {REMEDY}"
  assert mentions(refusal(path), said)
