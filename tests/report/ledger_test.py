"""Tests of brorl_jax/report/ledger.py."""

import json
import math

import pytest
import runs_for_tests as made
import scipy.stats

from brorl_jax.errors import UserError
from brorl_jax.main.commands import report as report_command
from brorl_jax.report import cells, ledger, load_runs


def visit(step, name, right, drawn=8, **more):
  return {
    "step": step, "id": name, "task": "t", "drawn": drawn, "right": right,
    "invalid": 0, "tokens": 3, "kept": True,
  } | more  # fmt: skip


# a is won, b is lost after it rose, c stays at 0, d comes once, e falls to .1.
LINES = [
  visit(1, "a", 0),
  visit(1, "b", 0),
  visit(1, "c", 0),
  visit(1, "e", 8),
  visit(2, "b", 1),
  visit(2, "d", 0, drawn=16),
  visit(3, "a", 4),
  visit(3, "b", 0),
  visit(3, "c", 0),
  visit(3, "e", 1),
]


def test_what_became_of_prompts_by_hand():
  got = ledger.summary(LINES)
  assert {k: v for k, v in got.items() if k != "curve"} == {
    "prompts": 5, "visits": 10, "again": 4, "never": 2, "won": 1, "lost": 1,
    "resting": 0,
  }  # fmt: skip
  assert [x["step"] for x in got["curve"]] == [1, 2, 3]
  first, second, last = (x["pass_at_k"] for x in got["curve"])
  assert [*first] == ["1", "2", "4", "8"]
  assert first == {"1": 0.25, "2": 0.25, "4": 0.25, "8": 0.25}
  # One of 8 and none of 16, two at a time: 1 - C(7,2)/C(8,2) = 1/4.
  assert second["2"] == pytest.approx(0.25 / 2) and second["8"] == 0.5
  # 4, 0, 0 and 1 of 8.
  assert last["1"] == pytest.approx(5 / 8 / 4)
  assert last["2"] == pytest.approx((1 - 6 / 28 + 1 / 4) / 4)


def test_many_steps_are_taken_together_and_an_empty_ledger_is_none():
  lines = [visit(s, f"{s}", s % 9) for s in range(1, 61)]
  curve = ledger.summary(lines)["curve"]
  assert [x["step"] for x in curve] == [*range(5, 61, 5)]
  assert curve[0]["pass_at_k"]["1"] == pytest.approx((1 + 2 + 3 + 4 + 5) / 40)
  assert ledger.summary([]) == {}
  assert ledger.summary([visit(1, "a", 0, drawn=0)]) == {}


def test_a_line_for_each_prompt_by_hand():
  lines = [
    visit(1, "a", 0, drawn=4, invalid=1), visit(2, "b", 512, drawn=512),
    visit(3, "a", 3, drawn=4),
  ]  # fmt: skip
  a, b = ledger.prompts(lines)
  assert (a["id"], a["task"], a["last_seen"]) == ("a", "t", 3)
  assert a["visits"] == [
    {"step": 1, "drawn": 4, "right": 0, "wrong": 3, "invalid": 1},
    {"step": 3, "drawn": 4, "right": 3, "wrong": 1, "invalid": 0},
  ]
  assert (a["p"], a["won"], a["lost"], a["rests"]) == (0.75, True, False, None)
  assert a["pass_at_k"] == {"1": 0.75, "2": 1.0, "4": 1.0}
  assert [*b["pass_at_k"]][-1] == "512"
  assert not b["won"] and 0.99 < b["low"] < b["high"] <= 1.0


def test_an_interval_by_scipy():
  for n, c in ((4, 3), (512, 0), (16, 16), (100, 50)):
    want = scipy.stats.binomtest(c, n).proportion_ci(method="wilson")
    assert ledger.interval(n, c) == pytest.approx(want, abs=1e-6)


