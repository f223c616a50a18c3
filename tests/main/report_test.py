"""Tests of --mode=report: what it reads, writes and refuses."""

import errno
import json
import os
import pathlib

import pytest
import runs_for_tests as made
import tiers
from messages import mentions

from brorl_jax.errors import StorageError, UserError
from brorl_jax.main import report
from brorl_jax.report import figures, load_runs
from brorl_jax.runs import metrics


def refusal(*workdirs):
  with pytest.raises(UserError) as error:
    report.run([pathlib.Path(one) for one in workdirs])
  (line,) = str(error.value).splitlines()
  return line


def test_the_report_of_two_runs_and_an_evaluation(tmp_path, capsys):
  a = made.run(tmp_path / "runs" / "a")
  b = made.run(tmp_path / "runs" / "b", n=2, samples=16)
  c = made.evaluation(tmp_path / "c", passes=made.PASSES[1])
  report.run([a, b, c])
  said = capsys.readouterr()
  assert "evaluation 7/7  c, step 0" in said.err and "s left" in said.err
  lines = said.out.splitlines()
  assert lines[0].split()[:3] == ["run", "at", "method"]
  assert [line.split()[0] for line in lines[1:]] == [
    "a,",
    "a",
    "b",
    "c",
    str(a / "report" / "index.html"),
  ]
  data = json.loads((a / "report" / "report.json").read_text())
  assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
  assert [run["n"] for run in data["runs"]] == [4, 2, None]
  assert data["runs"][2]["evaluated"] == "n512, step 60"
  assert data["sampling"] == {"temperature": 0.6, "top_p": 0.95}
  assert data["differences"] == [
    {"field": "sampling.n", "values": [4, 2]},
    {"field": "sampling.samples", "values": [8, 16]},
  ]
  assert data["prompts"] == 4 and data["samples_per_prompt"] == 2
  assert not (b / "report").exists() and not (c / "report").exists()


@pytest.mark.ci
def test_runs_with_one_held_out_prompt(tmp_path, capsys):
  prompts = {"aime/7": ("math", "aime")}
  passes = {0: [[0, 1]], 1: [[1, 1]]}
  a, b = (
    made.run(tmp_path / name, prompts=prompts, passes=passes) for name in "ab"
  )
  report.run([a, b])
  data = json.loads((a / "report" / "report.json").read_text())
  assert data["tests"] == []
  assert data["runs"][0]["evaluations"][1]["summary"]["all"]["low"] is None
  said = capsys.readouterr().out
  assert "100.00" in said and "n/a" not in said
  page = (a / "report" / "index.html").read_text()
  assert "nan" not in page.lower().split("<img")[0]


@pytest.mark.ci
def test_a_report_is_written_again(tmp_path):
  a = made.run(tmp_path / "a")
  report.run([a])
  first = (a / "report" / "report.json").read_text()
  report.run([a])
  assert (a / "report" / "report.json").read_text() == first


