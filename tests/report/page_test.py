"""Tests of the page: it has the numbers of the JSON, and needs nothing else."""

import html.parser
import json
import re

import pytest
import runs_for_tests as made

from brorl_jax.main import report as report_command
from brorl_jax.report import compare, load_runs, page

NASTY = '</dd></script><script>alert("&amp;")</script>'
PROMPTS = {**made.PROMPTS, "<b>1": ("math", "a/b~<i>$x$.c")}
PASSES = {step: (*rows, [step % 2, 1]) for step, rows in made.PASSES.items()}


def metric_lines(count, **more):
  """Lines with all curves; the entropy of the second step is missing."""
  lines = made.metric_lines(count, **more)
  for line in lines:
    k = line["step"]
    line |= {"reward/mean": k / 8, "policy/entropy": None if k == 2 else 1 / k}
    line |= {"rollout/length_mean": 10.0 * k, "policy/kl_ref": k / 1000}
    line |= {"sampling/missed": 0.25}
  return lines


def responses(records, text):
  for r in records:
    if r["sample"] == 0:
      r |= {"prompt": f"Is {r['id']} right?", "response": f"{text} {r['id']}"}
  return records


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  make = lambda name, **more: made.run(folder / name, prompts=PROMPTS, **more)
  a = make("a", passes=PASSES, lines=metric_lines(3))
  every = [(0, PASSES[0], "before"), (1, PASSES[1], "-"), (3, PASSES[3], NASTY)]
  records = [responses(made.records(k, p, PROMPTS), t) for k, p, t in every]
  made.dump(a / "eval" / "records.jsonl", [r for some in records for r in some])
  event = {"time": "2026-11-25T08:58:01.927Z", "event": NASTY, "why": NASTY}
  made.dump(a / "events.jsonl", [{"step": 2, **event}, {"step": 3, **event}])
  made.dump(a / "samples.jsonl", [sample(1, 0), sample(2, 1)])
  lines = metric_lines(5, step_s=1234.5, samples=12_345)
  visit = lambda i, step, n: {"id": f"q{i}", "step": step, "right": n}
  visits = [visit(0, 1, 9), visit(0, 2, 1), visit(1, 2, 0), visit(2, 2, 16)]
  made.dump(a / "visits.jsonl", [one | {"drawn": 16} for one in visits])
  better = {0: PASSES[0], 2: PASSES[3], 5: ([1, 1],) * 5}
  make("b", passes=better, lines=lines, n=2, steps=9, advantage=NASTY)
  made.evaluation(folder / "c", passes=PASSES[1], prompts=PROMPTS)
  names = {"a": NASTY, "b": "b", "c": "c"}
  runs = [load_runs.read(folder / x, name) for x, name in names.items()]
  report_command.publish(runs, folder)
  out = folder / "report"
  return out


def sample(step, i, **changed):
  verdict = ("pass", "fail", "invalid")[i % 3]
  return {"step": step, "task": ("gcd", "prime")[i % 2],
    "prompt": f"What is {step} + {i}?", "response": "42", "gold": str(step + i),
    "verdict": verdict, "reason": "" if verdict == "pass" else "wrong answer",
    "reward": 0.25 * i, "tokens": 1000 + i} | changed  # fmt: skip


@pytest.fixture(scope="module")
def data(report):
  return json.loads((report / "report.json").read_text())


