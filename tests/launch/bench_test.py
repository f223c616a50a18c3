"""Tests of launch/bench: what is counted, and how two systems take turns."""

import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

import pytest
from launchers import ran

ROOT = pathlib.Path(__file__).parents[2]

from launch.bench import protocol, rollout, update, workloads

pytestmark = pytest.mark.ci
MODEL = workloads.Model(
  vocab=5, width=3, mlp=4, layers=2, heads=2, kv_heads=1, head_size=2
)


def test_operations_and_bytes_by_hand():
  w = workloads.Workload(MODEL, prompt=10, new=4)
  # A layer has 3 x (4 + 2 + 2 + 4) + 3 x 3 x 4 = 72 weights, the head 15.
  # Responses of 1, 2 and 4 tokens: 0 + 1 + 3 = 4 are decoded and read 0 + 1 +
  # (1 + 2 + 3) = 7 columns of their own and 4 x 10 of the prompt, which reads
  # 50 pairs of itself.
  flops, moved = rollout.work(w, [1, 2, 4], size=2, slots=2)
  products = 2 * 2 * 72 * (4 + 10) + 2 * 15 * (4 + 1)
  assert flops == products + 4 * (2 * 2 * 2) * (7 + 40 + 50)
  # Two steps of two slots: the weights and the prompt's keys and values each
  # time. A column is 2 x 2 layers x 1 head x 2 numbers.
  assert moved == 2 * (159 * 2 + 10 * 16) + 7 * 16


def test_the_tail_begins_with_the_last_twentieth():
  tail = [rollout.in_tail(40, left) for left in (40, 3, 2, 0)]
  assert tail == [False, False, True, True]


def test_rates_of_an_update_by_hand():
  runs = [protocol.Clock() for _ in range(3)]
  for run, wall_s, cpu_s in zip(runs, (4, 1, 2), (8, 1, 5), strict=True):
    run.wall_s, run.cpu_s = wall_s, cpu_s
  assert update.rates(100, runs) == {
    "update_s": 2, "update_cpu_s": 5, "every_update_cpu_s": [8, 1, 5],
    "tokens_per_s": 50, "tokens_per_cpu_s": 20,
  }  # fmt: skip


def test_operations_of_an_update_by_hand():
  w = workloads.Workload(MODEL, prompt=10, new=4)
  # Two prompts with three responses each. Read are 10 tokens of a prompt and 3
  # of a response: 38. They attend to 1 + ... + 10 = 55 pairs of a prompt, and
  # to 10 + 1, 10 + 2, 10 + 3 = 36 of a response. 24 tokens are predicted.
  products = 2 * 2 * 72 * 38 + 2 * 15 * 24
  pairs = 4 * (2 * 2 * 2) * (2 * 55 + 6 * 36)
  assert update.work(w, prompts=2, lengths=[4] * 6) == 3 * (products + pairs)
  # One response has two tokens: two fewer are read, which had 10 + 2 and 10 + 3
  # pairs, and two fewer are predicted.
  less = 2 * 2 * 72 * 2 + 2 * 15 * 2 + 4 * (2 * 2 * 2) * 25
  short = update.work(w, prompts=2, lengths=[4] * 5 + [2])
  assert short == 3 * (products + pairs - less)


def test_a_model_of_any_size():
  assert workloads.model_of("512x8", 32000) == workloads.Model(
    vocab=32000, width=512, mlp=1408, layers=8, heads=8, kv_heads=2,
    head_size=64,
  )  # fmt: skip
  assert workloads.model_of("192x1", 9).kv_heads == 1
  small = "256x6:heads=8,kv_heads=2,head_size=32,mlp=704"
  assert workloads.model_of(small, 2048) == workloads.SMALL
  assert workloads.model_of("256x6:head_size=32", 2048) == workloads.SMALL
  wide = workloads.model_of("96x1:heads=3,head_size=64", 9)
  assert (wide.width, wide.heads, wide.head_size) == (96, 3, 64)


def test_lengths_of_a_file_are_those_of_the_end_token():
  """P(1) = .25, P(2) = 0, P(3) = .5, and what is longer is cut at 4."""
  first, second, third, last = workloads.end_logits([1, 3, 3, 9], 4, vocab=11)
  others = math.log(10)
  assert first == pytest.approx(math.log(0.25 / 0.75) + others)
  assert third == pytest.approx(math.log(2 / 1) + others)
  assert second < others - 50 and last < others - 50
  assert workloads.end_logits([2], 2, vocab=11)[1] > 50


