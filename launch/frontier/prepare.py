"""Prompts and the policy that all arms of a task begin with.

  python -m launch.frontier.prepare runs/frontier/own own --scale=1

The folder gets policy/ and, for each pool, POOL.jsonl and POOL-heldout.jsonl.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable

from launch.frontier import countdown, exact, own, problems, shared, taught
from launch.frontier.machine import say

TASKS: dict[str, Callable[..., list[problems.Pair]]] = {
  "shared": shared.problems,
  "own": own.problems,
  "countdown": countdown.problems,
}
# Of a pool, and candidates of all classes, at scale 1.
PROMPTS = {"shared": 256, "own": 128, "countdown": 128}
CANDIDATES = {"shared": 2048, "own": 1024, "countdown": 256}
STEPS = 600  # of the warm-up


def write(path: pathlib.Path, some: Iterable[problems.Problem]) -> None:
  lines = [json.dumps(problems.example(one)) + "\n" for one in some]
  path.write_text("".join(lines))


def prepare(directory: pathlib.Path, task: str, *, scale: int) -> None:
  """All of a folder."""
  directory.mkdir(parents=True, exist_ok=True)
  some = TASKS[task](count=CANDIDATES[task] * scale, seed=0)
  taught.teach(
    directory / "policy",
    [one for pair in some for one in (pair.train, pair.heldout)],
    seed=0,
    width=64 * scale,
    layers=1 + scale,
    steps=STEPS,
  )
  rates = exact.pass_rates(
    directory / "policy", [problems.example(pair.train) for pair in some]
  )
  for wanted in problems.CLASSES:
    every = zip(some, rates, strict=True)
    of = sorted(p for one, p in every if one.wanted == wanted)
    if not of:
      continue
    say(
      f"{task}, {wanted}: {len(of)} problems, p from {of[0]:.2g} over "
      f"{of[len(of) // 2]:.2g} to {of[-1]:.2g}"
    )
  aimed = {pair.wanted for pair in some}
  for name, (classes, times) in problems.POOLS.items():
    if not aimed.issuperset(classes):
      continue
    count = times * PROMPTS[task] * scale
    pairs = problems.pool(some, rates, classes, count=count)
    write(directory / f"{name}.jsonl", (pair.train for pair in pairs))
    write(directory / f"{name}-heldout.jsonl", (pair.heldout for pair in pairs))
  (directory / "done").touch()


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("task", choices=sorted(TASKS))
  parser.add_argument("--scale", type=int, default=1)
  a = parser.parse_args()
  prepare(a.directory, a.task, scale=a.scale)


if __name__ == "__main__":
  main()
