"""Programs compiled for machines that are not here, by the commands."""

import functools
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from hub_configs import QWEN3_MOE

ROOT = pathlib.Path(__file__).parents[2]
# Of `pip install --target`, with a compiler that the tests' own environment
# must not have: with libtpu in it jax looks for a TPU at every start.
ASIDE = os.environ.get("BRORL_AOT", "")
MIB, GIB = 2**20, 2**30


def installed(module: str) -> bool:
  """Here or aside."""
  here = importlib.util.find_spec(module) is not None
  return here or bool(ASIDE and (pathlib.Path(ASIDE) / module).is_dir())


CUDA = pytest.mark.skipif(
  not installed("jax_cuda12_plugin"), reason="extra aot-cuda is missing"
)
TPU = pytest.mark.skipif(
  not installed("libtpu"), reason="extra aot-tpu is missing"
)
LONG = pytest.mark.timeout(1800)


def plan(topology: str, *words: str) -> dict:
  paths = [str(ROOT), ASIDE, os.environ.get("PYTHONPATH", "")]
  # What conftest.py tells the tests' own jax is not for this one.
  env = {"XLA_FLAGS": "", "JAX_PLATFORMS": ""}
  env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  command = [sys.executable, "-m", *words, f"--topology={topology}"]
  start = functools.partial(subprocess.run, command, env=os.environ | env,
    capture_output=True, text=True, timeout=800)  # fmt: skip
  done = start()
  # XLA forks a process of gigabytes for it, and asks the system once.
  if "Failed to launch ptxas" in done.stderr:
    done = start()
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


PLAN = "brorl_jax.main", "--mode=plan"
FAST = "--config=n512:1p5b", "--fast"
# Without what only a KL term, a second update or the theorem needs.
ONE = ("--config.reference.kl_weight=0", "--config.optim.minibatches=1")
ONE += ("--config.theory.prompts=0",)
MOE = *FAST, "--config.policy.checkpoint={}", "--config.devices.mesh_tensor=4"
LARGE = "--config=n512:8b", "--fast"
at_night = functools.partial(pytest.param, marks=[CUDA, pytest.mark.slow])


@LONG
@pytest.mark.parametrize("topology, words, copies, most", [
  # Hosts that sample by themselves copy the parameters first.
  pytest.param("h100:1x8", (*FAST, *ONE), 0, 25, marks=[CUDA, pytest.mark.ci]),
  at_night("h100:1x8", FAST, 0, 25), at_night("h100:8x8", LARGE, 1, 45),
  at_night("h100:8x8", MOE, 1, 36),
  pytest.param("v5p:2x2x2", FAST, 1, 25, marks=[TPU, pytest.mark.slow]),
])  # fmt: skip
def test_the_papers_run_fits_machines_not_here(
  topology, words, copies, most, tmp_path
):
  (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
  read = plan(topology, *PLAN, *(word.format(tmp_path) for word in words))
  devices = math.prod(map(int, topology.split(":")[1].split("x")))
  assert (read["topology"], read["devices"]) == (topology, devices)
  assert read["fits"] is True
  of = {p["name"]: p for p in read["programs"]}
  before = [*of].index("prefill")
  assert [*of][before - 1 - copies : before] == ["apply", *["copy"] * copies]
  assert 0 < of["gradient"]["temp_bytes"] <= most * GIB
  estimate = read["estimated_bytes"]["gradient"]
  assert of["gradient"]["peak_bytes"] <= estimate or topology[0] == "v"


@LONG
@pytest.mark.slow
@CUDA
def test_the_papers_run_asks_few_things_of_eight_h100():
  read = plan("h100:1x8", "launch.bench.ahead", *FAST)
  of = {p["name"]: p for p in read["programs"]}
  # A token of a policy that no devices share asks none of them.
  assert of["decode"]["messages"] == []
  # 28 layers: fewer than 22 kernels in each.
  assert 0 < of["decode"]["token_kernels"] <= 600
  # Gradients are reduced to where they lie: no device has a sum of all of one.
  # (A TPU's compiler makes its own of every reduction, also of a single one.)
  whole = [m for m in of["gradient"]["messages"] if m["kind"] == "all-reduce"
    and m["size_bytes"] >= MIB]  # fmt: skip
  assert whole == []