def test_who_rests():
  """Twice rejected in a row a prompt rests for 5 steps."""
  no = lambda step, name: visit(step, name, 0, kept=False)
  lines = [
    no(1, "a"), visit(2, "a", 1), no(3, "a"),  # not in a row
    no(1, "b"), no(2, "b"),  # until step 7
    no(1, "c"),
    no(4, "d"), no(6, "d"),  # until step 11
  ]  # fmt: skip
  rests = lambda lines: {
    one["id"]: one["rests"] for one in ledger.prompts(lines, ledger.Rest(2, 5))
  }
  assert rests(lines) == {"a": None, "b": 7, "c": None, "d": 11}
  more = [*lines, visit(7, "e", 1)]
  assert rests(more)["b"] is None and rests(more)["d"] == 11
  assert ledger.summary(more, ledger.Rest(2, 5))["resting"] == 1
  assert ledger.summary(more)["resting"] == 0


def test_the_report_writes_a_line_for_each_prompt(tmp_path):
  path = made.run(tmp_path / "a")
  made.dump(path / "visits.jsonl", LINES)
  report_command.run([path])
  text = (path / "report" / "ledger.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  assert [(x["run"], x["id"]) for x in lines] == [
    ("a", name) for name in "abced"
  ]


def test_pass_at_k_of_many():
  assert ledger.pass_at_k(1024, 3, 512) == pytest.approx(
    1 - 512 * 511 * 510 / (1024 * 1023 * 1022)
  )
  assert ledger.pass_at_k(5, 5, 3) == 1.0 and ledger.pass_at_k(5, 0, 5) == 0.0
  assert math.isclose(ledger.pass_at_k(4, 1, 1), 0.25)


def read(path):
  return load_runs.read(load_runs.look(path), path.name, lambda step: None)


def test_the_page_has_the_figure_and_the_table(tmp_path):
  path = made.run(tmp_path / "a")
  made.dump(path / "visits.jsonl", LINES)
  other = made.run(tmp_path / "b")  # without a ledger
  data = report_command.numbers([read(path), read(other)])
  out = tmp_path / "out"
  report_command.write(data, out)
  assert (out / "ledger.png").stat().st_size > 10_000
  assert "Pass@k of the training prompts" in (out / "index.html").read_text()
  table = ledger.table(data, 3)
  assert len(table.rows) == 1
  text = cells.text(table, data)
  assert [x for x in text.splitlines()[-1].split() if x.isdigit()] == [
    "5", "10", "4", "1", "1", "2", "0",
  ]  # fmt: skip
  alone = report_command.numbers([read(other)])
  assert ledger.draw(out, alone) == [] and alone["runs"][0]["visits"] == {}


@pytest.mark.parametrize(
  "broken", [{"drawn": "8"}, {"right": 9}, {"right": -1}, {"id": 3}]
)
def test_a_line_that_is_no_visit_is_named(tmp_path, broken):
  path = made.run(tmp_path / "a")
  made.dump(
    path / "visits.jsonl", [visit(1, "a", 3), visit(1, "b", 3) | broken]
  )
  with pytest.raises(UserError, match=r"visits\.jsonl, line 2"):
    read(path)


def test_json_lines_are_read_as_they_are_written(tmp_path):
  path = tmp_path / "visits.jsonl"
  made.dump(path, LINES)
  again = [json.loads(line) for line in path.read_text().splitlines()]
  assert ledger.summary(again) == ledger.summary(LINES)


def test_a_run_says_when_its_prompts_rest(tmp_path):
  path = made.run(tmp_path / "a")
  about = json.loads((path / "config.json").read_text())
  about["config"]["filter"] = {"rest_after": 2, "rest_steps": 5}
  (path / "config.json").write_text(json.dumps(about))
  no = [visit(step, "a", 0, kept=False) for step in (1, 2)]
  made.dump(path / "visits.jsonl", no)
  assert load_runs.rest(load_runs.look(path).about) == ledger.Rest(2, 5)
  assert read(path).run.visits["resting"] == 1
  assert load_runs.rest({"config": {}}) == ledger.Rest(0, 0)
