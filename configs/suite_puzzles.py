r"""Writes the puzzles of `suite:gym`, 100 of each task, to a file.

  python -m brorl_jax.configs.suite_puzzles DIR/gym.jsonl

87 of the 96 tasks of `suite.py`: 70 that an evaluation can also generate, and
17 that it cannot, because a puzzle takes long or differs between processes. It
is written by one process with PYTHONHASHSEED=0, so everyone who has the same
reasoning-gym has the same file. `--config=suite:gym,DIR` reads it. A task's own
answer must pass; questions are distinct.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brorl_jax.configs import suite
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import Family

COUNT = 100
_TRIES = 20 * COUNT  # puzzles of a task, at most
# Where the metadata of puzzles without an answer have one.
ANSWERS = {"rubiks_cube": "example_correct_answer"}


def stored(name: str, count: int = COUNT) -> Iterator[Mapping[str, Any]]:
  """Distinct puzzles of a task that is not generated in a run."""
  data = gym.library().create_dataset(name, seed=0, size=_TRIES)
  asked = set[str]()
  for i in range(_TRIES):
    with contextlib.redirect_stdout(io.StringIO()):  # bf prints
      # As a line holds it; gsm_symbolic has fractions in its metadata.
      entry = json.loads(json.dumps(data[i], default=str))
    if name in ANSWERS:
      entry["answer"] = entry["metadata"][ANSWERS[name]]
    if entry["question"] in asked or not entry["answer"]:
      continue
    if gym.verify(entry["answer"], entry).status == "pass":
      asked.add(entry["question"])
      yield entry
    if len(asked) == count:
      return


def generated(name: str, count: int = COUNT) -> Iterator[Mapping[str, Any]]:
  """Held-out puzzles of a task that a run may generate, or as many as are."""
  family = Family(name, suite.SETTINGS.get(name, {}))
  held = gym.heldout([family], per_family=count, seed=0, fewer=True)
  yield from (puzzle.entry for puzzle in held)


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2 or not argv[1].endswith(".jsonl"):
    sys.exit("usage: python -m brorl_jax.configs.suite_puzzles DIR/gym.jsonl")
  if os.environ.get("PYTHONHASHSEED") != "0":  # it is read when Python starts
    again = [sys.executable, "-m", "brorl_jax.configs.suite_puzzles", argv[1]]
    os.execve(sys.executable, again, os.environ | {"PYTHONHASHSEED": "0"})
  os.makedirs(os.path.dirname(argv[1]) or ".", exist_ok=True)
  part = f"{argv[1]}.part"
  with open(part, "w") as out:
    for name in sorted((*suite.GENERATED, *suite.FROM_FILE)):
      entries = [*(generated if name in gym.ALLOWED else stored)(name)]
      out.writelines(f"{json.dumps({'entry': e})}\n" for e in entries)
      print(f"{name}: {len(entries)}", flush=True)
  os.replace(part, argv[1])


if __name__ == "__main__":
  main(sys.argv)
