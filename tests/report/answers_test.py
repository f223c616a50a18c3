"""Tests of brorl_jax/report/answers.py."""

import json
import re

import pytest
import runs_for_tests as made

from brorl_jax.main.commands import report as report_command
from brorl_jax.report import answers, cells, load_runs

RATE = "sampling/rate_share/"


def line(**shares):
  every = dict.fromkeys(answers._BINS, 0.0) | shares
  return {RATE + name: share for name, share in every.items()}


def test_rates_are_means_of_the_first_and_the_last_fifth():
  start, between = line(none=1.0), line(below_70=1.0)
  lines = [start, line(below_1=1.0), *[between] * 7, line(all=1.0)]
  got = answers.rates(lines)
  assert got["start"] == [0.5, 0.5, *[0.0] * 10]
  assert got["end"] == [*[0.0] * 6, 0.5, *[0.0] * 4, 0.5]
  assert answers.rates([{}, {}]) == {}
  assert answers.rates([start]) == {}  # nothing to compare
  assert answers.rates([between, start])["end"] == [1.0, *[0.0] * 11]


def record(name, task, response, **more):
  return {"id": name, "task": task, "prompt": f"{name}?", "pass": True} | {
    "response": response,
    "tokens": 3,
    "reason": "",
    **more,
  }


def test_pairs_are_of_the_same_prompt_and_each_task_comes_first():
  before = [record(f"{t}/{i}", t, f"old {t}{i}") for t in "ab" for i in (0, 1)]
  after = [record(f"{t}/{i}", t, f"new {t}{i}") for i in (1, 0) for t in "bca"]
  rates = (
    {one["id"]: i / 8 for i, one in enumerate(before)},
    {one["id"]: 1 - i / 8 for i, one in enumerate(after)},
  )
  got = answers.pairs(before, after, rates)
  assert [(x["before"]["rate"], x["after"]["rate"]) for x in got] == [
    (0.0, 0.375), (0.25, 0.625), (0.125, 0.75), (0.375, 1.0)
  ]  # fmt: skip
  said = [(one["before"]["response"], one["after"]["response"]) for one in got]
  assert said == [(f"old {x}", f"new {x}") for x in ("a0", "b0", "a1", "b1")]
  assert got[0]["prompt"] == "a/0?" and got[0]["task"] == "a"
  assert "reason" not in got[0]["before"]  # only what the page shows
  assert answers.pairs(before[:1], [], rates) == []


def test_what_was_said_is_on_the_page(tmp_path):
  path = made.run(
    tmp_path / "a",
    lines=[
      one | line(none=0.25, below_50=0.75) for one in made.metric_lines(3)
    ],
  )
  file = path / "eval" / "records.jsonl"
  lines = [json.loads(one) for one in file.read_text().splitlines()]
  for one in lines:
    one["tokens"] = 5 if one["pass"] else 8
    if one["sample"] == 0:
      one["prompt"] = f"<b>asked {one['id']}"
      one["response"] = f"6*7=<i>\n{one['step']}"
  made.dump(file, lines)
  read = load_runs.read(load_runs.look(path), "a", lambda step: None)
  data = report_command.numbers([read])
  out = tmp_path / "out"
  report_command.write(data, out)
  page = (out / "index.html").read_text()
  assert "&lt;b&gt;asked gcd/heldout/0" in page and "<b>asked" not in page
  assert "6*7=&lt;i&gt;\n0" in page and "6*7=&lt;i&gt;\n3" in page
  assert "6*7=&lt;i&gt;\n1" not in page  # neither first nor last
  said = re.sub("<[^>]*>", "", page)
  assert "pass, 5 tokens; 50.0 % of all samples right" in said
  assert {"answers.png", "rates.png"} <= {f.name for f in out.iterdir()}
  table = cells.text(answers.table(data, 9), data)
  assert "5.0 → 5.0" in table and "8.0 → 8.0" in table
  assert table.index("5.0 → 5.0") < table.index("8.0 → 8.0")  # right, wrong


def test_runs_without_responses_have_no_section(tmp_path):
  path = made.run(tmp_path / "a")
  read = load_runs.read(load_runs.look(path), "a", lambda step: None)
  data = report_command.numbers([read])
  assert answers.section(data) == "" and data["runs"][0]["rates"] == {}


@pytest.mark.parametrize("missing", ["prompt", "response"])
def test_half_a_record_is_refused(missing, tmp_path):
  path = made.run(tmp_path / "a")
  file = path / "eval" / "records.jsonl"
  lines = [json.loads(one) for one in file.read_text().splitlines()]
  lines[2] |= {"prompt": "x", "response": "y"}
  del lines[2][missing]
  made.dump(file, lines)
  with pytest.raises(report_command.UserError, match=f"'{missing}' is missing"):
    load_runs.read(load_runs.look(path), "a", lambda step: None)


def test_an_evaluation_with_more_samples_is_only_in_the_curve(tmp_path):
  run = made.run(tmp_path / "a")
  more = made.evaluation(tmp_path / "b", passes=([1, 0, 1, 0],) * 4)
  read = [
    load_runs.read(load_runs.look(path), path.name, lambda step: None)
    for path in (run, more)
  ]
  report_command.refuse_differences(*read)
  data = report_command.numbers(read)
  assert [one["name"] for one in data["runs"]] == ["a"]
  (deeper,) = data["deeper"]
  pass_at_k = deeper["evaluations"][0]["summary"]["all"]["pass_at_k"]
  assert deeper["name"] == "b" and [*pass_at_k] == ["1", "2", "4"]
  report_command.write(data, tmp_path / "out")
  with pytest.raises(report_command.UserError, match="4 and 2 samples"):
    report_command.refuse_differences(*reversed(read))
  trained = made.run(tmp_path / "c", passes={0: ([1, 0, 1, 0],) * 4})
  other = load_runs.read(load_runs.look(trained), "c", lambda step: None)
  with pytest.raises(report_command.UserError, match="2 and 4 samples"):
    report_command.refuse_differences(read[0], other)
