"""Weights & Biases, offline. TensorBoard: metrics_test."""

import json
import struct

import numpy as np
import pytest
import tiers

from brorl_jax.runs import metrics, trackers

wandb = pytest.importorskip("wandb")
from wandb.proto import wandb_internal_pb2 as protocol

CONFIG = {"run": {"seed": 0, "steps": 4}, "loss": {"kind": "ppo"}}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
  monkeypatch.setenv("WANDB_MODE", "offline")
  for name in ("CONFIG", "CACHE", "DATA"):
    monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
  yield
  wandb.teardown()


def records(path):
  """The records of a .wandb file: a LevelDB log of protocol buffers."""
  data, at, part = path.read_bytes(), 7, b""
  assert data[:4] == b":W&B"
  while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:  # a header lies in one block
      at += left
      continue
    _, size, kind = struct.unpack("<IHB", data[at : at + 7])
    part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):  # whole, or the last part
      yield protocol.Record.FromString(part)
      part = b""


def key(item):
  return "/".join(item.nested_key) or item.key


def starts(workdir):
  wandb.teardown()  # its process writes until it ends
  for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
    run, steps = None, {}
    for record in records(path):
      if record.WhichOneof("record_type") == "run":
        run = run or record.run
      elif record.WhichOneof("record_type") == "history":
        found = {key(x): json.loads(x.value_json) for x in record.history.item}
        steps[record.history.step.num] = {
          k: x for k, x in found.items() if not k.startswith("_")
        }
    yield run, steps


def writer(workdir, after=-1, **more):
  how = {"wandb": "brorl", "config": CONFIG, "warn": pytest.fail} | more
  return metrics.Writer(workdir, after=after, steps=4, **how)


@pytest.mark.ci
def test_wandb_has_what_metrics_jsonl_has(tmp_path, capsys):
  out = writer(tmp_path)
  out.write_evaluation(0, {"eval/pass_at_1": 0.125})
  for step in (1, 2):
    out.write_scalars(step, {"reward/mean": 0.1 * step, "policy/kl_ref": None})
  out.write_evaluation(2, {"eval/pass_at_1": 0.375})
  out.write_scalars(3, {"x": 0.5}, {"histogram/reward": np.array([0.0, 1.0])})
  out.write_evaluation(3, {"eval/pass_at_1": 0.5}, "short", "3 < 4")
  out.close()
  ((run, steps),) = starts(tmp_path)
  last = steps.pop(3)
  assert sum(last["histogram/reward/values"]) == 2
  path = last["eval/samples/path"]
  (page,) = tmp_path.glob(f"wandb/offline-run-*/files/{path}")
  assert "<pre>3 &lt; 4</pre>" in page.read_text()
  lines = metrics.read_lines(tmp_path / "metrics.jsonl")
  assert steps == {
    0: {"eval/pass_at_1": 0.125}, 1: {"reward/mean": lines[0]["reward/mean"]},
    2: {"reward/mean": lines[1]["reward/mean"], "eval/pass_at_1": 0.375},
  }  # fmt: skip
  config = {key(x): json.loads(x.value_json) for x in run.config.update}
  assert {k: config[k] for k in CONFIG} == CONFIG
  assert run.project == "brorl" and run.display_name == tmp_path.name
  said = capsys.readouterr().err
  assert f"wandb: wandb sync {tmp_path}/wandb/offline" in said


@pytest.mark.ci
def test_each_start_continues_under_the_same_id(tmp_path):
  first = writer(tmp_path)
  first.write_scalars(1, {"x": 0.5})
  first.close()
  second = writer(tmp_path, after=1)
  second.write_scalars(2, {"x": 0.25})
  second.close()
  writer(tmp_path / "other").close()
  (one, _), (other, steps) = starts(tmp_path)
  known = (tmp_path / "wandb_id").read_text().strip()
  assert one.run_id == other.run_id == known
  assert steps == {2: {"x": 0.25}}
  assert (tmp_path / "other" / "wandb_id").read_text().strip() != known


@pytest.mark.parametrize("key", tiers.some([None, "0" * 40], 1))
def test_without_login_or_server_it_records_offline(tmp_path, monkeypatch, key):
  monkeypatch.setenv("WANDB_MODE", "online")
  monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  monkeypatch.setattr(trackers, "_START_S", 1.0)
  if key is not None:
    monkeypatch.setenv("WANDB_API_KEY", key)
  warned = []
  out = writer(tmp_path, warn=warned.append)
  out.write_scalars(1, {"x": 1.0})
  out.close()
  (why,) = warned
  assert why.startswith("wandb: ") and why.endswith("; recording offline")
  assert ("wandb login" in why) == (key is None)
  *_, (_, steps) = starts(tmp_path)
  assert steps == {1: {"x": 1.0}}


def test_what_fails_later_ends_the_tracking_alone(tmp_path, monkeypatch):
  warned = []
  out = writer(tmp_path, warn=warned.append)

  def lost(*args, **how):
    raise ConnectionResetError("Connection lost\nmore")

  monkeypatch.setattr(wandb.Run, "log", lost)
  for step in (1, 2, 3):
    out.write_scalars(step, {"x": 1.0})
  out.close()
  (line,) = warned
  assert "wandb is off" in line and line.endswith(": Connection lost")
  assert len(metrics.read_lines(tmp_path / "metrics.jsonl")) == 3


def test_wandb_that_cannot_start_is_off(tmp_path, monkeypatch):
  def broken(**how):
    raise OSError("no space left")

  monkeypatch.setattr(wandb, "init", broken)
  warned = []
  out = writer(tmp_path, warn=warned.append)
  out.write_scalars(1, {"x": 1.0})
  out.close()
  assert warned == [
    "wandb: no space left; recording offline", "wandb is off: no space left"
  ]  # fmt: skip
