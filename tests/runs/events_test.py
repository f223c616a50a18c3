"""Tests of brorl_jax/runs/events.py."""

import datetime
import json
import os
import time

import pytest

from brorl_jax.runs import events


def test_the_time_is_that_of_the_world():
  now = events.now()
  assert len(now) == len("2026-01-31T12:00:00.000Z") and now.endswith("Z")
  then = datetime.datetime.fromisoformat(now).timestamp()
  assert abs(time.time() - then) < 60
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
    ("exec sleep 600", "timed out after 0.5 seconds"),
  ],
)
def test_a_command_that_fails_is_told(command, capsys, monkeypatch, body, what):
  monkeypatch.setattr(events, "_NOTIFY_S", 0.5)
  # It reads nothing of it.
  events.notify(command(body), {"event": "end", "why": "x" * 200_000})
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith("warning: run.notify: ") and what in line
  for missing in ("a 'b", "/nowhere/none --x"):
    events.notify(missing, {"event": "start"})
    assert "run.notify: " in capsys.readouterr().out
