"""Tests of brorl_jax/report/events.py."""

import json

import matplotlib.image
import pytest
import runs_for_tests as made

from brorl_jax.errors import UserError
from brorl_jax.main.commands import report as report_command
from brorl_jax.report import cells, events, load_runs, page

NASTY = "<script>alert(1)</script> $x$"


def line(step, event, second=0, **more):
  time = f"2026-11-25T08:58:{second:02d}.927Z"
  return {"step": step, "time": time, "event": event, **more}


EVENTS = [
  line(0, "start", pid=7, host="a"),
  line(1, "warning", 1, why="disk 1 is slow"),
  line(1, "phase", 2, changed={"sampling.n": 16, "optim.lr": 0.1}),
  line(2, "warning", 3, why="disk 22 is slow"),
  line(2, "end", 4, why="no space", status=2),
  line(2, "resume", 4),
  line(2, "config", 5, changed={"n": [1, 2]}),
  line(3, "skip", 6, why=NASTY),
  line(3, "a new kind", 7, count=3, of=64, task="gcd", why="late"),
  line(9, "warning", 8, why="disk 3 is slow"),
]
MARKS = [
  ("warning", 1), ("phase", 1), ("warning", 2), ("end", 2), ("resume", 2),
  ("config", 2), ("skip", 3), ("a new kind", 3), ("warning", 3),
]  # fmt: skip


def test_rows_are_folded_where_only_numbers_differ():
  rows = events.folded(EVENTS)
  assert [(r["event"], r["count"], r["what"]) for r in rows] == [
    ("start", 1, ""),
    ("warning", 3, "disk 3 is slow"),
    ("phase", 1, "sampling.n = 16; optim.lr = 0.1"),
    ("end", 1, "no space; status: 2"),
    ("resume", 1, ""),
    ("config", 1, "n = [1, 2]"),
    ("skip", 1, NASTY),
    ("a new kind", 1, "late; count: 3; of: 64; task: gcd"),
  ]
  assert rows[1]["first"] == {"step": 1, "time": "2026-11-25 08:58:01"}
  assert rows[1]["last"] == {"step": 9, "time": "2026-11-25 08:58:08"}
  assert events.folded([]) == []


def test_a_flood_of_different_texts_is_one_row_of_its_kind():
  few = [line(i, "warning", why="x" * i) for i in range(1, 6)]
  assert len(events.folded(few)) == 5
  many = [line(i, "warning", why="x" * i) for i in range(1, 500)]
  start, row = events.folded([line(0, "start"), *many])
  assert (start["count"], row["count"]) == (1, 499)
  assert (row["first"]["step"], row["last"]["step"]) == (1, 499)
  assert row["what"] == "x" * 300 + "..."


def test_marks_are_on_the_time_axis_once_per_kind_and_step():
  spent = {i: {"net_hours": i / 4} for i in range(4)}
  found = events.marks([*EVENTS, *EVENTS], spent)
  assert [(m["event"], m["step"]) for m in found] == MARKS
  assert all(m["net_hours"] == m["step"] / 4 for m in found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Two runs with events and one without."""
  at = tmp_path_factory.mktemp("events")
  for name in ("a", "b$x$", "quiet"):
    made.run(at / name)
  made.dump(at / "a" / "events.jsonl", EVENTS)
  other = [line(0, "start"), line(1, "guard", why="entropy")]
  made.dump(at / "b$x$" / "events.jsonl", other)
  return at


def read(path):
  return load_runs.read(load_runs.look(path), path.name, lambda step: None)


def written(folders, *names):
  """The numbers and the page of a report."""
  data = report_command.numbers([read(folders / name) for name in names])
  out = folders / f"report of {' '.join(names)}"
  report_command.write(data, out)
  return json.loads((out / "report.json").read_text()), out


def test_the_page_has_a_figure_and_a_table_of_what_happened(folders):
  data, out = written(folders, "quiet", "a", "b$x$")
  assert [len(run["marks"]) for run in data["runs"]] == [0, 9, 1]
  html = (out / "index.html").read_text()
  assert NASTY not in html and "&lt;script&gt;alert(1)" in html
  assert "<h2>What happened</h2>" in html and "Events</h2>" in html
  table = events.table(data, 7)
  texts = [[cells.as_text(cell, data) for cell in row] for row in table.rows]
  assert len(texts) == 8 + 2
  assert texts[1] == [
    "a", "warning", "disk 3 is slow", "3", "1 → 9",
    "2026-11-25 08:58:01 → 2026-11-25 08:58:08",
  ]  # fmt: skip
  assert texts[4][3:] == ["1", "2", "2026-11-25 08:58:04"]
  assert texts[-1][:2] == ["b$x$", "guard"]
  one = written(folders, "a")[1] / "events.png"
  # A panel more is higher; the width is that of the page.
  size = lambda path: matplotlib.image.imread(path).shape
  assert size(out / "events.png")[0] > 1.5 * size(one)[0] > 300
  assert size(out / "events.png")[1] == size(one)[1]


def test_every_mark_is_a_line_in_the_plot_and_a_marker_in_its_row(
  folders, monkeypatch
):
  drawn = []
  data, out = written(folders, "a")
  draw = events._draw
  monkeypatch.setattr(
    events, "_draw", lambda *of: (drawn.append(of), draw(*of))
  )
  events.timeline(out / "again.png", data, 72)
  axis = drawn[0][0]
  lanes = {kind: lane for _, _, kind, lane in drawn}
  assert sorted(lanes.values()) == [1, 2, 3, 4, 5, 6, 7]
  assert [*lanes] == list(dict.fromkeys(kind for kind, _ in MARKS))
  hours = [one["net_hours"] for one in data["runs"][0]["marks"]]
  assert [x for _, x, *_ in drawn] == hours  # of more than one hour
  lines = {tuple(x.get_xdata()) for x in axis.lines}
  assert {(x, x) for x in hours} <= lines
  names = [t.get_text() for t in axis.figure.legends[0].get_texts()]
  assert names == [
    "end", "resume", "warning", "skip", "phase", "config", "a new kind",
  ]  # fmt: skip


def test_runs_without_events_have_neither(folders):
  data, out = written(folders, "quiet")
  assert data["runs"][0]["events"] == data["runs"][0]["marks"] == []
  html = (out / "index.html").read_text()
  assert "What happened" not in html and "Events</h2>" not in html
  assert page.page(data, [], out) and not (out / "events.png").exists()


@pytest.mark.parametrize("bad", ["[]", '{"step": 1}', '{"event": "end"}', "{"])
def test_a_line_that_is_no_event_is_one_error(folders, tmp_path, bad):
  path = made.run(tmp_path / "a") / "events.jsonl"
  path.write_text(f"{bad}\n{json.dumps(EVENTS[0])}\n")
  with pytest.raises(UserError, match=r"events\.jsonl, line 1: .*; restore"):
    read(path.parent)
