"""Tests of the page, its tables and its figures."""

import html.parser
import json
import re
import shutil
import subprocess

import matplotlib.pyplot as plt
import numpy as np
import pytest
import runs_for_tests as made
from matplotlib.colors import to_rgb

from brorl_jax.main import reading, reporting
from brorl_jax.report import cells, figures, page, tables

BROWSER = next(
  filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None
)
NASTY = '<script>alert("&")</script>'
PROMPTS = {
  **made.PROMPTS,
  "<b>1": ("math", "a/b~<i>$x$.c"),
}
PASSES = {step: (*rows, [step % 2, 1]) for step, rows in made.PASSES.items()}


def read(path, name):
  return reading.read(reading.look(path), name, lambda step: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  """A report of two runs and an evaluation, with names to be careful with."""
  folder = tmp_path_factory.mktemp("runs")
  make = lambda name, **more: made.run(folder / name, prompts=PROMPTS, **more)
  make("a", passes=PASSES)
  lines = made.metric_lines(5, step_s=1234.5, samples=12_345, cpu_s=None)
  better = {0: PASSES[0], 2: PASSES[3], 5: ([1, 1],) * 5}
  make("b", passes=better, lines=lines, n=2, steps=9, credit=NASTY)
  last = made.evaluation(folder / "c", passes=PASSES[1], prompts=PROMPTS)
  runs = [read(folder / "a", NASTY), read(folder / "b", "b"), read(last, "c")]
  out = folder / "report"
  data = reporting.numbers(runs)
  reporting.write(data, out)
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


FACTORS = {"percent": 100, "percent1": 100, "thousands": 1e-3}


def test_every_number_of_the_page_is_that_of_the_json(parsed, data):
  kinds = set()
  for pointer, kind, text in parsed.numbers:
    value = found(pointer, data)
    kinds.add(kind)
    if value is None:
      assert text == "n/a", pointer
    elif kind == "value":
      assert text == str(value)
    elif text.startswith("<"):
      assert (kind, value) == ("p", 0.0)
    else:
      shown = text.replace(",", "")
      mantissa = shown.partition("e")[0]
      decimals = len(mantissa.partition(".")[2])
      exponent = int(shown.partition("e")[2] or 0)
      rounding = 0.5 * 10.0 ** (exponent - decimals)
      if kind in ("hours", "rate", "p") and "." not in shown:
        rounding = max(rounding, 0.5)
      expected = value * FACTORS.get(kind, 1)
      slack = rounding * 1.000001
      assert float(shown) == pytest.approx(expected, abs=slack), pointer
      if kind in ("count", "mean", "percent", "percent1", "decimal", "signed"):
        digits = {"mean": 1, "percent": 2, "percent1": 1, "decimal": 3}
        assert decimals == digits.get(kind, 4 if kind == "signed" else 0)
  assert kinds == cells._KINDS.keys()
  assert len(parsed.numbers) > 150


def test_no_cell_has_a_number_of_its_own(parsed):
  """What is left of a cell of numbers is brackets and arrows."""
  rest = {text for kind, text in parsed.cells if kind == "number"}
  assert rest <= {"", "[, ]", " → "}


def test_the_tables_of_the_paper_are_there(parsed):
  titles = re.findall(r"Table \d\. [^\n]+", parsed.text)
  assert titles == [
    "Table 1. Cost and score of each run",
    "Table 2. Throughput and dynamic sampling",
    "Table 3. Tasks of the domain gym",
    "Table 4. Tasks of the domain math",
    "Table 5. Puzzles by category",
    "Table 6. Output tokens and score, before and after",
    "Table 7. Paired t-tests",
    "Table 8. Fields in which the training runs differ",
  ]


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


def test_the_summary_says_who_leads_and_what_the_test_says(data):
  text = cells.as_text(page.summary(data), data)
  assert text.startswith(
    "3 folders on the same 5 held-out prompts of 4 tasks in gym, math, 2 "
    "samples of each at temperature 0.6 and top-p 0.95. b is not at its end: "
    "step 5 of 9. At equal time, "
  )
  ends = [run["evaluations"][-1]["step"] for run in data["runs"]]
  assert ends == [3, 5, None]  # not the same, so that they are told
  told = [f"{NASTY} after step 3", "b after step 5"]
  assert (
    f"At the last evaluations ({', '.join(told)}), b leads in gym with 100.00 "
    "%, b leads in math with 100.00 %. "
  ) in text
  tests = {t["other"]["run"]: t for t in data["tests"] if t["at"] == "end"}
  said = []
  for name, i in (("b", 1), ("c", 2)):
    p, gain = tests[i]["by_task"]["p_two_sided"], tests[i]["difference"]
    verdict = "significant" if p < 0.05 else "not significant"
    said.append(f"{name} {gain:+.4f} (p {p:.2g}, {verdict} at 5 %)")
  assert text.endswith(
    f"Minus {NASTY}, paired over prompts, clustered by task, two-sided: "
    f"{'; '.join(said)}. "
  )


def test_the_summary_says_where_scores_are_the_same(tmp_path):
  """Of each prompt, not only on average: b gains here and loses there."""
  turned = ([1, 1], [0, 0], [0, 1], [1, 1])
  a = made.run(tmp_path / "a")
  same = made.evaluation(tmp_path / "same", passes=made.PASSES[3])
  b = made.evaluation(tmp_path / "b", passes=turned)
  data = reporting.numbers([read(p, p.name) for p in (a, same, b)])
  text = cells.as_text(page.summary(data), data)
  assert "two-sided: same +0.0000 (the same score of every prompt); b " in text
  assert text.count("of every prompt") == 1


def test_page_and_tables_say_where_nothing_is_compared(tmp_path):
  """Fast ends after 1.55 h, when slow was evaluated at its start alone."""
  passes = {0: made.PASSES[0], 1: made.PASSES[1], 2: made.PASSES[3]}
  slow = made.run(tmp_path / "slow")
  lines = made.metric_lines(2, step_s=1800.0, samples=9, cpu_s=None)
  fast = made.run(tmp_path / "fast", passes=passes, lines=lines)
  data = reporting.numbers([read(p, p.name) for p in (slow, fast)])
  text = cells.as_text(page.summary(data), data)
  assert (
    "At equal time nothing is ranked: slow was last evaluated after 0 hours. "
    "At the last evaluations (slow after step 3, fast after step 2), "
  ) in text
  assert text.count("Minus") == 1 and "At equal time, " not in text
  main = tables.main(data)
  assert [(row[0], row[1]) for row in main.rows] == [
    ("slow, fast", "start"),
    # At 16 of 18 samples it is early too, which has no row of its own.
    ("slow", "before equal time"),
    ("slow", "end"),
    ("fast", "equal time, end"),
  ]
  assert cells.as_text(main.caption, data).endswith(
    "Compared are last evaluations by 1.55 hours (equal time); 18 samples "
    "(equal samples), which all runs reached. At equal time slow was last "
    "evaluated after 0 hours and is not compared. At equal samples slow was "
    "last evaluated after 16 samples and is not compared."
  )
  assert [row[2] for row in tables.tests(data, 7).rows] == ["end", "end"]


@pytest.mark.parametrize(
  "kind, value, text",
  [
    ("count", 1234567, "1,234,567"),
    ("count", 0, "0"),
    ("thousands", 2033664, "2,033.7"),
    ("hours", 173.84, "174"),
    ("hours", 0.010987, "0.011"),
    ("hours", 12345.6, "12,346"),
    ("rate", 72.44, "72.4"),
    ("rate", 105899.7, "105,900"),
    ("mean", 15760.04, "15,760.0"),
    ("percent", 0.62084, "62.08"),
    ("percent1", 0.96849, "96.8"),
    ("decimal", 0.0684, "0.068"),
    ("signed", 0.0033, "+0.0033"),
    ("signed", -0.0582, "-0.0582"),
    ("t", 4.84, "4.84"),
    ("p", 6.5e-7, "6.5e-07"),
    ("p", 0.0, "< 1e-38"),
    ("value", "ppo", "ppo"),
    ("value", False, "False"),
    ("t", None, "n/a"),
  ],
)
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
    "at": "end",
    "method": "ppo, tokens, equal credit",
    "N": "4",
    "prompts": "2",
    "steps": "3",
    "samples (k)": "0.0",
    "hours": "4.2",
    "CPU-hours": "1.5",
    "gym": f"62.50 {interval(gym)}",
    "math": "75.00",  # of each of its tasks there is one prompt
    "all prompts": f"70.00 {interval(everything)}",
  }
  assert gym["low"] < 0.625 < gym["high"]
  assert shown(tables.throughput(data), data, 0) == {
    "run": NASTY,
    "N": "4",
    "steps": "2",
    "pass rate, %": "37.5",
    "samples/s, generation": "0.0178",
    "samples/s, overall": "0.00404",
    "tokens/s, generation": "0.178",
    "kept samples/s, overall": "0.00152",
    "generation, % of time": "22.7",
    "reward std in a group": "0.312",
  }
  assert shown(tables.tokens(data, 6), data, 1) == {
    "run": NASTY,
    "domain": "math",
    "output tokens": "5.5 → 5.5",
    "pass@1, %": "25.00 → 75.00",
    "truncated, %": "0.0 → 0.0",
  }
  assert shown(tables.tasks(data, "gym", 3), data, row) == {
    "run": NASTY,
    "at": "end",
    "gcd": "75.00",
    "syllogism": "50.00",
  }
  assert shown(tables.categories(data, 5), data, row) == {
    "run": NASTY,
    "at": "end",
    "arithmetic": "75.00",
    "logic": "50.00",
  }


