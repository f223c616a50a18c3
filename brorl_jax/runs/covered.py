"""The steps of a run that its files cover after a kill or a power loss."""

import math
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.runs import lines


class Covered(NamedTuple):
  """The contents of metrics.jsonl and eval/ of a run."""

  workdir: pathlib.Path
  steps: int  # number of lines of metrics.jsonl
  # From the step of each evaluation to whether it has all records.
  evaluations: Mapping[int, bool]
  every: int  # steps between the evaluations that all starts of the run share
  # Last step of the newest start, which ends with an evaluation.
  last: int | None

  def lacks(self, step: int) -> str | None:
    """Why the files do not cover the steps up to this one, None if they do."""
    if step > self.steps:
      path = self.workdir / "metrics.jsonl"
      return f"{path} has no step {step}: it ends with step {self.steps}"
    wanted = {*range(0, step + 1, self.every), *self.evaluations}
    wanted |= {step} if step == self.last else set()
    for at in sorted(wanted):
      if at <= step and not self.evaluations.get(at):
        return f"{self.workdir / 'eval'} has no whole evaluation of step {at}"
    return None


def look(workdir: pathlib.Path, starts: Sequence[Mapping[str, Any]]) -> Covered:
  """Reads the files of a run and changes nothing.

  Args:
    starts: The config of each start, the newest first.

  Raises:
    Damaged: A line is unreadable, missing or another one, and later lines
      exist.
  """
  evaluations = {}
  records = Counter(x["step"] for x in _lines(workdir / "eval/records.jsonl"))
  for line in _lines(workdir / "eval/curve.jsonl", _has_size):
    evaluations[line["step"]] = records[line["step"]] == _wanted(line)
  # Starts with different values of eval.every share only these steps.
  every = math.lcm(
    *(max(1, c.get("eval", {}).get("every") or 1) for c in starts)
  )
  last = starts[0].get("run", {}).get("steps") if starts else None
  count = _steps(workdir / "metrics.jsonl")
  return Covered(workdir, count, evaluations, every, last)


def _has_size(line: Any) -> None:
  """Raises ValueError if it does not say how many records there are."""
  lines.has_step(line)
  try:
    _wanted(line)
  except (KeyError, TypeError, ValueError, OverflowError):
    raise ValueError("'summary' is not what a run writes") from None


def _wanted(line: Mapping[str, Any]) -> int:
  """How many records an evaluation has."""
  total = line["summary"]["all"]
  return int(total["prompts"]) * int(total["samples"])


def _steps(path: pathlib.Path) -> int:
  """The number of steps from the first on, without a gap."""
  count = 0
  for line in _lines(path, lines.has_scalars):
    count += 1
    if line["step"] != count:
      raise lines.Damaged(
        f"{path}, line {count}: the step is {line['step']}, not {count}"
      )
  return count


def _lines(path: pathlib.Path, check=lines.has_step):
  return lines.each_whole(path, check) if path.exists() else ()
