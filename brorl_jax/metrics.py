"""Where numbers go: one JSON object per line, TensorBoard, and the terminal."""

import collections
import contextlib
import math
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
import tensorboardX
from jaxtyping import Bool, Float

from brorl_jax.lines import Damaged as Damaged
from brorl_jax.lines import JsonLines, read_lines
from brorl_jax.lines import each_line as each_line
from brorl_jax.types import Rollouts, Scores

# Shown while the run goes on; the rest is in the files.
_SHOWN = {
  "reward/mean": "reward",
  "sampling/pass_rate": "kept",
  "policy/entropy": "entropy",
  "rollout/tokens_per_s": "tokens/s",
  "eval/pass_at_1": "held-out pass@1",
}


class Writer:
  """Scalars of each step: metrics.jsonl, TensorBoard events, progress."""

  def __init__(
    self,
    workdir: str | pathlib.Path,
    *,
    after: int,
    steps: int,
    warn: Callable[[str], None] | None = None,
  ):
    """Continues the files of a run.

    Args:
      workdir: Of the run.
      after: Last step that is done; lines of later ones are dropped.
      steps: Last step of the run.
      warn: Receives one line for each line that cannot be read.
    """
    workdir = pathlib.Path(workdir)
    path = workdir / "metrics.jsonl"
    self._lines = JsonLines(path, after=after, warn=warn)
    self.busy_s = math.fsum(x.get("time/busy_s", 0) for x in read_lines(path))
    self._board = tensorboardX.SummaryWriter(
      str(workdir), purge_step=after + 1, write_to_disk=True, flush_secs=1
    )
    _keep_going(self._board)
    self._progress = Progress(after=max(after, 0), steps=steps)

  def write_scalars(self, step: int, scalars: Mapping[str, float | None]):
    """One line of metrics.jsonl. None is null: not measured in this run."""
    self._lines.write({"step": step, **scalars})
    self._show(step, scalars)
    self._progress.step(step, numbers(scalars))

  def sync(self) -> None:
    """Returns when a loss of power does not lose the lines."""
    self._lines.sync()

  def write_evaluation(self, step: int, scalars: Mapping[str, float]):
    """An evaluation: to TensorBoard and the terminal."""
    self._show(step, scalars)
    self._progress.say(step, numbers(scalars))

  def say(self, step: int, text: str) -> None:
    """To the terminal alone."""
    self._progress.say(step, text)

  def _show(self, step, scalars):
    for name, value in scalars.items():
      if value is not None:
        self._board.add_scalar(name, value, step)

  def close(self) -> None:
    self._lines.close()
    self._board.close()
    self._progress.close()


def _keep_going(board: tensorboardX.SummaryWriter) -> None:
  """TensorBoard's thread outlives a full disk, of which other files tell.

  It would end with a traceback, and the run would then wait for it for ever.
  """
  file: Any = board._get_file_writer()
  events = file.event_writer._ev_writer
  events.write_event = _unless_it_fails(events.write_event)
  events.flush = _unless_it_fails(events.flush)
  events.close = _unless_it_fails(events.close)


def _unless_it_fails(write: Callable[..., object]) -> Callable[..., None]:
  def quiet(*args: object) -> None:
    with contextlib.suppress(OSError):
      write(*args)

  return quiet


