"""Tests of brorl_jax/runs/events.py."""

import datetime
import json
import os

import pytest

from brorl_jax.runs import events


def test_what_tells_of_a_process_is_kept_and_what_tells_of_training_is_not():
  of = lambda *kinds: [events.of_process({"event": kind}) for kind in kinds]
  assert all(of("start", "resume", "warning", "end", "workers"))
  assert not any(of("phase", "reference reset", "skip", "unjudged", "guard"))
  assert not events.of_process({"step": 3})


def test_the_time_is_that_of_the_world():
  now = events.now()
  assert len(now) == len("2026-01-31T12:00:00.000Z") and now.endswith("Z")
  passed = datetime.datetime.now(
    datetime.UTC
  ) - datetime.datetime.fromisoformat(now)
  assert abs(passed.total_seconds()) < 60
  assert events.here()["pid"] == os.getpid() and events.here()["host"]


END = {"event": "end", "why": "no space"}


@pytest.mark.parametrize(
  "lines, said",
  [
    ([], None),
    ([{"event": "phase"}, {"event": "warning", "why": "x"}], None),
    ([{"event": "start"}], events.NO_WORD),
    ([{"event": "start"}, END], "no space"),
    ([{"event": "start"}, END, {"event": "warning", "why": "x"}], "no space"),
    ([{"event": "start"}, END, {"event": "resume"}], events.NO_WORD),
  ],
)
def test_the_last_word_of_a_process(tmp_path, lines, said):
  path = tmp_path / "events.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  assert events.last_word(path) == said


def test_the_most_frequent_reasons_are_named():
  assert events.most_frequent({"late": 2}) == "2 x late"
  reasons = {"b": 2, "a": 2, "d": 1, "c": 9, "e": 1}
  assert events.most_frequent(reasons) == "9 x c; 2 x a; 2 x b; 2 other reasons"


def test_answers_that_nobody_judged():
  assert events.unjudged([], 64) is None
  failed = [("gcd", "late"), ("sums", "late"), ("gcd", "late")]
  assert events.unjudged(failed, 64) == {
    "event": "unjudged", "count": 3, "of": 64, "task": "gcd", "why": "late",
  }  # fmt: skip


def test_refused_lines_are_counted_by_file():
  assert events.left_out([]) is None
  places = [
    "b, c.jsonl, line 3, field 'answer': empty",
    "a.parquet, row 1: no prompt",
    "b, c.jsonl, line 7: no object",
  ]
  assert events.left_out(places) == {
    "event": "data",
    "count": 3,
    "why": "lines left out: 1 of a.parquet, 2 of b, c.jsonl; the first: "
    "b, c.jsonl, line 3, field 'answer': empty",
  }


@pytest.fixture
def command(tmp_path):
  """Makes a shell script; its path. It may write to `out` beside it."""

  def make(body):
    path = tmp_path / "my tell"
    path.write_text(f"#!/bin/sh\nout='{tmp_path}/out'\n{body}\n")
    path.chmod(0o755)
    return f"'{path}'"

  return make


def test_the_event_is_on_standard_input(tmp_path, command, capfd):
  event = {"event": "end", "why": 'a "b"\né', "status": 75, "step": 3}
  events.notify(command('echo noise; cat >> "$out"'), event)
  events.notify("", event)
  assert json.loads((tmp_path / "out").read_text()) == event
  assert capfd.readouterr() == ("", "")


def test_words_are_those_of_a_shell_but_no_shell_reads_them(tmp_path, command):
  script = command('printf "%s\\n" "$@" > "$out"; cat > /dev/null')
  events.notify(f"{script} 'a b' \"c'd\" $HOME '' ;x", {"event": "end"})
  words = (tmp_path / "out").read_text().split("\n")
  assert words == ["a b", "c'd", "$HOME", "", ";x", ""]


@pytest.mark.parametrize(
  "body, what",
  [
    ("exit 1", "non-zero exit status 1"),
    ("kill -6 $$", "died with <Signals.SIGABRT: 6>"),
    ("exec sleep 600", "timed out after 0.5 seconds"),
  ],
)
def test_a_command_that_fails_is_told(command, capsys, monkeypatch, body, what):
  monkeypatch.setattr(events, "_NOTIFY_S", 0.5)
  # It reads nothing of it.
  events.notify(command(body), {"event": "end", "why": "x" * 200_000})
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith("warning: run.notify: ") and what in line


def test_a_command_that_is_missing_is_told(tmp_path, capsys):
  events.notify("a 'b", {"event": "start"})
  assert "run.notify: No closing quotation" in capsys.readouterr().out
  events.notify(f"{tmp_path}/none --x", {"event": "start"})
  assert (
    f"run.notify: [Errno 2] No such file or directory: '{tmp_path}/none'"
    in (capsys.readouterr().out)
  )
