"""Tests of brorl_jax/runs/heartbeat.py."""

import json
import os

from brorl_jax.runs import events, heartbeat


def test_the_file_says_what_goes_on(tmp_path):
  said = []
  beat = heartbeat.Heartbeat(tmp_path, said.append)
  assert not [*tmp_path.iterdir()]
  before = events.now()
  beat(3, "sampling")
  found = json.loads((tmp_path / "heartbeat.json").read_text())
  assert before <= found.pop("time") <= events.now()
  want = {"step": 3, "doing": "sampling", **events.here()}
  assert found == want and found["pid"] == os.getpid()
  beat(3, "update")
  assert json.loads((tmp_path / "heartbeat.json").read_text())["doing"] == (
    "update"
  )
  assert [p.name for p in tmp_path.iterdir()] == ["heartbeat.json"]
  assert not said


def test_it_is_replaced_as_a_whole(tmp_path, monkeypatch):
  beat = heartbeat.Heartbeat(tmp_path, print)
  beat(1, "sampling")
  whole = (tmp_path / "heartbeat.json").read_text()
  monkeypatch.setattr(os, "replace", lambda *_: None)  # killed before it
  beat(2, "sampling")
  assert (tmp_path / "heartbeat.json").read_text() == whole


def test_many_parts_of_a_stage_are_one_write_in_a_second(tmp_path, monkeypatch):
  beat, written, replace = heartbeat.Heartbeat(tmp_path, print), [], os.replace
  monkeypatch.setattr(
    os, "replace", lambda *of: (written.append(1), replace(*of))
  )
  now = [100.0]
  monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
  for _ in range(9):  # of .25 s
    beat(1, "sampling")
    now[0] += 0.25
  assert len(written) == 3
  beat(1, "update")
  beat(2, "update")
  assert len(written) == 5


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path):
  said = []
  beat = heartbeat.Heartbeat(tmp_path / "gone", said.append)
  beat(1, "sampling")
  beat(2, "sampling")
  assert said == [
    f"{tmp_path}/gone/heartbeat.json cannot be written: No such file or "
    "directory"
  ]
  (tmp_path / "gone").mkdir()
  beat(3, "sampling")
  assert len(said) == 1 and (tmp_path / "gone" / "heartbeat.json").exists()