@pytest.mark.parametrize("how, mean", [
  (dict(lengths=(2, 4, 4, 30)), (2 + 4 + 4 + 9) / 4),
  # sum over t = 1 ... 9 of P(length >= t) = (3/4)^(t - 1)
  (dict(one_in=4), 4 * (1 - 0.75**9)), (dict(), 9),
])  # fmt: skip
def test_invented_lengths_are_those_that_a_policy_would_make(how, mean):
  w = workloads.Workload(workloads.SMALL, prompt=1, new=9, **how)
  lengths = w.drawn(20_000, seed=0)
  assert 1 <= min(lengths) and max(lengths) == 9
  assert statistics.mean(lengths) == pytest.approx(mean, abs=0.08)
  assert lengths == w.drawn(20_000, seed=0)
  assert not how or w.drawn(99, 1) != lengths[:99]


def line_of(part, *flags):
  """What a part of the bench says of one run."""
  command = [sys.executable, "-m", f"launch.bench.{part}", "--repeats=1"]
  out = subprocess.check_output([*command, *flags], text=True, cwd=ROOT)
  return json.loads(out)


def test_a_trainer_takes_one_step_at_a_time():
  taken = []

  def train(held):
    for step in range(2):
      held.wait()
      taken.append(step)
      held.done(10 * step)
    held.wait()
    raise ValueError("third")

  trainer = protocol.Trainer(train)
  assert trainer.step() == 0 and taken == [0]
  assert trainer.step() == 10 and taken == [0, 1]
  with pytest.raises(ValueError, match="third"):
    trainer.step()
  with pytest.raises(RuntimeError, match="ended by itself"):
    protocol.Trainer(lambda held: held.wait()).step()


def test_one_token_in_so_many_ends():
  assert workloads.WORKLOADS["w3"].stop_ids == tuple(range(64))
  of = lambda k: protocol.parse(argv=[f"--ends={k}"])[0].workload
  counts = {1: 2048, 2: 1024, 3: 683, 205: 10, 1365: 2, 1366: 1, 2048: 1}
  assert {k: len(of(k).stop_ids) for k in counts} == counts
  assert of(1).drawn(9, 0) == [1] * 9
  # As often as the tokens that end: 1 of 2,048, not one in 1,366.
  assert of(1366).drawn(99, 0) == of(2048).drawn(99, 0)
  assert workloads.WORKLOADS["w1"].stop_ids == ()
  ids = workloads.prompt_ids(workloads.WORKLOADS["w2"])
  assert len(ids) == 512 and min(ids) >= 10 and max(ids) < 2048
  assert ids == workloads.prompt_ids(workloads.WORKLOADS["w2"])


@pytest.mark.slow
def test_our_lines_of_json():
  line = line_of("update", "--workload=l2", "--n=4", "--rows=4")
  assert line["workload"] == "l2" and line["tokens"] == 4 * 64
  assert line["programs"]["first"] > 0 and line["programs"]["later"] == 0
  assert line["padding_fraction"] == 0.0 < line["model_flops_share"] < 1
  assert line["tokens_per_cpu_s"] > 0 and line["peak_bytes"] > 1e8
  line = line_of("rollout", "--workload=w3", "--n=8")
  assert line["n"] == line["unique"] == 8 and line["workload"] == "w3"
  assert 8 <= line["tokens"] <= 8 * 128
  assert 0 < line["slot_occupancy"] <= 1 and 0 < line["roofline_share"] < 1
  assert line["decode_s"] > 0 and line["prefill_s"] > 0
  assert 0 <= line["tail_s"] < line["decode_s"] + line["prefill_s"]
  assert line["tokens_per_cpu_s"] > 0 < line["memory_above_idle_bytes"]
  # Other lengths leave other numbers of slots, whose programs are compiled.
  assert 0 <= line["programs"]["later"] < line["programs"]["first"]


STUB = """
import json, sys
tokens, cpu_s = {values}
assert sys.argv[-1] in ("--ends=9", "--dtype=float32"), sys.argv
print(json.dumps({{"ready": True, "system": "{name}", "first_run_s": 1.0,
  "ready_s": 3.0}}))
sys.stdout.flush()
for i, _ in enumerate(sys.stdin):
  with open(sys.path[0] + "/turns", "a") as file:
    file.write("{name}")
  print(json.dumps({{"tokens": tokens[i], "cpu_s": cpu_s[i], "wall_s": 2.0,
    "unique": 1, "peak_bytes": 10 + i, "memory_above_idle_bytes": i}}))
  sys.stdout.flush()
"""


