"""One run by 1, 2 and 4 processes of this machine, and what ends them."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import compiling
import numpy as np
import pytest
import safetensors.numpy

from brorl_jax import processes
from brorl_jax.main.commands import export

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 4  # of all processes together
REWARD = """
def score(response, example):
  # About half of all responses are right, so most groups have a gradient.
  return float(len(response) % 2 == int(example["answer"]) % 2)
"""
SMALL = """
  --config=n512 --config.sampling.n=8 --config.sampling.samples=64
  --config.sampling.in_flight=64 --config.sampling.max_new_tokens=8
  --config.data.prompt_tokens=32
  --config.optim.rows=4 --config.optim.blocks=4 --config.theory.prompts=2
  --config.theory.responses=4 --config.theory.tokens=4
  --config.eval.prompts=6 --config.eval.n=2 --config.eval.every=1
  --config.run.steps=2 --config.run.save_every=1
  --config.reward.verifier=('reward.py:score',)
  --config.data.files=('train.jsonl',) --config.data.heldout_one_in=5
""".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
  """A folder with a reward and data."""
  folder = tmp_path_factory.mktemp("many")
  (folder / "reward.py").write_text(REWARD)
  lines = [
    {"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
    for a in range(10)
    for b in range(5)
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "train.jsonl").write_text(text)
  return folder


class Many:
  """The processes of a run."""

  def __init__(
    self, site, workdir, count, *words, devices=DEVICES, of=lambda i: ()
  ):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    env = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": str(devices // count),
      "XLA_FLAGS": compiling.QUICK,
      "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "brorl_jax.main", f"--workdir={workdir}"]
    command += [*SMALL, *words]
    self.logs = [
      workdir.parent / f"{workdir.name}.{port}.{i}" for i in range(count)
    ]
    self.workdir, self.every = workdir, []
    for i, log in enumerate(self.logs):
      many = (
        f"--coordinator=127.0.0.1:{port}",
        f"--processes={count}",
        f"--process_id={i}",
      )
      with log.open("w") as out:
        self.every.append(
          subprocess.Popen(
            [*command, *(many if count > 1 else ()), *of(i)],
            cwd=site, env=env, stdout=out, stderr=subprocess.STDOUT,
          )
        )  # fmt: skip

  def __enter__(self) -> "Many":
    return self

  def __exit__(self, *_) -> None:
    for one in self.every:
      one.kill()
      one.wait()

  def ended(self, *which: int, within_s: float = 400) -> list[int]:
    """Exit statuses, of these or of all."""
    end = time.monotonic() + within_s
    return [
      self.every[i].wait(max(end - time.monotonic(), 0.1))
      for i in which or range(len(self.every))
    ]

  def said(self, i: int) -> str:
    return self.logs[i].read_text()

  def steps(self) -> int:
    """Lines of metrics.jsonl."""
    path = self.workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def trained(site, workdir, count, *words, **how):
  """A run that is left alone; its folder."""
  with Many(site, workdir, count, *words, **how) as many:
    statuses = many.ended()
    assert statuses == [0] * count, "\n".join(map(many.said, range(count)))
  return workdir


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  to = workdir.parent / f"{workdir.name} exported"
  if not to.exists():
    export.run(workdir, to)
  return safetensors.numpy.load_file(to / "model.safetensors")


def lines(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]