def test_every_hour_of_the_page_is_one_without_compiling(data, tmp_path):
  other = json.loads(json.dumps(data))
  for run in other["runs"]:
    for one in run["evaluations"]:
      one["hours"] = None
  rows = range(len(data["rows"]))
  for table in tables.every(data):
    assert cells.text(table, other) == cells.text(table, data)
  assert [shown(tables.main(data), data, row)["hours"] for row in rows] == [
    *("0", "2", "4.2", "2.19", "n/a")
  ]
  assert figures.draw(tmp_path, other) == figures.draw(tmp_path, data)


def test_each_column_of_the_t_tests_shows_its_number(data):
  at = next(i for i, t in enumerate(data["tests"]) if t["at"] == "end")
  test = data["tests"][at]
  for row, how in ((2 * at, "plain"), (2 * at + 1, "by_task")):
    one = test[how]
    assert shown(tables.tests(data, 7), data, row) == {
      "run": "b",
      "against": NASTY,
      "at": "end",
      "errors": {"plain": "plain", "by_task": "clustered by task"}[how],
      "difference": f"{test['difference']:+.4f}",
      "standard error": f"{one['standard_error']:.3f}",
      "d_z": f"{test['effect_size']:.3f}",
      "n": "5",
      "clusters": {"plain": "5", "by_task": "4"}[how],
      "t": f"{one['t']:.2f}",
      "p, one-sided": f"{one['p_one_sided']:.2g}",
      "p, two-sided": f"{one['p_two_sided']:.2g}",
    }


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