def take_turns(tmp_path, ours, peer):
  command = [sys.executable, "-m", "launch.bench.interleave", "--rounds=3"]
  command.append("--ends=9")  # for both
  for name, values in (("a", ours), ("b", peer)):
    script = tmp_path / f"{name}.py"
    script.write_text(STUB.format(name=name, values=values))
    command += [sys.executable, script]
  return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_turns_by_hand(tmp_path):
  # Tokens per CPU-second: 100, 50, 40 against 10, 25, 5.
  done = take_turns(
    tmp_path, ([200, 100, 80], [2, 2, 2]), ([10, 100, 10], [1, 4, 2])
  )
  assert done.returncode == 0, done.stderr
  line = json.loads(done.stdout)
  assert line["ours"]["tokens_per_cpu_s"] == 50
  assert line["peer"]["tokens_per_cpu_s"] == 10
  want = {"of_medians": 5.0, "min": 2.0, "max": 10.0, "rounds": [10, 2, 8]}
  assert line["ratio"]["tokens_per_cpu_s"] == want
  assert line["ours"]["tokens"] == [200, 100, 80]
  assert line["ours"]["every_tokens_per_cpu_s"] == [100, 50, 40]
  assert line["ours"]["every_tokens_per_s"] == [100, 50, 40]
  assert line["peer"]["every_tokens_per_s"] == [5, 50, 5]
  assert line["flags"] == ["--ends=9"] and line["processor"]
  assert line["peer"]["peak_bytes"] == 12
  # Who is first changes from round to round.
  assert (tmp_path / "turns").read_text() == "abbaab"


def test_a_system_that_dies_is_named(tmp_path):
  done = take_turns(tmp_path, ([200, 100, 80], [2, 2, 2]), ([10], [1]))
  assert done.returncode == 1 and "\nerror: the peer ended" in done.stderr


@pytest.mark.parametrize("flags, message", [
  (["--rounds=0"], "--rounds=0 must be at least 1"),
  (["--workload", "l1"], "openvino has no update.py"),
  (["--rounds=10"], "PYTHON=/no/python does not run"),
])  # fmt: skip
def test_the_comparison_refuses_before_it_installs(flags, message):
  command = "bash", ROOT / "launch" / "bench" / "compare.sh", "openvino"
  done = ran(*command, *flags, env=os.environ | {"PYTHON": "/no/python"})
  assert done.returncode == 1 and not done.stdout
  assert done.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("flags, message", [
  (["--n=0"], "--n=0 must be at least 1"),
  (["--vocab=10"], "--vocab=10 must be at least 11"),
  (["--ends=5000"], "--ends=5000 must be at most the vocabulary, 2048"),
  (["--workload=w3", "--vocab=31"], "--vocab=31 must be at least 32, "),
  (["--workload=l3"], "--workload=l3 needs an accelerator"),
  (["--model=100x2"], "--model=100x2 is not WIDTHxLAYERS"),
  (["--model=64x1:x=2"], "'x' must be one of heads, kv_heads, "),
  (["--model=64x1:mlp=0"], "mlp=0 must be a number from 1 to 9"),
  (["--model=60x1:heads=6,kv_heads=4"], "must be a multiple of kv_heads=4"),
  (["--model=60x1:heads=4"], "head_size=15 must be even"),
  (["--ends=9", "--lengths=x"], "not allowed with"),
])  # fmt: skip
def test_refuses(flags, message, capsys):
  with pytest.raises(SystemExit) as e:
    protocol.parse(more=update.add_flags, argv=flags)
  *usage, last = capsys.readouterr().err.splitlines()
  assert e.value.code == 2 and message in last
  assert " error: " in last and usage[0].startswith("usage: ")


@pytest.mark.parametrize("content, message", [
  (b"\n \n", " has no lengths"),
  (b"1\n\n2 3\n", ": line 3 is '2 3', not one length from 1 to 999999999"),
  (b"\xff\xfe", " is not text: "),
])  # fmt: skip
def test_refuses_a_file_without_lengths(tmp_path, content, message, capsys):
  file = tmp_path / "lengths"
  file.write_bytes(content)
  test_refuses([f"--lengths={file}"], f"--lengths={file}{message}", capsys)


@pytest.mark.parametrize("module", [rollout, update])
def test_what_needs_an_accelerator_is_refused(module, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["x", "--workload=w4", "--n=1"])
  with pytest.raises(SystemExit, match="2"):
    module.main()
  assert "--workload=w4 needs an accelerator" in capsys.readouterr().err
  argv = ["--workload=w4"]
  assert protocol.parse(accelerator=lambda: True, argv=argv)[0].n == 512
  task, _ = protocol.parse(argv=["--model=64x1", *argv])
  assert task.workload.model.width == 64
  # Asked behind all else, because asking loads jax.
  asked = lambda: pytest.fail("asked")
  with pytest.raises(SystemExit):
    protocol.parse(accelerator=asked, argv=[*argv, "--n=0"])