def test_a_run_in_progress_is_reported_as_far_as_it_is(tmp_path):
  """Its next evaluation is being written, as are its next metrics."""
  a = made.run(tmp_path / "a", steps=9)
  lines = made.records(4, made.PASSES[3])[:3]
  with (a / "eval" / "records.jsonl").open("a") as file:
    file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
  with (a / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "time')
  report.run([a])
  data = json.loads((a / "report" / "report.json").read_text())
  assert [e["step"] for e in data["runs"][0]["evaluations"]] == [0, 1, 3]
  assert data["runs"][0]["finished"] is False


@pytest.mark.ci
def test_a_run_that_was_only_evaluated_at_its_start(tmp_path):
  a = made.run(tmp_path / "a", passes={0: made.PASSES[0]})
  (a / "metrics.jsonl").write_text("")
  report.run([a])
  data = json.loads((a / "report" / "report.json").read_text())
  assert [e["step"] for e in data["runs"][0]["evaluations"]] == [0]


def test_folders_of_one_name_are_told_apart(tmp_path):
  paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
  assert load_runs.names(paths) == ["x/run", "y/run"]
  assert load_runs.names([*paths, tmp_path / "y" / "b"])[2] == "y/b"
  assert load_runs.names([paths[0], tmp_path / "b"]) == ["run", "b"]


def test_a_folder_twice_is_refused(tmp_path):
  a = made.run(tmp_path / "a")
  assert mentions(refusal(a, tmp_path / "." / "a"), f"{a} ... once")


OTHER = {**made.PROMPTS}
OTHER["gcd/heldout/5"] = OTHER.pop("gcd/heldout/1")
TASK = {k: (d, t.replace("aime", "amc")) for k, (d, t) in made.PROMPTS.items()}
MOVED = {**made.PROMPTS, "gcd/heldout/0": ("gym", "syllogism")}
THREE = {
  step: [[*row, 1] for row in rows] for step, rows in made.PASSES.items()
}


@pytest.mark.parametrize(
  "changes, difference",
  tiers.some(
    [
      ({"passes": THREE}, "2 and 3 samples"),
      ({"eval_temperature": 1.0}, "eval.temperature is 0.6 and 1.0"),
      ({"eval_top_p": None}, "eval.top_p ... 0.95"),
      ({"prompts": TASK}, "1 of 3 ... (math/aime), 1 of 3 ... (math/amc)"),
      (
        {"prompts": OTHER},
        "1 of 4 ... (gcd/heldout/1), 1 of 4 ... (gcd/heldout/5)",
      ),
      ({"prompts": MOVED}, "gcd/heldout/0 ... gym/gcd ... gym/syllogism"),
      ({"seed": 1}, "run.seed is 0 and 1"),
      (
        {"data__families__gcd__settings__max_value": 50},
        "data.families.gcd.settings.max_value is 40 and 50",
      ),
      (
        {"data__domains__math__instruction": "Think."},
        "data.domains.math.instruction is 'Box it.' and 'Think.'",
      ),
      ({"data__system": "Be brief."}, "data.system is '' and 'Be brief.'"),
      ({"held": "def"}, "held-out ... differ"),
    ],
    3,
  ),
)
def test_runs_that_were_measured_otherwise_are_refused(
  tmp_path, changes, difference
):
  a = made.run(tmp_path / "a")
  b = made.run(tmp_path / "b", **changes)
  assert mentions(refusal(a, b), f"{difference}")
  assert not (a / "report").exists()


def test_an_evaluation_with_more_samples_is_only_in_the_curve(tmp_path):
  run = made.run(tmp_path / "a")
  more = made.evaluation(tmp_path / "b", passes=([1, 0, 1, 0],) * 4)
  report.run([run, more])
  data = json.loads((run / "report" / "report.json").read_text())
  assert [one["name"] for one in data["runs"]] == ["a"]
  (deeper,) = data["deeper"]
  pass_at_k = deeper["evaluations"][0]["summary"]["all"]["pass_at_k"]
  assert deeper["name"] == "b" and [*pass_at_k] == ["1", "2", "4"]
  assert mentions(refusal(more, run), "4 and 2 samples")


def test_a_seed_is_named_rather_than_the_prompts_that_it_makes(tmp_path):
  a = made.run(tmp_path / "a")
  b = made.run(tmp_path / "b", prompts=OTHER, seed=1)
  assert mentions(refusal(a, b), "run.seed ... 0 ... 1")


def told(path, **entries):
  """A run whose config.json has other entries."""
  run = made.run(path)
  about = json.loads((run / "config.json").read_text()) | entries
  (run / "config.json").write_text(json.dumps(about))
  return run


@pytest.mark.parametrize(
  "entries, difference",
  [
    ({"versions": {"reasoning-gym": "0.1.24"}}, "'0.1.25' ... '0.1.24'"),
    ({"data": {"held out": "abc", "chat template": "77f8"}}, "77f8 ... differ"),
  ],
)
def test_other_puzzles_and_chat_templates_are_refused(
  tmp_path, entries, difference
):
  a, b = made.run(tmp_path / "a"), told(tmp_path / "b", **entries)
  assert mentions(refusal(a, b), difference)


@pytest.mark.parametrize("both", [False, True])
def test_runs_with_other_rewards_of_a_user_are_refused(tmp_path, both):
  loss = lambda digest: {"loss.kind": {"name": "x.py:f", "digest": digest}}
  mine = lambda digest: {
    "reward.verifier": {"name": "mine.py:score", "digest": digest}
  }
  first = loss("0") | (mine("a") if both else {})
  a = told(tmp_path / "a", functions=first)
  b = told(tmp_path / "b", functions=loss("1") | mine("b"))
  said = "mine.py:score (digest a)" if both else "the verifiers"
  assert mentions(refusal(a, b), f"{said} ... mine.py:score")


def test_prompts_of_one_side_are_counted_and_a_few_named(tmp_path):
  prompts = {f"gcd/heldout/{i}": ("gym", "gcd") for i in range(9)}
  fewer = dict(list(prompts.items())[:4])
  a = made.run(tmp_path / "a", prompts=prompts, passes={0: [[0, 1]] * 9})
  b = made.run(tmp_path / "b", prompts=fewer, passes={0: [[0, 1]] * 4})
  assert mentions(
    refusal(a, b), "5 of 9 ... (gcd/heldout/4, gcd/heldout/5, gcd/heldout/6"
  )


@pytest.mark.ci
@pytest.mark.parametrize(
  "changes",
  [
    {"lr": 0.1},
    {"data__domains__gym__instruction": "", "data__families__gcd__weight": 2.0},
    {"steps": 9},
  ],
)
def test_what_makes_another_method_may_differ(tmp_path, changes):
  a, b = made.run(tmp_path / "a"), made.run(tmp_path / "b", **changes)
  report.run([a, b])


def test_a_seed_may_differ_where_no_puzzle_is_made(tmp_path):
  prompts = {f"aime/{i}": ("math", "aime") for i in range(4)}
  a = made.run(tmp_path / "a", prompts=prompts)
  b = made.run(tmp_path / "b", prompts=prompts, seed=1)
  report.run([a, b])


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
    refusal(a), f"{a}/eval/records.jsonl: step 3 ... 1 ... step 0 ... 2"
  )


def test_a_report_that_cannot_be_written(tmp_path):
  a = made.run(tmp_path / "a")
  (a / "report").write_text("in the way")
  assert mentions(refusal(a), f"{a}/report ... written")


@pytest.mark.parametrize(
  "args, line",
  [
    (("--mode=report",), "--workdir is missing; see --help"),
    (("--mode=report", "--workdir="), "--workdir is missing; see --help"),
    (
      ("--mode=report", "--workdir=a", "--config=configs/n16.py"),
      "--mode=report ... --config",
    ),
    (
      ("--workdir=a", "--workdir=b", "--config=configs/n16.py"),
      "--workdir ... 2 ... --mode=train ... --mode=report",
    ),
  ],
)
def test_flags_that_are_refused(refused, args, line):
  assert mentions(refused(*args), line)


@pytest.mark.parametrize(
  "number, kind", [(errno.EROFS, StorageError), (errno.EACCES, UserError)]
)
def test_a_report_that_cannot_be_written_says_what_to_do(
  tmp_path, monkeypatch, number, kind
):
  def fails(*_):
    raise OSError(number, os.strerror(number), "report/x.png")

  monkeypatch.setattr(figures, "draw", fails)
  with pytest.raises(kind, match=r"cannot be written: report/x\.png: .* again"):
    report.write({}, tmp_path / "report")
