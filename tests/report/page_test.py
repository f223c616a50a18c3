"""Tests of the page, its tables and its figures."""

import html.parser
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
import runs_for_tests as made
from matplotlib.colors import to_rgb

from brorl_jax.errors import UserError
from brorl_jax.main import report as report_command
from brorl_jax.report import (
  cells,
  figures,
  lead,
  load_runs,
  page,
  samples,
  tables,
)

NASTY = '<script>alert("&")</script>'
PROMPTS = {**made.PROMPTS, "<b>1": ("math", "a/b~<i>$x$.c")}
PASSES = {step: (*rows, [step % 2, 1]) for step, rows in made.PASSES.items()}


def read(path, name):
  return load_runs.read(load_runs.look(path), name, lambda step: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  """A report of two runs and an evaluation, with names to be careful with."""
  folder = tmp_path_factory.mktemp("runs")
  make = lambda name, **more: made.run(folder / name, prompts=PROMPTS, **more)
  make("a", passes=PASSES)
  lines = made.metric_lines(5, step_s=1234.5, samples=12_345)
  better = {0: PASSES[0], 2: PASSES[3], 5: ([1, 1],) * 5}
  make("b", passes=better, lines=lines, n=2, steps=9, advantage=NASTY)
  last = made.evaluation(folder / "c", passes=PASSES[1], prompts=PROMPTS)
  runs = [read(folder / "a", NASTY), read(folder / "b", "b"), read(last, "c")]
  out = folder / "report"
  data = report_command.numbers(runs)
  report_command.write(data, out)
  return out


@pytest.fixture(scope="module")
def data(report):
  return json.loads((report / "report.json").read_text())


class Page(html.parser.HTMLParser):
  """Numbers with their places, cells, and everything else that is said."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.numbers, self.cells = [], [], [], []
    self.text, self._inside, self._cell = "", None, None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, *one) for one in attrs]
    attrs = dict(attrs)
    if "data-path" in attrs:
      self._inside = (attrs["data-path"], attrs["data-kind"])
    if tag == "td":
      self._cell = ["" if attrs.get("class") == "text" else "number", ""]

  def handle_endtag(self, tag):
    if tag == "span":
      self._inside = None
    if tag == "td":
      self.cells.append(self._cell)
      self._cell = None

  def handle_data(self, text):
    if "style" in self.tags[-1:]:
      return
    if self._inside:
      self.numbers.append((*self._inside, text))
    elif self._cell:
      self._cell[1] += text
    self.text += text


@pytest.fixture(scope="module")
def parsed(report):
  return Page((report / "index.html").read_text())


def found(pointer, data):
  """What a JSON pointer (RFC 6901) leads to."""
  for key in pointer.split("/")[1:]:
    key = key.replace("~1", "/").replace("~0", "~")
    data = data[int(key) if isinstance(data, list) else key]
  return data


@pytest.mark.ci
def test_every_number_of_the_page_is_that_of_the_json(parsed, data):
  """How it is written is tested below, for each kind."""
  for pointer, kind, text in parsed.numbers:
    number = cells.Number(("x",), kind)
    assert text == cells.written(number, {"x": found(pointer, data)}), pointer
  assert {kind for _, kind, _ in parsed.numbers} == cells._KINDS.keys()
  assert len(parsed.numbers) > 150


@pytest.mark.ci
def test_no_cell_has_a_number_of_its_own(parsed):
  """What is left of a cell of numbers is brackets and arrows."""
  rest = {text for kind, text in parsed.cells if kind == "number"}
  assert rest <= {"", "[, ]", " → ", "[, ]step ", "step ", "p ", "too early"}


def test_what_comes_from_runs_is_text(parsed, data):
  assert NASTY in parsed.text and "a/b~<i>$x$.c" in parsed.text
  assert {"script", "b", "i", "link", "iframe"}.isdisjoint(parsed.tags)
  assert data["tasks"]["math"] == ["aime", "a/b~<i>$x$.c"]


def test_the_page_needs_nothing_else(parsed, report):
  text = (report / "index.html").read_text()
  links = [v for _, name, v in parsed.attributes if name in ("src", "href")]
  assert len(links) == 4
  assert all(link.startswith("data:image/png;base64,") for link in links)
  assert not re.search(r"https?:|url\(|@import", text)
  assert sorted(p.name for p in report.glob("*.png")) == [
    "pass_at_k.png",
    "score.png",
    "tasks_by_samples.png",
    "tasks_by_time.png",
  ]


def test_the_page_says_what_was_measured(data):
  text = cells.as_text(page.measured(data), data)
  assert text == (
    "3 folders on the same 5 held-out prompts of 4 tasks in gym, math, 2 "
    "samples of each at temperature 0.6 and top-p 0.95. b is not at its end: "
    "step 5 of 9. "
  )


def test_the_lead_is_a_table_of_the_runs(data):
  """Scores at equal time and at the end, against the first run."""
  found = lead.table(data)
  path = lambda run, one: ("runs", run, "evaluations", one, "summary", "all")
  score = lambda *at: cells.as_text(tables.score(data, path(*at)), data)

  def gain(at, run):
    (test,) = [
      t for t in data["tests"] if t["at"] == at and t["other"]["run"] == run
    ]
    p = test["by_task"]["p_two_sided"]
    return f"{test['difference']:+.4f} p {p:.2g}"

  assert [*found.head] == [
    "run", "start, %", "at equal time, %", f"minus {NASTY}",
    "at the end, %", f"minus {NASTY}",
  ]  # fmt: skip
  rows = [[cells.as_text(cell, data) for cell in row] for row in found.rows]
  # Run b reached 2.19 h; a was evaluated after 2 h, its first step.
  assert rows == [
    [
      NASTY, score(0, 0), f"{score(0, 1)} step 1", "",
      f"{score(0, -1)} step 3", "",
    ],
    [
      "b", score(1, 0), f"{score(1, 2)} step 5",
      gain("equal time", 1), f"{score(1, -1)} step 5", gain("end", 1),
    ],
    ["c", "", "", "", score(2, -1), gain("end", 2)],
  ]  # fmt: skip
  caption = cells.as_text(found.caption, data)
  assert "clustered by task" in caption and "which all runs reached" in caption


def test_the_lead_of_one_run_compares_nothing(tmp_path):
  data = report_command.numbers([read(made.run(tmp_path / "a"), "a")])
  found = lead.table(data)
  assert [*found.head] == ["run", "start, %", "at the end, %"]
  (row,) = found.rows
  assert cells.as_text(row[2], data).endswith("step 3")
  assert "Differences" not in cells.as_text(found.caption, data)


def test_the_lead_says_where_scores_are_the_same(tmp_path):
  """Of each prompt, not only on average: b gains here and loses there."""
  turned = ([1, 1], [0, 0], [0, 1], [1, 1])
  a = made.run(tmp_path / "a")
  same = made.evaluation(tmp_path / "same", passes=made.PASSES[3])
  b = made.evaluation(tmp_path / "b", passes=turned)
  data = report_command.numbers([read(p, p.name) for p in (a, same, b)])
  told = [cells.as_text(row[-1], data) for row in lead.table(data).rows]
  assert told[:2] == ["", "+0.0000 equal for every prompt"]
  assert told[2].startswith("+0.0000 p ")


def test_page_and_tables_say_where_nothing_is_compared(tmp_path):
  """Fast ends after 1.55 h, when slow was evaluated at its start alone."""
  passes = {0: made.PASSES[0], 1: made.PASSES[1], 2: made.PASSES[3]}
  slow = made.run(tmp_path / "slow")
  lines = made.metric_lines(2, step_s=1800.0, samples=9, cpu_s=2700.0)
  fast = made.run(tmp_path / "fast", passes=passes, lines=lines)
  data = report_command.numbers([read(p, p.name) for p in (slow, fast)])
  rows = lead.table(data).rows
  told = [[cells.as_text(cell, data) for cell in row[2:]] for row in rows]
  assert [row[0].split()[0] for row in told] == ["too", told[1][0].split()[0]]
  assert told[1][0].endswith("step 2") and told[1][1] == ""  # and no test
  assert [row[2].split()[-1] for row in told] == ["3", "2"]
  assert told[1][3]
  main = tables.main(data)
  assert [(row[0], row[1]) for row in main.rows] == [
    ("slow, fast", "start"),
    # At 16 of 18 samples it is early too, which has no row of its own.
    ("slow", "before equal time"),
    ("slow", "equal CPU time, end"),
    ("fast", "equal time, equal CPU time, end"),
  ]
  assert cells.as_text(main.caption, data).endswith(
    "Compared are last evaluations by 1.55 h (equal time); 1.5 h of the "
    "processor (equal CPU time); 18 samples (equal samples), which all runs "
    "reached. At equal time slow was last "
    "evaluated after 0 s and is not compared. At equal samples slow was "
    "last evaluated after 16 samples and is not compared."
  )
  at = [row[2] for row in tables.tests(data, 7).rows]
  assert at == [*["equal CPU time"] * 2, *["end"] * 2]


@pytest.mark.parametrize(
  "kind, value, text",
  [
    ("count", 1234567, "1,234,567"), ("count", 0, "0"),
    ("thousands", 2033664, "2,033.7"), ("time", 173.84, "174 h"),
    ("time", 1.0, "1 h"), ("time", 0.010987, "39.6 s"), ("time", 0.5, "30 min"),
    ("time", 12345.6, "12,346 h"), ("time", 0.0, "0 s"),
    ("rate", 72.44, "72.4"), ("rate", 105899.7, "105,900"),
    ("mean", 15760.04, "15,760.0"), ("percent", 0.62084, "62.08"),
    ("percent1", 0.96849, "96.8"), ("decimal", 0.0684, "0.068"),
    ("signed", 0.0033, "+0.0033"), ("signed", -0.0582, "-0.0582"),
    ("t", 4.84, "4.84"), ("p", 6.5e-7, "6.5e-07"), ("p", 0.0, "< 1e-38"),
    ("value", "ppo", "ppo"), ("value", False, "False"), ("t", None, "n/a"),
  ],
)  # fmt: skip
def test_how_numbers_are_written(kind, value, text):
  assert cells.written(cells.Number(("x", 0), kind), {"x": [value]}) == text


def test_cells_and_pointers():
  number = cells.Number(("a/b~", 1), "count")
  data = {"a/b~": [0, 7]}
  assert cells.as_text(["<", number, ">"], data) == "<7>"
  assert cells.as_html(["<", number], data) == (
    '&lt;<span data-path="/a~1b~0/1" data-kind="count">7</span>'
  )


def test_the_text_of_a_table_is_aligned():
  data = {"x": [1, 1234, None]}
  rows = [
    [name, cells.Number(("x", i), "count")] for i, name in enumerate("abc")
  ]
  table = cells.Table("t", "c", ["run", "N"], rows, 1)
  assert cells.text(table, data).splitlines() == [
    "  run      N",
    "  a        1",
    "  b    1,234",
    "  c      n/a",
  ]


def shown(table, data, row):
  """Column -> what a row says."""
  texts = [cells.as_text(cell, data) for cell in table.rows[row]]
  return dict(zip(table.head, texts, strict=True))


def test_each_column_of_the_tables_shows_its_number(data):
  """Run a ends with all but four of ten samples right, in step 3."""
  last = data["runs"][0]["evaluations"][-1]
  gym = last["summary"]["by_domain"]["gym"]
  (row,) = [
    i
    for i, one in enumerate(data["rows"])
    if (one["run"], one["evaluation"]) == (0, 2)
  ]
  interval = lambda s: f"[{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
  everything = last["summary"]["all"]
  assert shown(tables.main(data), data, row) == {
    "run": NASTY,
    "at": "equal CPU time, end",
    "method": "ppo, tokens",
    "N": "4",
    "prompts": "2",
    "steps": "3",
    "samples (k)": "0.0",
    "time": "4.2 h",
    "CPU time": "1.5 h",
    "gym": f"62.50 {interval(gym)}",
    "math": "75.00",  # of each of its tasks there is one prompt
    "all prompts": f"70.00 {interval(everything)}",
  }
  assert gym["low"] < 0.625 < gym["high"]
  assert shown(tables.throughput(data), data, 0) == {
    "run": NASTY, "N": "4", "steps": "2", "pass rate, %": "37.5",
    "samples/s, generation": "0.0178", "samples/s, overall": "0.00404",
    "tokens/s, generation": "0.178", "kept samples/s, overall": "0.00152",
    "generation, % of time": "22.7", "reward std in a group": "0.312",
  }  # fmt: skip
  assert shown(tables.tokens(data, 6), data, 1) == {
    "run": NASTY, "domain": "math", "output tokens": "5.5 → 5.5",
    "pass@1, %": "25.00 → 75.00", "truncated, %": "0.0 → 0.0",
  }  # fmt: skip
  assert shown(tables.tasks(data, "gym", 3), data, row) == {
    "run": NASTY,
    "at": "equal CPU time, end",
    "gcd": "75.00",
    "syllogism": "50.00",
  }
  assert shown(tables.categories(data, 5), data, row) == {
    "run": NASTY,
    "at": "equal CPU time, end",
    "arithmetic": "75.00",
    "logic": "50.00",
  }


def test_each_column_of_the_t_tests_shows_its_number(data):
  at = next(i for i, t in enumerate(data["tests"]) if t["at"] == "end")
  test = data["tests"][at]
  for row, how in ((2 * at, "plain"), (2 * at + 1, "by_task")):
    one = test[how]
    assert shown(tables.tests(data, 7), data, row) == {
      "run": "b", "against": NASTY, "at": "end",
      "errors": {"plain": "plain", "by_task": "clustered by task"}[how],
      "difference": f"{test['difference']:+.4f}",
      "standard error": f"{one['standard_error']:.3f}",
      "d_z": f"{test['effect_size']:.3f}", "n": "5",
      "clusters": {"plain": "5", "by_task": "4"}[how], "t": f"{one['t']:.2f}",
      "p, one-sided": f"{one['p_one_sided']:.2g}",
      "p, two-sided": f"{one['p_two_sided']:.2g}",
    }  # fmt: skip


def test_a_start_that_runs_share_is_no_methods(data):
  shared = [dict(row) for row in data["rows"]]
  first, second, *_ = tables.main(data | {"rows": shared}).rows
  assert first[:5] == [f"{NASTY}, b", "start", "", "", ""]
  assert second[3] == cells.Number(("runs", 0, "n"), "count")


def test_a_table_of_many_tasks_is_turned(data):
  names = [f"a_task_of_some_length_{i}" for i in range(12)]
  task = lambda: {"pass_at_k": {"1": 0.5}}
  many = json.loads(json.dumps(data))
  many["tasks"]["gym"] = names
  for run in many["runs"]:
    for one in run["evaluations"]:
      gym = one["summary"]["by_domain"]["gym"]
      gym["by_task"] = {name: task() for name in names}
  table = tables.tasks(many, "gym", 3)
  assert [row[0] for row in table.rows] == names
  assert len(table.head) == 1 + len(many["rows"])
  plain = tables.tasks(data, "gym", 3)
  assert list(plain.head) == ["run", "at", "gcd", "syllogism"]


# -------------------------------------------------------------------- samples


def rollout(step, i, **changed):
  verdict = ("pass", "fail", "invalid")[i % 3]
  return {
    "step": step, "task": ("gcd", "prime")[i % 2],
    "prompt": f"What is {step} + {i}?", "response": "42", "gold": str(step + i),
    "verdict": verdict, "reason": "" if verdict == "pass" else "wrong answer",
    "reward": 0.25 * i, "tokens": 1000 + i,
  } | changed  # fmt: skip


def with_samples(path, lines, name="a"):
  run = made.run(path / name)
  made.dump(run / "samples.jsonl", lines)
  return run


def section_of(data):
  return Page(samples.section(data))


def test_samples_show_what_was_asked_said_and_judged(tmp_path):
  run = with_samples(tmp_path, [rollout(7, 0), rollout(8, 1, gold=None)])
  data = report_command.numbers([read(run, "a")])
  text = section_of(data).text
  for told in (
    "step 7 a gcd pass What is 7 + 0?", "prompt", "What is 8 + 1?", "response",
    "42", "fail wrong answer", "0.250", "1,001",
  ):  # fmt: skip
    assert told in text
  assert text.count("reference") == 1  # the second has none
  kinds = {
    (path.split("/")[-1], kind) for path, kind, _ in section_of(data).numbers
  }
  assert kinds == {
    ("reward", "decimal"),
    ("tokens", "count"),
    ("step", "count"),
  }


def test_text_of_a_model_is_text_wherever_it_stands(tmp_path):
  ugly = "</dd></script><script>alert(1)</script><b class='verdict'>\"&amp;"
  names = ("prompt", "response", "gold", "reason", "task", "verdict")
  run = with_samples(
    tmp_path, [rollout(1, 0), rollout(1, 1, **dict.fromkeys(names, ugly))]
  )
  data = report_command.numbers([read(run, ugly)])
  out = tmp_path / "out"
  report_command.write(data, out)
  seen = Page((out / "index.html").read_text())
  assert "script" not in seen.tags
  plain = Page(samples.section(data))
  allowed = "section h2 p form label select option details summary span b dl dt"
  assert {*plain.tags} <= {*allowed.split(), "dd"}
  assert plain.text.count(ugly) >= len(names)
  assert ugly not in samples.style(data) and "script" not in samples.style(data)
  assert len([t for t in plain.tags if t == "b"]) == 2  # one for each sample


def test_filters_hide_what_was_not_chosen(tmp_path):
  """What all samples have in common is no filter."""
  lines = [rollout(step, i) for step in (1, 2) for i in range(3)]
  run = with_samples(tmp_path, lines)
  other = with_samples(tmp_path, [rollout(5, 0)], "b")
  data = report_command.numbers([read(run, "a"), read(other, "b")])
  seen = section_of(data)
  assert seen.tags.count("select") == 4
  values = [
    v for tag, name, v in seen.attributes if (tag, name) == ("option", "value")
  ]
  assert [v for v in values if v] == [
    "run-0", "run-1", "step-0", "step-1", "step-2", "task-0", "task-1",
    "verdict-0", "verdict-1", "verdict-2",
  ]  # fmt: skip
  style = samples.style(data)
  for value in filter(None, values):
    rule = (
      f'#samples:has(option[value="{value}"]:checked) .sample:not(.{value}) '
      "{ display: none; }"
    )
    assert rule in style
  kinds = [
    set(v.split()) - {"sample", "pass", "fail", "invalid"}
    for tag, name, v in seen.attributes
    if (tag, name) == ("details", "class")
  ]
  # Verdicts in the order of their names: fail, invalid, pass.
  assert kinds[0] == {"run-0", "step-0", "task-0", "verdict-2"}
  assert kinds[1] == {"run-0", "step-0", "task-1", "verdict-0"}
  assert kinds[-1] == {"run-1", "step-2", "task-0", "verdict-2"}
  assert all(sum(value in k for k in kinds) for value in filter(None, values))
  one = with_samples(tmp_path, [rollout(1, 0), rollout(2, 0)], "c")
  alike = report_command.numbers([read(one, "c")])
  assert section_of(alike).tags.count("select") == 1  # the step


def test_the_newest_samples_are_shown_and_long_ones_are_cut(tmp_path):
  lines = [rollout(step, 0) for step in range(1, 400)]
  lines[-1]["response"] = "x" * 7000
  run = with_samples(tmp_path, lines)
  other = with_samples(tmp_path, lines[:150], "b")
  data = report_command.numbers([read(run, "a"), read(other, "b")])
  steps = [
    [s["step"] for s in data["samples"] if s["run"] == i] for i in (0, 1)
  ]
  assert steps == [[*range(300, 400)], [*range(51, 151)]]
  section = samples.section(data)
  assert "[1,000 more characters]" in section and "x" * 6001 not in section
  assert len(section) < 400_000


def test_a_run_without_samples_has_no_section(data):
  assert data["samples"] == [] and samples.section(data) == ""


@pytest.mark.parametrize(
  "changed", [{"step": "1"}, {"prompt": None}, {"reward": None}]
)
def test_samples_that_cannot_be_read_are_refused(tmp_path, changed):
  run = with_samples(tmp_path, [rollout(1, 0), rollout(2, 0) | changed])
  with pytest.raises(UserError, match=r"samples\.jsonl, line 2") as e:
    read(run, "a")
  assert f"{next(iter(changed))!r} is missing or not" in str(e.value)


# -------------------------------------------------------------------- figures


@pytest.fixture
def drawn(data, tmp_path, monkeypatch):
  """Figures by their file, before they are thrown away."""
  out = {}
  save = figures.save
  monkeypatch.setattr(
    figures,
    "save",
    lambda figure, path: (out.update({path.name: figure}), save(figure, path)),
  )
  figures.draw(tmp_path, data)
  return out, tmp_path


@pytest.mark.ci
def test_figure_1_shows_scores_and_intervals(drawn, data):
  out, _ = drawn
  axes = out["score.png"].axes
  assert [axis.get_title() for axis in axes] == ["gym", "math"]
  for axis, domain in zip(axes, data["domains"], strict=True):
    of = lambda e: e["summary"]["by_domain"][domain]
    for line, run in zip(axis.lines, data["runs"], strict=True):
      y = [100 * of(e)["pass_at_k"]["1"] for e in run["evaluations"]]
      if run["training"]:
        np.testing.assert_allclose(line.get_ydata(), y)
        x = [e["net_hours"] for e in run["evaluations"]]
        np.testing.assert_allclose(line.get_xdata(), x)
      else:
        assert line.get_ydata() == y * 2  # from side to side
    for band, run in zip(axis.collections, data["runs"], strict=False):
      box = band.get_datalim(axis.transData)
      if domain == "math":  # no task of it has two prompts
        assert not np.isfinite([box.y0, box.y1]).any()
        continue
      low = min(100 * of(e)["low"] for e in run["evaluations"])
      high = max(100 * of(e)["high"] for e in run["evaluations"])
      assert (box.y0, box.y1) == pytest.approx((low, high))


@pytest.mark.ci
def test_figure_4_ends_where_all_runs_reached(drawn, data):
  """With the numbers of the tables; an evaluation has no trajectory."""
  out, _ = drawn
  for name, key, scale in (
    ("tasks_by_time.png", "net_hours", 1.0),
    ("tasks_by_samples.png", "samples", 1e-3),
  ):
    (one,) = [c for c in data["comparisons"] if c["key"] == key]
    reach = one["reach"] * scale
    titles = [axis.get_title() for axis in out[name].axes]
    assert titles == ["gcd", "syllogism", "aime", r"a/b~<i>\$x\$.c"]
    for axis, panel in zip(out[name].axes, data["panels"], strict=True):
      low, high = axis.get_xlim()
      assert low < 0 and reach < high < 1.05 * reach
      for line, which in zip(axis.lines, one["chosen"], strict=True):
        e = data["runs"][which["run"]]["evaluations"][which["evaluation"]]
        domain = e["summary"]["by_domain"][panel["domain"]]
        score = domain["by_task"][panel["task"]]["pass_at_k"]["1"]
        assert line.get_ydata()[-1] == pytest.approx(100 * score)
        assert len(line.get_ydata()) == which["evaluation"] + 1
  # Run b reached 2.19 h; a had .5 of gcd after 2 h, and .75 only after 4.2.
  line = out["tasks_by_time.png"].axes[0].lines[0]
  assert line.get_xdata() == pytest.approx([0, 2])
  assert line.get_ydata() == pytest.approx([25, 50])


@pytest.mark.ci
def test_pass_at_k_is_that_of_the_last_evaluation(drawn, data):
  out, _ = drawn
  for axis, domain in zip(
    out["pass_at_k.png"].axes, data["domains"], strict=True
  ):
    for line, run in zip(axis.lines, data["runs"], strict=True):
      s = run["evaluations"][-1]["summary"]["by_domain"][domain]["pass_at_k"]
      np.testing.assert_array_equal(line.get_xdata(), [1, 2])
      np.testing.assert_allclose(line.get_ydata(), [100 * s["1"], 100 * s["2"]])


@pytest.mark.ci
def test_runs_that_lie_on_each_other_are_all_seen(tmp_path):
  """Pixels in the colour of each of four, in the panels."""
  runs = [made.run(tmp_path / name) for name in "abcd"]
  data = report_command.numbers([read(path, path.name) for path in runs])
  report_command.write(data, tmp_path / "out")
  for path in (tmp_path / "out").glob("*.png"):
    image = plt.imread(path)[..., :3]
    panels = image[: int(0.85 * len(image))]
    for i in range(4):
      off = np.abs(panels - to_rgb(f"C{i}")).max(axis=2)
      assert (off < 0.02).sum() > 100, (path.name, i)


@pytest.mark.ci
def test_the_figures_are_legible(drawn):
  """As wide as the page, no label below 9 points, none outside."""
  out, folder = drawn
  assert f"max-width: {figures.WIDTH * 96:.0f}px" in page._CSS  # of the body
  for name, figure in out.items():
    assert figure.get_figwidth() == figures.WIDTH
    with plt.rc_context(figures.STYLE):
      figure.canvas.draw()
    texts = [t for t in figure.findobj(plt.Text) if t.get_text()]
    assert texts and min(t.get_fontsize() for t in texts) >= 9
    box = figure.bbox
    for legend in figure.legends:
      extent = legend.get_window_extent()
      assert extent.x0 >= box.x0 and extent.x1 <= box.x1, name
    image = plt.imread(folder / name)
    assert image.shape[1] == figures.WIDTH * 144
    assert image[..., :3].std() > 0.05  # not blank


@pytest.mark.ci
def test_no_figure_stays_in_memory(data, tmp_path):
  before = plt.get_fignums()
  figures.draw(tmp_path, data)
  assert plt.get_fignums() == before
