"""The paper's run, compiled for machines that are not here."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Of `pip install --target`, with a compiler that the tests' own environment
# must not have: with libtpu in it jax looks for a TPU at every start.
ASIDE = os.environ.get("BRORL_AOT", "")
PROGRAMS = [
  "score", "gradient", "apply", "prefill", "decode", "read", "admit", "compact",
  "take",
]  # fmt: skip
MIB, GIB = 2**20, 2**30


def installed(module: str) -> bool:
  """Here or aside."""
  here = importlib.util.find_spec(module) is not None
  return here or bool(ASIDE and (pathlib.Path(ASIDE) / module).is_dir())


def needs(module: str, extra: str):
  return pytest.mark.skipif(
    not installed(module), reason=f"{module} is missing: extra {extra}"
  )


def plan(topology: str) -> dict:
  """The line of JSON of the command."""
  paths = [str(ROOT), ASIDE, os.environ.get("PYTHONPATH", "")]
  # What conftest.py tells the tests' own jax is not for this one.
  told = {"XLA_FLAGS": "", "JAX_PLATFORMS": ""}
  done = subprocess.run(
    [
      *(sys.executable, "-m", "brorl_jax.main", "--mode=plan", "--fast"),
      *("--config=n512:1p5b", f"--topology={topology}"),
    ],
    env=os.environ
    | told
    | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    capture_output=True,
    text=True,
    timeout=1700,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


def programs(read: dict) -> dict[str, dict]:
  return {p["name"]: p for p in read["programs"]}


def check(read: dict, topology: str, *, hosts: int) -> None:
  assert (read["topology"], read["devices"]) == (topology, 8)
  assert read["fits"] is True
  of = programs(read)
  # Hosts that sample by themselves copy the parameters first.
  copy = ["copy"] if hosts > 1 else []
  assert [*of] == [*PROGRAMS[:3], *copy, *PROGRAMS[3:]]
  assert of["gradient"]["temp_bytes"] <= 25 * GIB
  # A token of a policy that no devices share asks none of them.
  assert of["decode"]["messages"] == []


@pytest.mark.ci
@pytest.mark.timeout(1800)
@needs("jax_cuda12_plugin", "aot-cuda")
def test_the_papers_run_fits_eight_h100():
  read = plan("h100:1x8")
  check(read, "h100:1x8", hosts=1)
  of = programs(read)
  # 28 layers: fewer than 22 kernels in each.
  assert 0 < of["decode"]["token_kernels"] <= 600
  # Gradients are reduced to where they lie: no device has a sum of all of one.
  # (A TPU's compiler makes its own of every reduction, also of a single one.)
  whole = [
    m
    for m in of["gradient"]["messages"]
    if m["kind"] == "all-reduce" and m["size_bytes"] >= MIB
  ]
  assert whole == []


@pytest.mark.ci
@pytest.mark.timeout(1800)
@needs("libtpu", "aot-tpu")
def test_the_papers_run_fits_a_cube_of_v5p():
  check(plan("v5p:2x2x2"), "v5p:2x2x2", hosts=2)