class Page(html.parser.HTMLParser):
  """Tables and curves by title, and everything that is said."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.ids, self.links, self.plots = [], [], [], []
    self.tables, self.curves = {}, {}
    self.text, self._tag, self._title, self._heading = "", "", "", ""
    self._row = None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    at = dict(attrs)
    self._tag = tag
    self.tags.append(tag)
    self.ids += [at["id"]] if "id" in at else []
    self.links += [v for name, v in attrs if name in ("src", "href", "action")]
    if tag in ("h2", "title"):
      self._title = ""
    if at.get("role") == "img":
      self.plots.append(at)
    if "data-points" in at:
      lines = self.curves.setdefault(self._title, {})
      lines[at["data-name"]] = json.loads(at["data-points"])
    if tag == "tr":
      self._row = []
      self.tables.setdefault(self._heading, []).append(self._row)
    if tag in ("td", "th"):
      self._row.append("")

  def handle_endtag(self, tag):
    self._heading = self._title if tag == "h2" else self._heading
    self._tag = ""
    self._row = None if tag == "tr" else self._row

  def handle_data(self, text):
    if self._tag in ("style", "script"):
      return
    self._title += text if self._tag in ("h2", "title") else ""
    if self._row:
      self._row[-1] += text
    self.text += text


@pytest.fixture(scope="module")
def parsed(report):
  return Page((report / "index.html").read_text())


def rows(page, title):
  return [[cell.strip() for cell in row] for row in page.tables[title][1:]]


def test_the_first_table_has_the_numbers_of_the_arms(parsed, data):
  def cells(arm, at):
    got = arm["at"][at]
    if got is None:
      return ["", "", ""]
    after = f"{100 * got['after']:.1f}"
    after += f"\n[{100 * got['low']:.1f}, {100 * got['high']:.1f}]"
    after += "" if got["step"] is None else f"\nstep {got['step']:.0f}"
    gain = ""
    if got["gains"]:
      gain = f"{100 * got['gains'][0]:+.1f} ± {100 * got['gain_half']:.1f}"
    against = ""
    if test := got["against"]:
      p = test["by_task"]["p_two_sided"]
      against = f"{100 * test['difference']:+.1f}\np {p:.2g}"
    return [after, gain, against]

  names = [NASTY, "b", "c"]
  before = ["20.0", "20.0", ""]
  assert rows(parsed, "Result") == [
    [name, "1", start, *cells(arm, "end"), *cells(arm, "equal time")]
    for name, start, arm in zip(names, before, data["arms"], strict=True)
  ]


def test_each_row_of_the_cost_table_has_its_numbers(parsed, data):
  def score(s):
    text = f"{100 * s['pass_at_k']['1']:.2f}"
    if s["low"] is not None:
      text += f"\n[{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
    return text

  shown = rows(parsed, "Cost and score of each run")
  assert len(shown) == len(data["rows"])
  for row, cells in zip(data["rows"], shown, strict=True):
    e = data["runs"][row["run"]]["evaluations"][row["evaluation"]]
    s = e["summary"]
    assert cells[:2] == [data["runs"][row["run"]]["name"], ", ".join(row["at"])]
    domains = [score(s["by_domain"][d]) for d in ("gym", "math")]
    assert cells[9:] == [*domains, score(s["all"])]
  assert shown[0][2:9] == ["ppo, tokens", "4", "2", "0", "0", "0 s", "0 s"]
  assert [cells[2:9] for cells in shown if cells[1].endswith("end")] == [
    ["ppo, tokens", "4", "2", "3", "48", "4.2 h", "1.5 h"],
    [f"ppo, {NASTY}", "2", "4", "5", "61,725", "2.19 h", "2.5 h"],
  ]
  assert shown[-1][1:9] == [
    "evaluation", "evaluated: n512, step 60", *["n/a"] * 6
  ]  # fmt: skip


def test_each_row_of_the_other_tables_has_its_numbers(parsed, data):
  assert rows(parsed, "Throughput and dynamic sampling")[0] == [
    NASTY, "4", "2", "37.5", "0.0178", "0.00404", "0.178", "0.00152", "22.7",
    "0.312",
  ]  # fmt: skip
  # Of three prompts the visits had 9 and then 1, 0 and 16 right of 16.
  (which,) = rows(parsed, "Which N")
  assert which[:8] == [NASTY, "tokens", "3", "1", "1", "0", "16", "any"]
  assert which[8] == "N hardly protects prompts; maxrl would, with N above 16"
  assert rows(parsed, "Output tokens, before and after")[1] == [
    NASTY, "math", "5.5 → 5.5", "25.00 → 75.00", "0.0 → 0.0"
  ]  # fmt: skip
  runs = data["runs"]
  at = [runs[r["run"]]["evaluations"][r["evaluation"]] for r in data["rows"]]
  for domain in data["domains"]:
    assert rows(parsed, f"Tasks of the domain {domain}") == [
      [
        task,
        *(
          f"{100 * s['by_task'][task]['pass_at_k']['1']:.2f}"
          for s in (e["summary"]["by_domain"][domain] for e in at)
        ),
      ]
      for task in data["tasks"][domain]
    ]
  assert rows(parsed, "Fields in which the training runs differ") == [
    [d["field"], *map(str, d["values"])] for d in data["differences"]
  ]
  assert rows(parsed, "Events") == [
    [*(NASTY, NASTY, NASTY, step), "2026-11-25 08:58:01"] for step in "23"
  ]


def test_each_row_of_the_t_tests_has_its_numbers(parsed, data):
  p = lambda x: "n/a" if x is None else f"{x:.2g}"
  tests = [(name, at, result["against"])
    for name, arm in zip("bc", data["arms"][1:], strict=True) for at,
    result in arm["at"].items() if result and result["against"]]  # fmt: skip
  assert [(name, at) for name, at, _ in tests] == [
    *(("b", "equal time"), ("b", "end"), ("c", "end"))
  ]
  assert rows(parsed, "Paired t-tests against the first row of the result") == [
    [
      *(name, at, words),
      *(f"{t['difference']:+.4f}", f"{t[how]['standard_error']:.3g}"),
      *(f"{t['effect_size']:.3g}", str(t["n"]), str(t[how]["clusters"])),
      *(f"{t[how]['t']:.3g}", p(t[how]["p_one_sided"])),
      p(t[how]["p_two_sided"]),
    ]
    for name, at, t in tests
    for how, words in (("plain", "plain"), ("by_task", "clustered by task"))
  ]


def told(parsed, title, name):
  return [tuple(x[2:]) for x in parsed.curves[title][name]]


def test_points_of_the_curves_are_read_off(parsed, data):
  scores = "Held-out pass@1, %, by step"
  assert told(parsed, scores, NASTY) == [
    ("step 0", "20"), ("step 1", "40"), ("step 3", "70")
  ]  # fmt: skip
  by_time = told(parsed, "Held-out pass@1, %, by CPU time, h", NASTY)
  assert by_time == [
    (f"CPU time, h {x}", y) for x, y in ((0, "20"), (0.5, "40"), (1.5, "70"))
  ]
  # A policy that was only evaluated is a line from side to side.
  assert told(parsed, scores, "c") == [("step 0", "40"), ("step 5", "40")]
  marks = [("step 2", NASTY), ("step 3", NASTY)]
  for title, values in {
    "Reward of training prompts, mean": ["0.125", "0.25", "0.375"],
    "Kept prompts, %": ["50", "25", "50"],
    "Prompts with a right answer, %": ["75", "75", "75"],
    "Length of responses, tokens": ["10", "20", "30"],
    "KL to the reference, nats per token": ["0.001", "0.002", "0.003"],
  }.items():
    want = [(f"step {i}", x) for i, x in enumerate(values, 1)]
    assert told(parsed, f"{title}, by step", NASTY) == [*want, *marks]
  entropy = told(parsed, "Entropy, nats per token, by step", NASTY)
  assert entropy[:2] == [("step 1", "1"), ("step 3", "0.333")]
  assert told(parsed, "math, %, by k", "c") == [("k 1", "50"), ("k 2", "50")]
  assert [*parsed.curves["math, %, by k"]] == [NASTY, "b", "c"]
  assert told(parsed, "math, %, by step", "b")[-1] == ("step 5", "100")
  assert {"gym, %, by step", "math, %, by CPU time, h"} <= {*parsed.curves}


def test_the_head_says_what_was_gained_and_what_it_cost(parsed):
  said = " ".join(parsed.text.split())
  assert "20.0 → 70.0 %" in said and "gain +50.0 ± " in said
  assert "3 steps, 48 rollouts, 1.5 h of CPU time, 4.2 h in all" in said
  assert "b is not at its end: step 5 of 9." in said
  assert ("5 held-out prompts of 4 tasks in gym, math, 2 samples of each at "
    "temperature 0.6, top-p 0.95." in said)  # fmt: skip


def test_the_caption_says_where_runs_are_compared(parsed):
  said = " ".join(parsed.text.split())
  assert "1.5 h (equal CPU time); 48 samples (equal samples)" in said
  early = "At equal samples not compared, because last evaluated before 90 %"
  assert f"{early} of it: b." in said


def test_controls_and_marks_of_direction_are_seen():
  text = page.document(title="\0\x1b[1m\u202e\ud800", notes=["a\tb\u3000c\n"])
  assert r"\x00\x1b[1m\u202e\ud800" in text and "a\tb\u3000c\n" in text


def test_what_comes_from_runs_is_text(parsed, report):
  text = (report / "index.html").read_text()
  assert NASTY not in text and text.count("<script") == 1
  assert {"i", "link", "iframe", "object"}.isdisjoint(parsed.tags)
  assert "a/b~<i>$x$.c" in parsed.text
  # Name, method, event, response.
  assert parsed.text.count(NASTY) > 20


def test_the_page_needs_no_network(parsed, report):
  text = (report / "index.html").read_text()
  assert parsed.links == []
  assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|import\(", text)
  assert {p.name for p in report.iterdir()} == {"index.html", "report.json"}


def test_each_plot_has_a_text_for_those_who_do_not_see_it(parsed, report):
  assert len(parsed.ids) == len({*parsed.ids})
  assert len(parsed.plots) == len(parsed.curves) > 15
  for at in parsed.plots:
    assert at["role"] == "img"
    assert {*at["aria-labelledby"].split()} <= {*parsed.ids}
  assert "b: from 20 to 100. " in parsed.text
  text = (report / "index.html").read_text()
  assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_responses_are_shown_with_their_verdicts(parsed):
  said = " ".join(parsed.text.split())
  first = "gcd/heldout/0"
  assert f"fail → pass Is {first} right?" in said
  assert f"before fail before {first}reason wrong answer" in said
  assert f"after pass {' '.join(NASTY.split())} {first}" in said
  assert "step 2 " in said and "prime fail What is 2 + 1?" in said
  assert "reference 3reason wrong answer reward0.250tokens1,001" in said


def page_of(*folders):
  data = compare.numbers([load_runs.read(x, x.name) for x in folders])
  return data, Page(page.page(data))


def test_a_run_whose_rewards_are_all_zero_says_so(tmp_path):
  lines = metric_lines(3)
  for line in lines:
    line |= {"reward/mean": 0.0, "sampling/pass_rate": 0.0}
    line |= {"policy/entropy": None, "sampling/missed": 1.0}
  none = {step: ([0, 0],) * 4 for step in (0, 3)}
  _, parsed = page_of(made.run(tmp_path / "a", passes=none, lines=lines))
  said = " ".join(parsed.text.split())
  assert "a: the mean reward was 0 in every step." in said
  assert "0.0 → 0.0 %" in said and "gain +0.0 ± 0.0 points" in said
  assert "nan" not in said.lower()
  title = "Prompts with a right answer, %, by step"
  assert [x[3] for x in parsed.curves[title]["a"]] == ["0", "0", "0"]
  assert not any("Entropy" in title for title in parsed.curves)


def test_a_run_with_one_prompt_and_no_step(tmp_path):
  prompts = {"aime/7": ("math", "aime")}
  run = made.run(tmp_path / "a", prompts=prompts, passes={0: [[0, 1]]})
  (run / "metrics.jsonl").write_text("")
  data, parsed = page_of(run)
  assert data["runs"][0]["throughput"] is None
  # Measured once: there is no gain, and no interval of it.
  (row,) = rows(parsed, "Result")
  assert row[3] == "50.0\nstep 0" and not row[2].strip(" n/a")
  assert not row[4] and "gain" not in parsed.text.split("Result")[0]
  assert "Events" not in parsed.tables and "Paired" not in str(parsed.tables)
  assert {x.split(",")[0] for x in parsed.curves} == {"Held-out pass@1", "math"}


def test_evaluations_alone_have_no_curves_by_step(tmp_path):
  _, parsed = page_of(made.evaluation(tmp_path / "a"))
  assert {*parsed.curves} == {"gym, %, by k", "math, %, by k"}
  assert rows(parsed, "Result") == [["a", "1", "", "62.5\n[50.0, 75.0]", ""]]


def test_several_seeds_are_one_row_and_one_colour(tmp_path):
  other = {**made.PASSES, 3: ([1, 1],) * 4}
  a = made.run(tmp_path / "a")
  b = made.run(tmp_path / "b", passes=other, seed=1)
  data, parsed = page_of(a, made.run(tmp_path / "c", n=2), b)
  first, second = rows(parsed, "Result")
  assert first[:4] == ["a, b", "2", "12.5", "81.2\n[62.5, 100.0]\nstep 3"]
  assert second[0] == "c" and second[5] == "+0.0\nequal for every prompt"
  assert "mean of 2 seeds: +50.0, +87.5" in " ".join(parsed.text.split())
  assert page.styles(data) == ["c0 d0", "c1 d1", "c0 d1"]


def test_a_short_run_has_seconds(tmp_path):
  run = made.run(tmp_path / "a", lines=metric_lines(3, cpu_s=2.0))
  _, parsed = page_of(run)
  for title in ("Held-out pass@1, %", "Reward of training prompts, mean"):
    points = told(parsed, f"{title}, by CPU time, s", "a")
    assert points[-1][0] == "CPU time, s 6"


def test_where_nothing_is_compared_it_says_so(tmp_path):
  passes = {0: made.PASSES[0], 1: made.PASSES[1], 2: made.PASSES[3]}
  slow = made.run(tmp_path / "slow")
  lines = made.metric_lines(2, step_s=1800.0, samples=9, cpu_s=2700.0)
  fast = made.run(tmp_path / "fast", passes=passes, lines=lines)
  _, parsed = page_of(slow, fast)
  assert rows(parsed, "Result")[0][6] == "too early"
  assert [row[8] for row in rows(parsed, "Result")] == ["", ""]


def test_the_newest_samples_are_shown_and_long_ones_are_cut(tmp_path):
  lines = [sample(step, 0) for step in range(1, 400)]
  lines[-1]["response"] = "x" * 7000
  runs = [made.run(tmp_path / name, n=i + 2) for i, name in enumerate("ab")]
  for run, count in zip(runs, (399, 150), strict=True):
    made.dump(run / "samples.jsonl", lines[-count:])
  data, parsed = page_of(*runs)
  at = [[s["step"] for s in data["samples"] if s["run"] == i] for i in (0, 1)]
  assert at == [[*range(300, 400)]] * 2
  assert "[1,000 more characters]" in parsed.text
  assert "x" * 6001 not in parsed.text


@pytest.mark.parametrize("write, value, text", [
  (page.number, 1234567, "1,234,567"), (page.number, None, "n/a"),
  (page.percent, 0.96849, "96.8"), (page.short, 72.44, "72.4"),
  (page.short, 105899.7, "105,900"), (page.short, 0.0, "0"),
  (page.duration, 173.84, "174 h"), (page.duration, 1.0, "1 h"),
  (page.duration, 0.010987, "39.6 s"), (page.duration, 0.5, "30 min"),
])  # fmt: skip
def test_how_numbers_are_written(write, value, text):
  assert write(value) == text


def test_marks_are_the_first_40_steps_with_events(tmp_path):
  """Two events of a step are one mark; a start and an end are none."""
  first = {0: made.PASSES[0]}
  run = made.run(tmp_path / "a", passes=first, lines=metric_lines(50))
  event = lambda step, kind: {"step": step, "time": "-", "event": kind}
  kinds = ("warning", "warning", "reset", "end")
  every = [event(i, kind) for i in range(1, 51) for kind in kinds]
  made.dump(run / "events.jsonl", [event(0, "start"), *every])
  _, parsed = page_of(run)
  shown = told(parsed, "Kept prompts, %, by step", "a")
  assert shown[50:] == [(f"step {i}", "warning, reset") for i in range(1, 41)]


def test_where_points_lie():
  """Left and right ends are 48 and 350, zero is at 176."""
  line = page.Line("a", "", [(0, 0), (5, 50), (10, 100)], band=[(0, 0, 106)])
  out = page.drawing(page.Plot("t", "step", "%", [line]))
  (one,) = out["lines"]
  assert one["dots"][0] == (48, 176) and one["dots"][1][0] == 199
  assert one["dots"][2][0] == 350
  # 6 % of the range is room above the largest, which is that of the band.
  assert one["dots"][1][1] == pytest.approx(176 - 162 * 50 / 112.36, abs=0.06)
  assert [label for _, label in out["x"]] == ["0", "2", "4", "6", "8", "10"]
  assert [label for _, label in out["y"]] == ["0", "50", "100"]


def test_values_below_zero_and_powers_of_two_have_room():
  line = page.Line("a", "", [(1, -1.0), (2, 0.0), (8, 1.0)])
  out = page.drawing(page.Plot("t", "k", "%", [line], log2=True))
  assert [(at, label) for at, label in out["x"]] == [
    (48.0, "1"), (148.7, "2"), (249.3, "4"), (350.0, "8")
  ]  # fmt: skip
  ys = [y for _, y in out["lines"][0]["dots"]]
  assert 14 < ys[2] < ys[1] == 95 < ys[0] < 176


@pytest.mark.parametrize("count", [1, 2, 300, 301, 3000])
def test_long_lines_are_thinned_and_end_where_they_end(count):
  line = page.Line("a", "", [(i, i) for i in range(count)], dots=False)
  points = json.loads(
    page.drawing(page.Plot("t", "step", "%", [line]))["lines"][0]["points"]
  )
  assert len(points) == count if count <= 300 else 150 <= len(points) <= 301
  assert points[0][2] == "step 0" and points[-1][3] == page.short(count - 1)
