"""Tests of launch/bench/growth: what is fitted, counted and measured."""

import json
import pathlib
import subprocess
import sys

import pytest

from launch.bench import growth, protocol, workloads

ROOT = pathlib.Path(__file__).parents[2]
TINY = ["--model=64x1", "--vocab=64", "--prompt=4", "--new=4"]

pytestmark = pytest.mark.ci


def test_a_power_has_its_exponent():
  sizes = [16, 64, 128, 512, 2048]
  found = growth.exponents(sizes, [3 * x**1.7 for x in sizes])
  assert found == {"exponent": 1.7, "steps": [1.7] * 4}


def test_least_squares_over_the_upper_half_by_hand():
  # Powers of two (2, 0), (3, 2), (4, 2): the slope is (0 x -1 + 2 x 1) / 2.
  found = growth.exponents([1, 2, 4, 8, 16], [64, 9, 1, 4, 4])
  assert found["exponent"] == 1.0
  assert found["steps"][2:] == [2.0, 0.0]


def test_the_share_of_attention_by_hand():
  model = workloads.Model(
    vocab=50, width=3, mlp=4, layers=2, heads=2, kv_heads=1, head_size=2
  )
  task = protocol.Task(workloads.Workload(model, 10, new=4), 6, "float32")
  # A pair of a query and a key costs 4 x 2 layers x 2 heads x 2 operations.
  # Prefill: half of 10 x 10. Three of a response's 4 tokens are decoded. They
  # read the prompt, and 1 + 2 + 3 columns of their own.
  found = growth._counted("rollout", task)
  assert found["of_attention"] == 32 * (50 + 6 * (30 + 6))
  # An update reads 1 + ... + 10 pairs of the prompt, and of every response 10 +
  # 1, 10 + 2, 10 + 3; backward twice as many.
  found = growth._counted("update", task)
  assert found["of_attention"] == 3 * 32 * (55 + 6 * 36)
  assert found["operations"] > found["of_attention"]


def line(attention: float, others: float, cpu_s: float) -> dict:
  return {
    "of_attention": attention * 1e9,
    "operations": (attention + others) * 1e9,
    "cpu_s": cpu_s,
  }


def test_time_is_that_of_attention_and_of_others():
  # .01 s for others, .03 for attention; the first size is not fitted.
  sizes = [1, 2, 4, 8]
  grow = [line(x**2, 10 * x, 0.1 * x + 0.03 * x**2) for x in sizes]
  grow[0]["cpu_s"] = 9.0
  found = growth.apart([grow[0], *grow])
  assert found == {"others_s": 0.01, "attention_s": 0.03, "largest_error": 0.0}
  # Time that grows as the fourth power is explained by neither.
  found = growth.apart([line(x**2, 10 * x, x**4) for x in (1, 2, 4, 8, 16)])
  assert found["others_s"] == 0 and found["largest_error"] > 0.5
  found = growth.apart([line(x**2, 10 * x, x**0.5) for x in (1, 2, 4, 8, 16)])
  assert found["attention_s"] == 0 and found["largest_error"] > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rollout", "update"])
def test_two_points(part):
  flags = f"--part={part}", "--axis=n", "--sizes=4,64"
  command = [sys.executable, "-m", "launch.bench.growth", *flags, *TINY]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  *points, last = map(json.loads, done.stdout.splitlines())
  assert [(p["n"], p["t"], p["s"], p["v"]) for p in points] == [
    (4, 4, 4, 64), (64, 4, 4, 64)
  ]  # fmt: skip
  assert all(p["cpu_s"] == min(p["every_cpu_s"]) for p in points)
  assert all(1e6 < p["memory_bytes"] < 1e10 for p in points)
  assert last["exponents"] == {part: {"n": growth.summary(points)}}
  # Sixteen times the responses of one prompt.
  assert 0.5 < last["exponents"][part]["n"]["operations"]["exponent"] < 1
  assert done.stderr.splitlines()[-1].startswith(f"{part} n")


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--sizes=2,4"], "--sizes are of one --axis"),
    (["--axis=n", "--sizes=4,2"], "'4,2' is not two or more, ascending"),
  ],
)
def test_refuses(flags, message, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["growth", *flags, *TINY])
  with pytest.raises(SystemExit, match="2"):
    growth.main()
  assert message in capsys.readouterr().err
