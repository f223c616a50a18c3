"""Which steps of a run its files hold, after a kill or a loss of power."""

import math
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import lines


class Covered(NamedTuple):
  """What metrics.jsonl and eval/ of a run hold.

  Attributes:
    workdir: Of the run.
    steps: Lines of metrics.jsonl.
    evaluations: Step of each evaluation -> its records, and how many they
      should be, None where an older version did not say.
    every: Steps between evaluations, of all starts of the run.
    last: Step that the newest start wanted to end with, with an evaluation.
  """

  workdir: pathlib.Path
  steps: int
  evaluations: Mapping[int, tuple[int, int | None]]
  every: int
  last: int | None

  def lacks(self, step: int) -> str | None:
    """What is missing of the steps up to this one, None if nothing."""
    if step > self.steps:
      path = self.workdir / "metrics.jsonl"
      return f"{path} does not hold the steps 1 to {step}, only {self.steps}"
    wanted = {*range(0, step + 1, self.every), *self.evaluations}
    wanted |= {step} if step == self.last else set()
    for one in sorted(e for e in wanted if e <= step):
      have, of = self.evaluations.get(one, (0, None))
      if one not in self.evaluations:
        path = self.workdir / "eval" / "curve.jsonl"
        return f"{path} lacks the evaluation of step {one}"
      if of is not None and have != of:
        path = self.workdir / "eval" / "records.jsonl"
        return f"{path} has {have} of {of} records of step {one}"
    return None


def look(workdir: pathlib.Path, starts: Sequence[Mapping[str, Any]]) -> Covered:
  """Reads the files of a run; nothing is changed.

  Args:
    workdir: Of the run.
    starts: The config of each start, the newest first.

  Raises:
    Damaged: A line cannot be read, or is missing, and lines after it are there.
  """
  evaluations = {}
  count = Counter(x["step"] for x in _lines(workdir / "eval/records.jsonl"))
  for line in _lines(workdir / "eval/curve.jsonl"):
    said = line.get("summary")
    said = said.get("all", {}) if isinstance(said, dict) else {}
    of = said.get("prompts", 0) * said.get("samples", 0)
    evaluations[line["step"]] = count[line["step"]], of or None
  # Starts with another eval_every have only these in common.
  every = math.lcm(*(c["eval_every"] for c in starts if "eval_every" in c))
  return Covered(
    workdir,
    _steps(workdir / "metrics.jsonl"),
    evaluations,
    every,
    starts[0].get("steps") if starts else None,
  )


def _steps(path: pathlib.Path) -> int:
  """How many steps there are, from the first on and without a gap."""
  count = 0
  for line in _lines(path):
    count += 1
    if line["step"] != count:
      raise lines.Damaged(f"{path}, line {count}: is not of step {count}")
  return count


def _lines(path: pathlib.Path):
  return lines.each_whole(path) if path.exists() else ()
