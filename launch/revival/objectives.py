"""Which objective revives lost prompts, with which N; a table in Markdown.

  python -m launch.revival.objectives runs/objectives

Countdown of `run.py`: N = 16 trains for 60 processor seconds. From its step 225
each arm goes on for the same processor seconds, without a KL term, one update
per step. There some 45 of 64 prompts are lost (pass@1 below .05), and some 20
are within reach (1/512 to 1/16). What is told is exact: the probability of all
right answers, of the prompts that are trained on. Repeating the command resumes
it.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np

from brorl_jax.runs import lines, metrics
from launch.revival import machine
from launch.revival.machine import call

LOST, LOW = 0.05, 1 / 512  # pass@1 of lost prompts, and of those in reach
START_STEP = 225  # of the first policy; its rate is the best of three
# Rates are the best of 1e-4, 3.3e-4 and 1e-3 for N = 16 and 512.
ARMS = {
  "n16": 3.3e-4,
  "n512_paper": 1e-3,
  "adaptive": 1e-3,
  "n16_maxrl": 3.3e-4,
  "n512_maxrl": 1e-3,
  "n16_maxrl_wide": 1e-3,
  "adaptive_maxrl": 1e-3,
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One run."""

  root: pathlib.Path
  name: str
  seed: int
  seconds: float

  @property
  def folder(self) -> pathlib.Path:
    return self.root / f"{self.name}-{self.seed}"


def train(arm: Arm, cores: set[int], policy: pathlib.Path, every: int) -> None:
  """Trains an arm and reads its checkpoints, or goes on with it."""
  folder, data = arm.folder, arm.root / "countdown"
  done = folder / "done"
  if done.exists() and float(done.read_text()) >= arm.seconds:
    return
  values = {
    "run.seed": arm.seed,
    "optim.lr": ARMS[arm.name],
    "run.max_busy_s": arm.seconds,
    "run.save_every": every,
    "run.keep_checkpoints": 100_000,
    "eval.every": 100_000,
    "policy.checkpoint": policy,
    "data.files": f"('{data}/train.jsonl',)",
    "data.heldout_files": f"('{data}/heldout.jsonl',)",
  }
  call(
    folder,
    cores,
    *("-m", "brorl_jax.main", f"--workdir={folder}"),
    f"--config=configs/revival.py:countdown/{arm.name}/1",
    *(f"--config.{field}={value}" for field, value in values.items()),
  )
  call(folder, cores, "-m", "launch.revival.exact", data, folder)
  done.write_text(f"{arm.seconds}")


def row(arms: Sequence[Arm]) -> list[str]:
  """Of the seeds of an arm: pass@1, lost prompts, those in reach, samples."""
  found = []
  for arm in arms:
    read = metrics.read_lines(arm.folder / "exact.jsonl")
    first, last = (np.array(read[i]["train"]["pass_at_1"]) for i in (0, -1))
    near = (first >= LOW) & (first <= 1 / 16)
    line = metrics.read_lines(arm.folder / "metrics.jsonl")[-1]
    found.append(
      (
        f"{last.mean():.3f}",
        f"{(last < LOST).sum()}",
        f"{last[near].mean():.2f}",
        f"{line['data/samples_total']:,}",
      )
    )
  return [", ".join(each) for each in zip(*found, strict=True)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("root", type=pathlib.Path)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--seconds", type=float, default=180.0)
  asked = parser.parse_args()
  root = asked.root.resolve()
  every = set(os.sched_getaffinity(0))
  if not (root / "countdown" / "known.json").exists():
    call(
      root / "countdown", every,
      "-m", "launch.revival.countdown", root / "countdown", "--scale=1",
    )  # fmt: skip
  begin = Arm(root, "n16", 100, 60.0)
  train(begin, every, root / "countdown" / "policy", 25)
  policy, part = root / "policy", root / "exporting"
  if not policy.exists():
    shutil.rmtree(part, ignore_errors=True)
    call(
      part, every,
      "-m", "brorl_jax.main", "--mode=export", f"--workdir={part}",
      "--config=configs/revival.py:countdown/n16/1",
      f"--config.policy.checkpoint={begin.folder}/checkpoints/{START_STEP}",
    )  # fmt: skip
    part.rename(policy)
  lanes = machine.Machine(len(every))
  arms = [
    Arm(root, name, seed, asked.seconds)
    for seed in range(asked.seeds)
    for name in ARMS
  ]
  lanes.each(lambda arm, cores: train(arm, cores, policy, 30), arms)
  table = [
    "| arm | pass@1 | lost | of those in reach | samples |",
    "|" + "---|" * 5,
  ]
  for name in ARMS:
    cells = row([arm for arm in arms if arm.name == name])
    table.append(f"| {' | '.join([name, *cells])} |")
  print("\n".join(table))
  lines.write_whole(root / "table.md", "\n".join(table) + "\n")


if __name__ == "__main__":
  main()
