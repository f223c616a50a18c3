"""Tests of brorl_jax/report/events.py."""

import json

import pytest
import runs_for_tests as made

from brorl_jax.errors import UserError
from brorl_jax.main import report as report_command
from brorl_jax.report import cells, events, load_runs, tables

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


def read(path):
  return load_runs.read(load_runs.look(path), path.name, lambda step: None)


def test_the_page_has_a_table_of_what_happened(tmp_path):
  quiet, a, b = (made.run(tmp_path / name) for name in ("quiet", "a", "b$x$"))
  made.dump(a / "events.jsonl", EVENTS)
  made.dump(b / "events.jsonl", [line(0, "start"), line(1, "guard", why="x")])
  data = report_command.numbers([read(path) for path in (quiet, a, b)])
  report_command.write(data, tmp_path / "report")
  html = (tmp_path / "report" / "index.html").read_text()
  assert NASTY not in html and "&lt;script&gt;alert(1)" in html
  assert "Events</h2>" in html
  table = events.table(data, 7)
  texts = [[cells.as_text(cell, data) for cell in row] for row in table.rows]
  assert len(texts) == 8 + 2
  assert texts[1] == [
    "a", "warning", "disk 3 is slow", "3", "1 → 9",
    "2026-11-25 08:58:01 → 2026-11-25 08:58:08",
  ]  # fmt: skip
  assert texts[4][3:] == ["1", "2", "2026-11-25 08:58:04"]
  assert texts[-1][:2] == ["b$x$", "guard"]
  # A run without events has no table.
  assert (
    "Events"
    not in tables.every(report_command.numbers([read(quiet)]))[-1].title
  )


@pytest.mark.parametrize("bad", ["[]", '{"step": 1}', '{"event": "end"}', "{"])
def test_a_line_that_is_no_event_is_one_error(tmp_path, bad):
  path = made.run(tmp_path / "a") / "events.jsonl"
  path.write_text(f"{bad}\n{json.dumps(EVENTS[0])}\n")
  with pytest.raises(UserError, match=r"events\.jsonl, line 1: .*; restore"):
    read(path.parent)