class Progress:
  """A bar on a terminal, one plain line per step elsewhere."""

  def __init__(self, *, after: int, steps: int, unit: str = "step"):
    """Starts.

    Args:
      after: Steps that were done before.
      steps: All of them.
      unit: What a step is called.
    """
    self._steps, self._unit = steps, unit
    self._first, self._start = after, time.monotonic()
    self._bar = None
    if sys.stderr.isatty():
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn(unit),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[numbers]}"),
        console=rich.console.Console(stderr=True),
      )
      self._task = self._bar.add_task(
        "", total=steps, completed=after, numbers="compiling"
      )
      self._bar.start()

  def step(self, step: int, numbers: str) -> None:
    """A step is done."""
    if self._bar is not None:
      self._bar.update(self._task, completed=step, numbers=numbers)
      return
    spent = time.monotonic() - self._start
    left = spent / (step - self._first) * (self._steps - step)
    print(
      f"{self._unit} {step}/{self._steps}  {numbers}  {spent:.0f} s, "
      f"{left:.0f} s left",
      file=sys.stderr,
      flush=True,
    )

  def say(self, step: int, numbers: str) -> None:
    """Something else that happened at a step."""
    line = f"{self._unit} {step}/{self._steps}  {numbers}"
    if self._bar is not None:
      self._bar.console.print(line, highlight=False)
    else:
      print(line, file=sys.stderr, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()


def numbers(scalars: Mapping[str, float | None]) -> str:
  """The few scalars that are shown, as text."""
  digits = lambda value: ",.0f" if value >= 100 else ".3f"
  shown = [(label, scalars.get(name)) for name, label in _SHOWN.items()]
  return "  ".join(f"{k} {v:{digits(v)}}" for k, v in shown if v is not None)


def of_groups(
  rollouts: Rollouts,
  scores: Scores,
  informative: Bool[np.ndarray, " P"],
  *,
  rollout_s: float,
) -> dict[str, float]:
  """What a step's rollouts look like, kept or not; rewards of judged ones.

  Args:
    rollouts: On the host.
    scores: Of the rollouts.
    informative: Which groups dynamic sampling kept, whatever its rule.
    rollout_s: Seconds that sampling took.
  """
  length = rollouts.mask.sum(axis=2)
  reward, some = scores.reward, scores.valid.any(axis=1)
  std = reward[some].std(axis=1, where=scores.valid[some])
  high = reward.max(axis=1, where=scores.valid, initial=-np.inf)
  low = reward.min(axis=1, where=scores.valid, initial=np.inf)  # std rounds
  return {
    "reward/mean": float(reward.mean(where=scores.valid)),
    "reward/std_within_group": float(std.mean()),
    "reward/variance_within_group": float((std**2).mean()),
    "sampling/pass_rate": float(informative.mean()),
    "sampling/degenerate_fraction": float((high <= low).mean()),
    "sampling/rollouts_per_prompt": float(reward.shape[1]),
    "rollout/tokens_per_s": float(length.sum() / rollout_s),
    "rollout/samples_per_s": float(reward.size / rollout_s),
    "rollout/slot_occupancy": rollouts.slot_occupancy(),
    "rollout/length_mean": float(length.mean()),
    "rollout/truncated_fraction": float(rollouts.truncated.mean()),
    "theory/correct_mass": float(correct_mass(rollouts, reward).mean()),
    "memory/peak_bytes": peak_bytes(),
  }


def of_scores(scores: Scores, *, score_s: float) -> dict[str, float]:
  """What a step's verdicts look like.

  Args:
    scores: Of all that was generated.
    score_s: Seconds that judging took.
  """
  judged, valid = scores.judged, scores.valid
  by_task = collections.defaultdict[str, list[int]](list)
  for p, row in enumerate(judged):
    if valid[p].any():
      by_task[row[0].task].append(p)
  mean = lambda p: float(scores.reward[p].mean(where=valid[p]))
  passed = np.array([[one.verdict.reward for one in row] for row in judged])
  return {
    # Of all parts of an answer, where the reward may be that of some.
    "reward/strict_mean": float(passed.mean(where=valid)),
    "reward/invalid_fraction": float(1.0 - valid.mean()),
    "score/verdicts_per_s": float(judged.size / max(score_s, 1e-9)),
    **{f"reward/by_task/{t}": mean(p) for t, p in sorted(by_task.items())},
  }


def correct_mass(
  rollouts: Rollouts, reward: Float[np.ndarray, "P N"]
) -> Float[np.ndarray, " P"]:
  """Probability of the distinct rewarded responses that were seen.

    mass[p] = sum of exp(sum_t logp[p,n,t]) over distinct n of reward 1

  A lower bound of the probability of a right response, Q_pos in the paper: it
  approaches it from below as N grows.
  """
  mass = np.zeros(len(reward))
  probability = np.exp(rollouts.logp.sum(axis=2, dtype=np.float64))
  for p in range(len(reward)):
    first, _ = rollouts.distinct(p)
    mass[p] = probability[p, first[reward[p, first] >= 1.0]].sum()
  return mass


def first_not_finite(scalars: Mapping[str, float | None]) -> str | None:
  """Name of the first value that is NaN or infinite, or None."""
  for name, value in scalars.items():
    if value is not None and not math.isfinite(value):
      return name
  return None


def peak_bytes() -> int:
  """Most memory in use so far: of the first device, or of this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
