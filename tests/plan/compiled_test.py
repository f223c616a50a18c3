"""Programs and their memory; the paper's run on machines that are not here."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import runs_ahead as made
from messages import mentions
from small_policies import GEMMA2, changed

from brorl_jax.plan import compiled
from brorl_jax.plan.memory import TooLarge
from brorl_jax.plan.programs import Program

ROOT = pathlib.Path(__file__).parents[2]
# Of `pip install --target`, with a compiler that the tests' own environment
# must not have: with libtpu in it jax looks for a TPU at every start.
ASIDE = os.environ.get("BRORL_AOT", "")
PROGRAMS = [
  "score", "gradient", "apply", "prefill", "decode", "read", "admit", "compact",
  "take",
]  # fmt: skip
MIB, GIB = 2**20, 2**30
PLAN = "brorl_jax.main", "--mode=plan"
ROOFLINE = ("launch.bench.roofline",)


def installed(module: str) -> bool:
  """Here or aside."""
  here = importlib.util.find_spec(module) is not None
  return here or bool(ASIDE and (pathlib.Path(ASIDE) / module).is_dir())


def needs(module: str, extra: str):
  return pytest.mark.skipif(
    not installed(module), reason=f"{module} is missing: extra {extra}"
  )


def plan(topology: str, *module: str) -> dict:
  """The line of JSON of a command."""
  paths = [str(ROOT), ASIDE, os.environ.get("PYTHONPATH", "")]
  # What conftest.py tells the tests' own jax is not for this one.
  told = {"XLA_FLAGS": "", "JAX_PLATFORMS": ""}
  done = subprocess.run(
    [
      *(sys.executable, "-m", *module, "--fast"),
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


@pytest.mark.ci
@pytest.mark.timeout(1800)
@needs("jax_cuda12_plugin", "aot-cuda")
def test_the_papers_run_fits_eight_h100():
  check(plan("h100:1x8", *PLAN), "h100:1x8", hosts=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs("jax_cuda12_plugin", "aot-cuda")
def test_the_papers_run_asks_few_things_of_eight_h100():
  of = programs(plan("h100:1x8", *ROOFLINE))
  # A token of a policy that no devices share asks none of them.
  assert of["decode"]["messages"] == []
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
  check(plan("v5p:2x2x2", *PLAN), "v5p:2x2x2", hosts=2)


def of_compiler(outputs, aliased):
  """As XLA's, of a program that needs 40 bytes for itself."""
  memory = SimpleNamespace(
    temp_size_in_bytes=40,
    output_size_in_bytes=outputs,
    alias_size_in_bytes=aliased,
  )
  return SimpleNamespace(memory_analysis=lambda: memory)


def test_memory_of_a_program():
  one = lambda *sizes: (Program("a", None, 100, 2), of_compiler(*sizes))
  (found,) = compiled.needs(made.run(), [one(50, 30)])
  assert (found.held_bytes, found.temp_bytes, found.new_bytes) == (100, 40, 20)
  assert found.peak_bytes == 160
  # Results that are all written over arguments need nothing.
  (found,) = compiled.needs(made.run(), [one(20, 30)])
  assert found.new_bytes == 0


def test_two_and_three_layers_stand_for_more():
  job = made.run(changed(layers=7), fast=True)
  few = [(Program("decode", None, 100, 2), of_compiler(39, 30))]
  few += [(Program("decode", None, 130, 3), of_compiler(34, 30))]
  (found,) = compiled.needs(job, few)
  # Of 7 layers 5 are more than those of two. Less for more layers is chance.
  assert found == compiled.Needs("decode", 100 + 5 * 30, 40, 9)


@pytest.mark.parametrize(
  "policy, says", [(changed(layers=3), "has 3"), (GEMMA2, "which slide")]
)
def test_a_policy_that_few_layers_do_not_stand_for(policy, says):
  with pytest.raises(ValueError) as e:
    compiled.compile_all(made.run(policy, fast=True), made.topology())
  assert mentions(str(e.value), f"--fast ... {says} ... leave --fast out")