# -------------------------------------------------------------------- figures


@pytest.fixture
def drawn(data, tmp_path, monkeypatch):
  """Figures by their file, before they are thrown away."""
  out = {}
  close = plt.close
  save = figures.save
  monkeypatch.setattr(
    figures,
    "save",
    lambda figure, path: (out.update({path.name: figure}), save(figure, path)),
  )
  monkeypatch.setattr(plt, "close", lambda figure: None)
  figures.draw(tmp_path, data)
  yield out, tmp_path
  for figure in out.values():
    close(figure)


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


def test_figure_4_ends_where_all_runs_reached(drawn, data):
  out, _ = drawn
  for name, key, scale in (
    ("tasks_by_time.png", "net_hours", 1.0),
    ("tasks_by_samples.png", "samples", 1e-3),
  ):
    (reach,) = [c["reach"] for c in data["comparisons"] if c["key"] == key]
    titles = [axis.get_title() for axis in out[name].axes]
    assert titles == ["gcd", "syllogism", "aime", r"a/b~<i>\$x\$.c"]
    for axis in out[name].axes:
      assert len(axis.lines) == 2  # an evaluation has no trajectory
      low, high = axis.get_xlim()
      assert low < 0 and reach * scale < high < 1.05 * reach * scale
  # Run b reached 2.19 h; a had .5 of gcd after 2 h, and .75 only after 4.2.
  line = out["tasks_by_time.png"].axes[0].lines[0]
  assert line.get_xdata() == pytest.approx([0, 2])
  assert line.get_ydata() == pytest.approx([25, 50])


