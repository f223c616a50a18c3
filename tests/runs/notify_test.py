"""Tests of brorl_jax/runs/notify.py."""

import contextlib
import json
import pathlib
import shlex
import time

import pytest

from brorl_jax.runs import notify


@pytest.fixture
def command(tmp_path):
  """Makes a shell script; its path. It may write to `out` beside it."""

  def make(body, name="tell"):
    path = tmp_path / name
    path.write_text(
      f"#!/bin/sh\nout={shlex.quote(str(tmp_path / 'out'))}\n{body}\n"
    )
    path.chmod(0o755)
    return str(path)

  return make


def told(tmp_path):
  path = tmp_path / "out"
  return (
    [json.loads(x) for x in path.read_text().splitlines()]
    if (path.exists())
    else []
  )


def alive(group):
  """The processes of a group that are more than an entry of a table."""
  out = []
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it ends
      state, _, of = path.read_text().rpartition(")")[2].split()[:3]
      out += [path] if int(of) == group and state != "Z" else []
  return out


def warning(i):
  return {"event": "warning", "why": f"number {i}"}


def test_the_event_is_on_standard_input(tmp_path, command):
  said = []
  tell = notify.Notify(command('cat >> "$out"'), warn=said.append)
  event = {"event": "end", "why": 'a "b"\né', "status": 75, "step": 3}
  tell({"event": "start", "step": 0})
  tell(event)
  tell.close()
  assert told(tmp_path) == [{"event": "start", "step": 0}, event]
  assert not said


def test_words_are_those_of_a_shell_but_no_shell_reads_them(tmp_path, command):
  script = command('printf "%s\\n" "$@" > "$out"; cat > /dev/null', "my tell")
  tell = notify.Notify(f"{shlex.quote(script)} 'a b' \"c'd\" $HOME '' ;x")
  tell({"event": "end"})
  tell.close()
  words = (tmp_path / "out").read_text().split("\n")
  assert words == ["a b", "c'd", "$HOME", "", ";x", ""]


def test_nobody_is_told_without_a_command():
  tell = notify.Notify("")
  tell({"event": "end"})
  begin = time.monotonic()
  tell.close()
  assert tell._thread is None and time.monotonic() - begin < 0.5


@pytest.mark.parametrize(
  "body, what",
  [("exit 1", "ended with status 1"), ("kill -6 $$", "ended with status -6")],
)
def test_a_command_that_fails_is_told_once(command, body, what):
  said = []
  tell = notify.Notify(command(body), warn=said.append)
  for kind in ("start", "resume", "end"):
    tell({"event": kind, "why": "x" * 200_000})  # it reads nothing of it
  tell.close()
  (line,) = said
  assert line.startswith("warning: run.notify: /") and line.endswith(what)


def test_a_command_that_is_missing_is_told_once(tmp_path):
  said = []
  tell = notify.Notify(f"{tmp_path}/none --x", warn=said.append)
  tell({"event": "start"})
  tell({"event": "end"})
  tell.close()
  (line,) = said
  assert line.startswith(f"warning: run.notify: {tmp_path}/none --x cannot be")


def test_a_command_that_hangs_stops_nobody(tmp_path, command):
  """It and what it started end, and the next event is told."""
  said = []
  body = 'read line; case "$line" in *start*) echo $$ > "$out.pid"; sleep 600;;'
  body += ' *) echo "$line" >> "$out";; esac'
  tell = notify.Notify(command(body), warn=said.append, limit_s=1.0)
  begin = time.monotonic()
  tell({"event": "start"})
  assert time.monotonic() - begin < 0.5
  tell({"event": "resume"})
  while not told(tmp_path) and time.monotonic() - begin < 20:
    time.sleep(0.02)
  assert told(tmp_path) == [{"event": "resume"}]
  group = int((tmp_path / "out.pid").read_text())
  assert not alive(group)
  tell.close()
  (line,) = said
  assert line.endswith("hung and was ended")


def test_the_end_is_told_though_another_event_hangs(tmp_path, command):
  body = 'read line; case "$line" in *end*) echo "$line" >> "$out";;'
  body += " *) sleep 600;; esac"
  said = []
  tell = notify.Notify(command(body), warn=said.append, limit_s=4.0)
  for event in ({"event": "start"}, warning(1), {"event": "end"}):
    tell(event)
  begin = time.monotonic()
  tell.close()
  assert 1.5 < time.monotonic() - begin < 4.0
  assert told(tmp_path) == [{"event": "end"}]
  assert len(said) == 1


def test_an_end_that_hangs_is_not_waited_for_longer(command):
  said = []
  tell = notify.Notify(command("sleep 600"), warn=said.append, limit_s=1.0)
  tell({"event": "end"})
  begin = time.monotonic()
  tell.close()
  assert time.monotonic() - begin < 3.0
  assert len(said) == 1 and said[0].endswith("hung and was ended")


def test_a_flood_is_its_newest_event(tmp_path, command):
  """One is told while the rest comes; never are two told at one time."""
  body = 'mkdir "$out.lock" || echo two > "$out.two"\nread line\n'
  body += (
    'echo "$line" >> "$out"\nwhile [ ! -e "$out.go" ]; do sleep .02; done\n'
  )
  body += 'rmdir "$out.lock"'
  tell = notify.Notify(command(body), limit_s=20.0)
  tell({"event": "start"})
  while not told(tmp_path):
    time.sleep(0.02)
  begin = time.monotonic()
  for i in range(1000):
    tell(warning(i))
  assert time.monotonic() - begin < 1.0
  tell({"event": "end"})
  (tmp_path / "out.go").touch()
  tell.close()
  assert told(tmp_path) == [
    {"event": "start"},
    {**warning(999), "folded": 999},
    {"event": "end"},
  ]
  assert not (tmp_path / "out.two").exists()