def test_every_program_is_compiled_once(monkeypatch):
  seen = []

  class Lowered:
    def compile(self, compiler_options):
      assert compiler_options == {}
      seen.append(self)
      return of_compiler(0, 0)

  def every(job, compile):
    compile(first := Lowered())
    yield Program("prefill", first, 100, 2)
    yield Program("decode", Lowered(), 170, 2)

  monkeypatch.setattr(compiled.programs, "every_program", every)
  found = compiled.compile_all(made.run(), made.topology())
  assert [p.name for p, _ in found] == ["prefill", "decode"]
  assert len(seen) == 2


@pytest.fixture
def show(monkeypatch, capsys):
  """What is printed of programs that were compiled."""

  def printed(*some, job=None):
    monkeypatch.setattr(compiled, "compile_all", lambda *_: [])
    monkeypatch.setattr(compiled, "needs", lambda *_: [*some])
    compiled.show(job or made.run(), made.topology())
    return capsys.readouterr().out.splitlines()

  return printed


def test_tables_and_a_line_of_json(show):
  large = made.needs("gradient", temp_bytes=500 * MIB)
  lines = show(made.needs("prefill"), large)
  assert lines[0] == (
    "programs of cpu:1x8: mesh (data=1, fsdp=8, tensor=1, expert=1), 2 layers"
  )
  assert [line.split() for line in lines[1:5]] == [
    "per device held itself peak of pool".split(),
    "prefill 2.00 MiB 3.00 MiB 5.00 MiB 0.5%".split(),
    "gradient 2.00 MiB 0.49 GiB 0.49 GiB 50.4%".split(),
    "pool 0.98 GiB".split(),
  ]
  # Rollouts of one page are not compacted: the decode loop and an empty page.
  # One length of responses, or trees: score and gradient; apply, and sums of
  # nothing.
  assert lines[5:-1] == [
    "programs to compile: at most 16 (6 of sampling, 6 of updating, 4 of "
    "evaluation)",
    "checkpoint: 83.01 KiB, written from the shards of 8 devices; at most 4 "
    "kept: 0.32 MiB",
  ]
  # Parameters, two moments and the reference, and three counters.
  saved = 16 * made.run().parameters + 3 * 4
  read = json.loads(lines[-1])
  first, _ = read.pop("programs")
  assert first == {
    "name": "prefill", "held_bytes": 2 * MIB, "temp_bytes": MIB,
    "new_bytes": 2 * MIB, "peak_bytes": 5 * MIB,
  }  # fmt: skip
  assert read == {
    "topology": "cpu:1x8", "devices": 8, "pool_bytes": made.POOL, "fits": True,
    "program_counts": {"sampling": 6, "updating": 6, "evaluation": 4},
    "checkpoint_bytes": saved,
  }  # fmt: skip


def test_a_fast_plan_says_what_it_compiled(show):
  lines = show(made.needs("prefill"), job=made.run(fast=True))
  assert lines[0].endswith("2 layers, decode with 2 and 3, no evaluation")


@pytest.mark.parametrize(
  ("name", "held", "itself", "nearest"),
  [
    # Of twice what there is, half, less what is kept anyway (10 and 20 MB).
    ("score", 0.5, 1.0, "optim.rows = 2"),
    ("decode", 0.0, 2.0, "sampling.slots = 1"),
    ("apply", 0.0, 2.0, "theory.prompts = 7"),
    ("gradient", 1.0, 0.1, None),
    ("gradient", 0.0, 5.0, None),
  ],
)
def test_what_does_not_fit_is_printed_and_refused_with_the_nearest(
  show, capsys, name, held, itself, nearest
):
  sizes = dict(held_bytes=held, temp_bytes=itself, new_bytes=0)
  sizes = {k: int(v * made.POOL) for k, v in sizes.items()}
  some = made.needs("prefill", temp_bytes=made.POOL), made.needs(name, **sizes)
  with pytest.raises(TooLarge) as e:
    show(*some, job=made.run(theory_prompts=16))
  said = str(e.value)
  assert said.startswith(f"{name} needs ")
  assert ("nearest" in said) == (nearest is not None)
  assert nearest is None or mentions(said, f"by its size: {nearest}, or choose")
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False


def test_what_just_fits_is_not_refused(show):
  show(made.needs("gradient", temp_bytes=made.POOL - 4 * MIB))