def test_figure_4_ends_with_the_numbers_of_the_tables(drawn, data):
  out, _ = drawn
  for name, key in (
    ("tasks_by_time.png", "net_hours"),
    ("tasks_by_samples.png", "samples"),
  ):
    (one,) = [c for c in data["comparisons"] if c["key"] == key]
    for axis, panel in zip(out[name].axes, data["panels"], strict=True):
      for line, which in zip(axis.lines, one["chosen"], strict=True):
        e = data["runs"][which["run"]]["evaluations"][which["evaluation"]]
        domain = e["summary"]["by_domain"][panel["domain"]]
        score = domain["by_task"][panel["task"]]["pass_at_k"]["1"]
        assert line.get_ydata()[-1] == pytest.approx(100 * score)
        assert len(line.get_ydata()) == which["evaluation"] + 1


def test_figure_4_asks_for_no_time_with_compiling(data, tmp_path):
  net = json.loads(json.dumps(data))
  for run in net["runs"]:
    for one in run["evaluations"]:
      one["hours"] = None
  drawn = figures.trajectories(tmp_path, net, "net_hours")
  assert "up to the time without compiling that all runs" in drawn.caption


def test_pass_at_k_is_that_of_the_last_evaluation(drawn, data):
  out, _ = drawn
  for axis, domain in zip(
    out["pass_at_k.png"].axes, data["domains"], strict=True
  ):
    for line, run in zip(axis.lines, data["runs"], strict=True):
      s = run["evaluations"][-1]["summary"]["by_domain"][domain]["pass_at_k"]
      np.testing.assert_array_equal(line.get_xdata(), [1, 2])
      np.testing.assert_allclose(line.get_ydata(), [100 * s["1"], 100 * s["2"]])


def test_runs_that_lie_on_each_other_are_all_seen(tmp_path):
  """Pixels in the colour of each of four, in the panels."""
  runs = [made.run(tmp_path / name) for name in "abcd"]
  data = reporting.numbers([read(path, path.name) for path in runs])
  reporting.write(data, tmp_path / "out")
  for path in (tmp_path / "out").glob("*.png"):
    image = plt.imread(path)[..., :3]
    panels = image[: int(0.85 * len(image))]
    for i in range(4):
      off = np.abs(panels - to_rgb(f"C{i}")).max(axis=2)
      assert (off < 0.02).sum() > 100, (path.name, i)


def test_the_figures_are_legible(drawn):
  """As wide as the page, no label below 9 points, none outside."""
  out, folder = drawn
  assert f"max-width: {figures.WIDTH * 96:.0f}px" in page._CSS
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


def test_no_figure_stays_in_memory(data, tmp_path):
  before = plt.get_fignums()
  figures.draw(tmp_path, data)
  assert plt.get_fignums() == before


@pytest.mark.parametrize(
  "hours, expected",
  [
    (140.0, (1.0, "hours")),
    (0.5, (60.0, "minutes")),
    (0.01, (3600.0, "seconds")),
  ],
)
def test_the_unit_of_time(hours, expected):
  assert figures._time(hours) == expected


# ------------------------------------------------------------------- browser


@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
def test_a_browser_opens_the_page_without_an_error(report, tmp_path):
  shot = tmp_path / "page.png"
  done = subprocess.run(
    [
      *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu"),
      *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path}/user"),
      *(f"--screenshot={shot}", "--window-size=1100,3000"),
      (report / "index.html").as_uri(),
    ],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0
  assert "CONSOLE" not in done.stderr
  image = plt.imread(shot)
  assert image.shape[:2] == (3000, 1100)
  # Text at the top, and figures in colour below.
  assert image[:200].min() < 0.5
  assert np.ptp(image[..., :3], axis=2).max() > 0.5
