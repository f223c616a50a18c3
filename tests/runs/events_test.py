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
