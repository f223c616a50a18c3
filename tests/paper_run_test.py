"""The commands of launch/paper/README.md in an empty folder, on stand-ins.

Two steps of the paper's run with a policy of two layers, a cache of the hub
that holds it, and rows of each set in their published columns. Responses have
16 tokens, 24 in evaluations, and steps 8 prompts, which are all kept.
"""

import json
import os
import pathlib
import shutil
import sys

import published_sets
import pytest
import saved_models
from launchers import lines, ran

from brorl_jax.model import huggingface

NAME, V2 = "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B", "v2"
ROWS = pathlib.Path(__file__).parent / "configs" / "suite_test.json"
SMALL = """--config.run.steps=2 --config.run.save_every=2 --config.eval.every=2
  --config.sampling.max_new_tokens=16
  --config.filter.keep=all --config.eval.prompts=1 --config.eval.n=2
  --config.data.puzzles=True --config.data.skip_bad=True""".split()


@pytest.fixture
def brorl(tmp_path):
  """Runs a command beside a cache of the hub, in which the policy is."""
  kept = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
  model = kept / "snapshots" / ("0" * 40)
  (kept / "refs").mkdir(parents=True)
  (kept / "refs" / V2).write_text(model.name)
  shutil.copytree(huggingface.ASSETS, model)
  saved_models.edit(model, num_hidden_layers=2, max_position_embeddings=131072)
  third = lambda t: [t.pop(name) for name in [*t] if ".layers.2." in name]
  saved_models.rewrite(model, third)
  env = {"HF_HUB_CACHE": f"{tmp_path}/hub", "HF_HUB_OFFLINE": "1"}

  def brorl(*flags):
    how = {"cwd": tmp_path, "env": os.environ | env, "timeout": 1800}
    done = ran(sys.executable, "-m", "brorl_jax.main", *flags, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

  return brorl


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_paper_from_its_sets_to_its_tables(tmp_path, brorl):
  files = published_sets.sets(tmp_path / "published")
  given = ",".join(f"{name}={path}" for name, path in files.items())
  said = brorl("--mode=prepare", f"--set={given}", "--workdir=data")
  assert said.count("12 kept, 1 dropped") == len(files) == 4
  data = "".join(f"'data/{name}.jsonl'," for name in files)
  for n in (16, 512):
    config = [f"--config=n{n}:1p5b", f"--config.data.files={data}", *SMALL]
    config += [f"--config.sampling.samples={8 * n}", f"--workdir=runs/n{n}"]
    brorl(*config, "--config.eval.max_new_tokens=24")
    steps = lines(tmp_path / "runs" / f"n{n}" / "metrics.jsonl")
    assert [s["data/samples_total"] for s in steps] == [8 * n, 2 * 8 * n]
    tasks = " ".join(key for step in steps for key in step)
    assert all(domain in tasks for domain in (*files, "_sorting"))
  for name, known in json.loads(ROWS.read_text())["rows"].items():
    published_sets.written(
      tmp_path / "suites" / f"{name}.jsonl", [known["row"]]
    )
  every = "--config=suite:math+code+stem+instructions,suites"
  folders = ["--workdir=runs/n16", "--workdir=runs/n512"]
  for at in ("runs/n16", "runs/n512", f"{NAME}@{V2}"):
    folders.append(f"--workdir=evals/{at[-4:]}")
    how = [f"--config.policy.checkpoint={at}", "--config.eval.n=2", folders[-1]]
    how += ["--config.data.prompt_tokens=1024"]
    brorl("--mode=evaluate", every, *how, "--config.eval.max_new_tokens=24")
  tables = brorl("--mode=report", "--paper", *folders)
  for said in "aime24 livecodebench ifeval BroRL ProRL RLVE JustRL".split():
    assert said in tables
