"""Tests of brorl_jax/report/load_runs.py: what it reads and refuses."""

import json

import pytest
import runs_for_tests as made
from messages import mentions

from brorl_jax.errors import UserError
from brorl_jax.report import load_runs
from brorl_jax.runs import metrics


def refusal(path):
  with pytest.raises(UserError) as error:
    folder = load_runs.check_folder(path)
    load_runs.read(folder, "a", lambda step: None)
  (line,) = str(error.value).splitlines()
  return line


def test_folders_of_one_name_are_told_apart(tmp_path):
  paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
  assert load_runs.short_names(paths) == ["x/run", "y/run"]
  assert load_runs.short_names([*paths, tmp_path / "y" / "b"])[2] == "y/b"
  assert load_runs.short_names([paths[0], tmp_path / "b"]) == ["run", "b"]


# What mends most damage, whatever it is.
REMEDY = "folder"


def changed(number, text):
  """Another text for a line of eval/records.jsonl."""

  def damage(run):
    path = run / "eval" / "records.jsonl"
    lines = path.read_text().splitlines()
    lines[number - 1] = text(json.loads(lines[number - 1]))
    path.write_text("\n".join(lines) + "\n")

  return damage


def field(**values):
  return lambda record: json.dumps(record | values)


@pytest.mark.parametrize("kind", [made.run, made.evaluation])
@pytest.mark.parametrize(
  "text, said",
  [
    (lambda _: "7", "'step' ... missing"),
    (lambda _: "[]", "'step' ... missing"),
    (lambda _: '{"step": 0}', "'sample' ... missing"),
    (lambda r: json.dumps(r | {"x": 1})[:-1], "Expecting ',' delimiter: "),
    (field(status=None), "'status' ... null"),
    (field(status=["pass"]), "'status' ... [\"pass\"]"),
    (field(score="1"), "'score' ... \"1\" ... finite"),
    (field(score=float("nan")), "'score' ... NaN ... finite"),
    (field(step="0"), "'step' ... \"0\" ... at least 0"),
    (field(tokens=-1), "'tokens' ... -1 ... at least"),
    (field(id=[1]), "'id' ... [1]"),
    (field(truncated=0), "'truncated' ... 0"),
    (field(prompt="x"), "'response' ... missing"),
    (
      field(**{"pass": True, "status": "fail"}),
      "'pass' ... 'status' is 'fail'",
    ),
  ],
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_damaged_record_is_named(tmp_path, kind, number, text, said):
  path = kind(tmp_path / "a")
  changed(number, text)(path)
  line = refusal(path)
  assert mentions(line, f"{path}/eval/records.jsonl, line {number} ... {said}")
  assert mentions(line, REMEDY)


def broken(path, damage):
  run = made.run(path)
  damage(run)
  return run


def append(name, text):
  def damage(run):
    with (run / name).open("a") as file:
      file.write(text)

  return damage


def written(field, value):
  """Another value of a field of config.json."""

  def damage(run):
    about = json.loads((run / "config.json").read_text())
    about.setdefault("evaluated", {})
    about = made.merged(about, {field: value})
    (run / "config.json").write_text(json.dumps(about))

  return damage


def remove(*names):
  return lambda run: [(run / name).unlink() for name in names]


@pytest.mark.parametrize(
  "damage, line",
  [
    (remove("config.json"), "{} ... config.json"),
    (
      lambda run: (run / "config.json").write_text("{"),
      "{}/config.json ... line 1 ... 2 ... char 1) ... " + REMEDY,
    ),
    # A value that equals no value, not even its own.
    (
      written("config.optim.lr", float("nan")),
      "{}/config.json ... NaN is not JSON ... " + REMEDY,
    ),
    (
      lambda run: (run / "config.json").write_text('{"model_type": "qwen2"}'),
      "{}/config.json",
    ),
    (remove("metrics.jsonl", "eval/records.jsonl"), "{} ... evaluation"),
    (remove("eval/curve.jsonl"), "{} ... evaluation"),
    (
      lambda run: (run / "eval" / "curve.jsonl").write_text('{"step": 0'),
      "{} ... evaluation",
    ),
    (remove("metrics.jsonl"), "{} ... evaluation"),
    (
      append("metrics.jsonl", "nonsense\n"),
      "{}/metrics.jsonl, line 4 ... line 1 ... 1 ... 0) ... " + REMEDY,
    ),
    (
      append("metrics.jsonl", '{"step": 4}\n'),
      "{}/metrics.jsonl, line 4 ... 'time/step_s' ... " + REMEDY,
    ),
    (
      append("eval/curve.jsonl", "[]\n"),
      "{}/eval/curve.jsonl, line 4 ... 'step' ... " + REMEDY,
    ),
    (
      append("eval/records.jsonl", '{"step": 4}\n'),
      "{}/eval/records.jsonl, line 25 ... 'sample' ... " + REMEDY,
    ),
    (
      append("eval/curve.jsonl", '{"step": 2}\n'),
      "{}/eval/records.jsonl ... [0, 1, 3] ... [0, 1, 3, 2]",
    ),
    (
      append("eval/curve.jsonl", '{"step": "4"}\n'),
      "{}/eval/curve.jsonl, line 4: 'step' ... \"4\" ... " + REMEDY,
    ),
    (
      append(
        "metrics.jsonl",
        json.dumps(made.metric_lines(4)[3]).replace("3600.0", '"x"') + "\n",
      ),
      "{}/metrics.jsonl, line 4: 'time/step_s' ... \"x\" ... " + REMEDY,
    ),
    (
      lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"),
      "{}/metrics.jsonl, line 1: 'utf-8' ... 0xff ... 0 ... " + REMEDY,
    ),
    (
      lambda run: (run / "metrics.jsonl").write_text(""),
      "{}/metrics.jsonl ... step 0 ... step 3 ... " + REMEDY,
    ),
    (
      lambda run: made.dump(run / "metrics.jsonl", made.metric_lines(2)),
      "{}/metrics.jsonl ... step 2 ... step 3 ... " + REMEDY,
    ),
    (
      lambda run: made.dump(run / "metrics.jsonl", made.metric_lines(3)[1:]),
      "{}/metrics.jsonl ... steps ... " + REMEDY,
    ),
  ],
)
def test_a_folder_that_is_damaged_or_no_run(tmp_path, damage, line):
  path = broken(tmp_path / "a", damage)
  assert mentions(refusal(path), line.format(path))


def test_a_sample_that_is_there_twice(tmp_path):
  a = made.run(tmp_path / "a")
  lines = metrics.read_lines(a / "eval" / "records.jsonl")
  made.dump(a / "eval" / "records.jsonl", [*lines, lines[-1]])
  line = refusal(a)
  assert line.startswith(f"{a}/eval/records.jsonl: sample 1 of 'aime/7'")


def test_prompts_that_change_during_a_run(tmp_path):
  a = made.run(tmp_path / "a")
  lines = metrics.read_lines(a / "eval" / "records.jsonl")
  for line in lines:
    if line["step"] == 3:
      line["id"] = line["id"].replace("aime/7", "aime/8")
  made.dump(a / "eval" / "records.jsonl", lines)
  assert mentions(refusal(a), f"{a}/eval/records.jsonl ... steps 3 and 0")


def test_samples_that_change_during_a_run(tmp_path):
  a = made.run(tmp_path / "a")
  lines = metrics.read_lines(a / "eval" / "records.jsonl")
  some = [x for x in lines if x["step"] != 3 or x["sample"] == 0]
  made.dump(a / "eval" / "records.jsonl", some)
  assert mentions(
    refusal(a), f"{a}/eval/records.jsonl: samples ... steps 3 and 0"
  )


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
  made.dump(path / "samples.jsonl", [line, line | {field: None}])
  said = f"{path}/samples.jsonl, line 2: {field!r} ... {REMEDY}"
  assert mentions(refusal(path), said)
