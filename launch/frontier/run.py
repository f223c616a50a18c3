"""The frontier: N by budget, on prompts of known difficulty.

  python -m launch.frontier.run runs/frontier --budget=2

A question compares values of N where all else is equal: task, pool, advantage,
samples per step, recipe. For each N

1. the learning rate is tuned, by factors of 2 and with its own seed, for
   each budget: the best rate must be between two that were tried. Otherwise the
   grid is extended;
2. each budget is run at its rate with other seeds.

Budgets double. Before the largest one is run, it is predicted from the smaller
ones (`analysis.py`), and the prediction is written down. `plateau.py` follows
with the test of BroRL's claim.

Every run is `python -m brorl_jax.main` in its own folder, on its own core.
Repeating the command resumes; what has a result is not run again.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Sequence

from brorl_jax.runs import lines
from launch.frontier import analysis, arms, machine, plateau, prepare
from launch.frontier.arms import Arm
from launch.frontier.machine import say
from launch.frontier.tuning import Experiment, OutOfTime, last_use, tune

GRID = (-11.0, -10.0, -9.0)  # powers of 2
NS = (8, 32, 128, 512)
MORE = (8, 16, 32, 64, 128, 256, 512, 1024, "adaptive")


@dataclasses.dataclass(frozen=True)
class Question:
  """What is equal for all N that it compares.

  Attributes:
    task: As of an Arm.
    pool: As of an Arm.
    advantage: As of an Arm.
    samples: Of a step.
    recipe: As of an Arm.
    ns: Rollouts per prompt.
    grid: Powers of 2 that are tried first as rates.
    decayed: Whether the rate falls to 0 with the budget. Then only the largest
      budget is run: each one would need its own runs.
  """

  task: str
  pool: str
  advantage: str
  samples: int = 2048
  recipe: str = "plain"
  ns: tuple[int | str, ...] = NS
  grid: tuple[float, ...] = GRID
  decayed: bool = False

  def cells(self, doubled: int) -> list[Arm]:
    """An arm for each N, without rate and seed."""
    most = analysis.budgets(self.task, doubled)[-1]
    return [
      Arm(
        self.task, self.pool, n, self.samples, self.advantage, self.recipe,
        power=0, seed=0, budget=most if self.decayed else 0,
        decayed=self.decayed,
      )
      for n in self.ns
    ]  # fmt: skip

  def budgets(self, doubled: int) -> list[int]:
    every = analysis.budgets(self.task, doubled)
    return every[-1:] if self.decayed else every


FIRST = (
  Question("own", "hard", "maxrl"),
  Question("shared", "hard", "maxrl"),
  Question("own", "hard", "leave_one_out"),
  Question("shared", "hard", "leave_one_out"),
)
THEN = (
  Question("countdown", "hard", "maxrl"),
  Question("own", "hard", "maxrl", decayed=True),
  Question("own", "mixed", "maxrl"),
  Question("own", "mixed", "leave_one_out"),
  Question("own", "hard", "maxrl", ns=MORE),
  Question("own", "hard", "grpo"),
  Question("own", "hard", "leave_one_out", decayed=True),
  Question("countdown", "hard", "leave_one_out"),
  Question("own", "mixed", "tokens", recipe="whole", ns=(16, 64, 512)),
  Question("own", "easy", "leave_one_out"),
  Question("own", "hard", "maxrl", samples=8192, ns=(16, 32, 128, 512)),
  Question("shared", "mixed", "maxrl"),
)
ANSWERS_WITH_STEPS = (
  Question(
    "reasoning", "puzzles", "tokens", samples=512, recipe="whole",
    ns=(16, 64, 512), grid=(-13.0, -12.0, -11.0),
  ),
)  # fmt: skip
# Questions, doubles of the smallest budget, seeds. The second of two doubles is
# predicted from what is there before it.
STAGES: tuple[tuple[Sequence[Question], int, tuple[int, ...]], ...] = (
  (FIRST, 2, (0, 1)),
  (FIRST, 3, (0, 1)),
  (THEN, 2, (0, 1)),
  (FIRST, 4, (0, 1, 2, 3, 4)),
  (THEN, 3, (0, 1)),
  (ANSWERS_WITH_STEPS, 2, (0, 1)),
)


def questions() -> list[tuple[Question, int]]:
  """Each question at the largest double of its stages, largest first."""
  every = {(q, doubled) for some, doubled, _ in STAGES for q in some}
  order = [q for some, _, _ in STAGES for q in some]
  return sorted(every, key=lambda one: (order.index(one[0]), -one[1]))


def answer(
  e: Experiment,
  questions: Sequence[Question],
  doubled: int,
  seeds: Iterable[int],
) -> None:
  """Tunes and runs all cells of the questions."""
  for task in dict.fromkeys(q.task for q in questions):
    ready(e, task)
  of = {cell: q for q in questions for cell in q.cells(doubled)}
  best = tune(
    e,
    [*of],
    lambda cell: of[cell].budgets(doubled),
    lambda cell: of[cell].grid,
  )
  e.each(
    dataclasses.replace(cell, power=power, seed=seed, budget=budget)
    for seed in seeds
    for cell in of
    for power, budget in last_use(best[cell]).items()
  )


def predict(
  e: Experiment,
  questions: Sequence[Question],
  doubled: int,
  seeds: Iterable[int],
) -> None:
  """Writes down what smaller budgets say of the largest, before it is run."""
  path = e.results / "predictions" / f"frontier-{doubled}.json"
  known = arms.read(path) or {}
  for q in questions:
    if q.decayed:
      continue
    cells = [analysis.Cell(e.results, c, seeds) for c in q.cells(doubled)]
    found = analysis.predicted(cells, q.budgets(doubled)[-1])
    if found is not None:
      known[analysis.question_of(cells[0].arm)] = found
  if known:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines.write_whole(path, json.dumps(known, indent=1) + "\n")


def ready(e: Experiment, task: str) -> None:
  """Prompts and policy of a task."""
  folder = e.root / task
  if task not in prepare.TASKS or (folder / "done").exists():
    return
  say(f"{task}: prompts and warm-up")
  what = "launch.frontier.prepare", folder, task, f"--scale={e.scale}"
  machine.call(folder, os.sched_getaffinity(0), "-m", *what)


def follow(e: Experiment) -> None:
  """All stages, in their order; the plateau after the first."""
  for i, (questions, doubled, seeds) in enumerate(STAGES):
    if i == 1:
      ready(e, plateau.START.task)
      plateau.go(e)
    predict(e, questions, doubled, seeds)
    answer(e, questions, doubled, seeds)


def keep_scale(root: pathlib.Path, scale: int) -> None:
  """Refuses another scale: results of both would have the same names."""
  path = root / "scale"
  before = int(path.read_text()) if path.exists() else scale
  if before != scale:
    raise SystemExit(
      f"error: {root} was begun with --scale={before}, not {scale}: give that "
      "again, or another WORKDIR="
    )
  root.mkdir(parents=True, exist_ok=True)
  lines.write_whole(path, f"{scale}\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("root", type=pathlib.Path)
  parser.add_argument("--budget", type=float, default=2.0, help="hours")
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1)
  a = parser.parse_args()
  if a.scale < 1 or a.lanes < 1 or not 0 < a.budget < math.inf:
    parser.error("--scale and --lanes are at least 1, --budget is above 0")
  root = a.root.absolute()
  with machine.one_line():
    keep_scale(root, a.scale)
  machine.share_a_gpu(a.lanes)
  e = Experiment(
    root,
    root / "results",
    a.scale,
    machine.Machine(a.lanes),
    time.monotonic() + 3600.0 * a.budget,
  )
  try:
    follow(e)
    say("all is done")
  except OutOfTime:
    say("the hours are spent; the same command resumes")
  except KeyboardInterrupt:
    say("interrupted; the same command resumes")
    os._exit(130)  # the runs end with this process


if __name__ == "__main__":
  main()
