"""Metrics: computed from rollouts, written to metrics.jsonl and trackers."""

import collections
import contextlib
import math
import operator
import pathlib
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax.errors import printable
from brorl_jax.many import processes
from brorl_jax.runs import trackers
from brorl_jax.runs.lines import Damaged as Damaged
from brorl_jax.runs.lines import JsonLines
from brorl_jax.runs.lines import each_line as each_line
from brorl_jax.runs.lines import read_lines as read_lines
from brorl_jax.types import Groups, Rollouts, Scores

T = TypeVar("T")

# Longer runs may take ten steps a second; a line a second is shown of them.
_FEW_STEPS = 200
# Metrics shown on the terminal; the files have all of them.
_SHOWN = {
  "reward/mean": "reward",
  "sampling/pass_rate": "kept",
  "policy/entropy": "entropy",
  "rollout/tokens_per_s": "tokens/s",
  "eval/pass_at_1": "held-out pass@1",
}


class Writer:
  """Writes the scalars of each step: metrics.jsonl, trackers, terminal."""

  def __init__(
    self,
    workdir: str | pathlib.Path,
    *,
    after: int,
    steps: int,
    warn: Callable[[str], None] | None = None,
    wandb: str = "",
    config: Mapping[str, Any] | None = None,
  ):
    """Continues the files of a run after a step; drops what is later."""
    workdir = pathlib.Path(workdir)
    self._lines = JsonLines(workdir / "metrics.jsonl", after=after, warn=warn)
    self._progress = Progress(after=max(after, 0), steps=steps)
    self._steps, self._next = steps, -math.inf
    self._trackers: list[trackers.TensorBoard | trackers.Wandb] = [
      trackers.TensorBoard(workdir, after=after)
    ]
    if wandb:
      warn = warn or (lambda text: self.say(max(after, 0), text))
      board = trackers.Wandb(workdir, wandb, config=config or {}, warn=warn)
      self.say(max(after, 0), f"wandb: {board.where}")
      self._trackers.append(board)

  def write_scalars(
    self,
    step: int,
    scalars: Mapping[str, float | None],
    drawn: trackers.Values | None = None,
  ):
    """Writes a line of metrics.jsonl; None is null. `drawn`: for trackers."""
    self._lines.write({"step": step, **scalars})
    self._show(step, {**scalars, **(drawn or {})})
    now = time.monotonic()
    if self._steps <= _FEW_STEPS or step == self._steps or now > self._next:
      self._next = now + 1.0
      self._progress.step(step, numbers(scalars))

  def sync(self) -> None:
    """Returns when the lines survive a power loss."""
    self._lines.sync()

  def write_evaluation(
    self, step: int, scalars: Mapping[str, float], short: str = "", text=""
  ):
    """Shows an evaluation with samples: `short` here, `text` on trackers."""
    self._show(step, {**scalars, "eval/samples": text or None})
    self.say(step, "\n".join(filter(None, [numbers(scalars), short])))

  def say(self, step: int, text: str) -> None:
    """Shows a line on the terminal only."""
    self._progress.say(step, text)

  def _show(self, step: int, values: Mapping[str, Any]) -> None:
    measured = {k: x for k, x in values.items() if x is not None}
    for tracker in self._trackers:
      tracker.write(step, measured)

  def close(self) -> None:
    self._lines.close()
    for tracker in self._trackers:
      tracker.close()


class Progress:
  """One line per step on standard error, with the time that is left."""

  def __init__(self, *, after: int, steps: int, unit: str = "step"):
    """Starts the clock; `after` steps are already finished."""
    self._steps, self._unit = steps, unit
    self._first, self._start = after, time.monotonic()

  def step(self, step: int, numbers: str) -> None:
    """Shows that a step is finished."""
    spent = time.monotonic() - self._start
    left = spent / (step - self._first) * (self._steps - step)
    self.say(step, f"{numbers}  {spent:.0f} s, {left:.0f} s left")

  def say(self, step: int, text: str) -> None:
    """Shows something else that happened at a step."""
    line = f"{self._unit} {step}/{self._steps}  {text}"
    print(printable(line), file=sys.stderr, flush=True)


def numbers(scalars: Mapping[str, float | None]) -> str:
  """The scalars for the terminal, as text."""
  digits = lambda value: ",.0f" if value >= 100 else ".3f"
  shown = [(label, scalars.get(name)) for name, label in _SHOWN.items()]
  text = "  ".join(f"{k} {v:{digits(v)}}" for k, v in shown if v is not None)
  if scalars.get("time/cores") is None:
    return text
  had = f"{scalars['time/cores']:.1f} of {len(processes.cores())} cores"
  return f"{text}  {scalars['time/cpu_s']:.1f} CPU-s  {had}"


def histograms(groups: Groups) -> dict[str, np.ndarray]:
  """All judged rewards, lengths in tokens, and right shares of the prompts."""
  drawn, scores = groups.rollouts.drawn, groups.scores
  found = {
    "histogram/reward": scores.reward[scores.valid],
    "histogram/length": groups.rollouts.mask.sum(axis=2)[drawn],
    "histogram/pass_rate": groups.right.sum(axis=1) / drawn.sum(axis=1),
  }
  return {name: values for name, values in found.items() if values.size}


def group_metrics(
  rollouts: Rollouts,
  scores: Scores,
  informative: Bool[np.ndarray, " P"],
  *,
  rollout_s: float,
) -> dict[str, float | None]:
  """Metrics of all rollouts of a step; rewards exclude invalid verdicts.

  Dynamic sampling kept the `informative` groups; sampling took `rollout_s`.
  """
  length, drawn = rollouts.mask.sum(axis=2), rollouts.drawn
  own = rollouts.own_length.sum()
  reward, judged_prompts = scores.reward, scores.valid.any(axis=1)
  judged = {"axis": 1, "where": scores.valid[judged_prompts]}
  std = reward[judged_prompts].std(**judged)
  high = reward.max(axis=1, where=scores.valid, initial=-np.inf)
  low = reward.min(axis=1, where=scores.valid, initial=np.inf)  # std rounds
  each = zip(scores.answer, drawn, strict=True)
  answers = [len(np.unique(row[some])) for row, some in each]
  right = (reward >= 1.0).sum(axis=1, where=drawn) / drawn.sum(axis=1)
  return {
    "reward/mean": float(reward.mean(where=scores.valid)),
    "reward/std_within_group": float(std.mean()),
    "reward/variance_within_group": float((std**2).mean()),
    "sampling/pass_rate": float(informative.mean()),
    "sampling/degenerate_fraction": float((high <= low).mean()),
    "sampling/rollouts_per_prompt": float(drawn.sum() / len(drawn)),
    "sampling/won": float((right > 0.5).mean()),
    "sampling/alive": float(((right > 0.0) & (right <= 0.5)).mean()),
    "sampling/missed": float((right == 0.0).mean()),  # mean of (1 - p)^N
    "rollout/tokens_per_s": float(length.sum() / rollout_s),
    "rollout/samples_per_s": float(drawn.sum() / rollout_s),
    "rollout/slot_occupancy": rollouts.slot_occupancy(),
    "rollout/length_mean": float(length.mean(where=drawn)),
    "rollout/truncated_fraction": float(rollouts.truncated.mean(where=drawn)),
    # An estimate, from the sampled tokens, of what policy/entropy sums.
    "rollout/entropy": float(-rollouts.logp.sum(where=rollouts.mask) / own),
    "reward/distinct_answers": float(np.mean(answers)),
    "theory/correct_mass": float(correct_mass(rollouts, reward).mean()),
    "memory/peak_bytes": peak_bytes(),
  }


def score_metrics(scores: Scores, *, score_s: float) -> dict[str, float]:
  """Metrics of the verdicts of a step."""
  responses, valid = scores.responses, scores.valid
  by_task = collections.defaultdict[str, list[int]](list)
  for p, row in enumerate(responses):
    if valid[p].any():
      by_task[row[0].task].append(p)
  mean = lambda p: float(scores.reward[p].mean(where=valid[p]))
  passed = [one.verdict.reward for one in responses[valid]]
  drawn = int(np.sum(responses != None))  # noqa: E711
  return {
    # 1 only if all parts of an answer are right; a reward may be partial.
    "reward/strict_mean": float(np.mean(passed)),
    "reward/invalid_fraction": 1.0 - len(passed) / drawn,
    "score/verdicts_per_s": drawn / max(score_s, 1e-9),
    **{f"reward/by_task/{t}": mean(p) for t, p in sorted(by_task.items())},
  }


def correct_mass(
  rollouts: Rollouts, reward: Float[np.ndarray, "P N"]
) -> Float[np.ndarray, " P"]:
  """Total probability of the distinct right responses that were sampled.

    mass[p] = sum of exp(sum_t logp[p,n,t]) over distinct n of reward 1

  A lower bound of the probability of a right response (Q_pos in the paper),
  which it approaches from below as N grows.
  """
  mass = np.zeros(len(reward))
  probability = np.exp(rollouts.logp.sum(axis=2, dtype=np.float64))
  for p in range(len(reward)):
    first, _ = rollouts.distinct(p)
    mass[p] = probability[p, first[reward[p, first] >= 1.0]].sum()
  return mass


def only_finite(
  scalars: Mapping[str, float | None],
) -> tuple[dict[str, float | None], list[str]]:
  """NaN and infinite values as None, and their names."""
  bad = [k for k, x in scalars.items() if not math.isfinite(x or 0.0)]
  return {**scalars, **dict.fromkeys(bad)}, bad


def peak_bytes() -> int:
  """Peak memory of the first device, or of this process on a CPU."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock(NamedTuple):
  """Seconds since the process started, or an arbitrary start."""

  wall: float
  process: float  # processor time of all threads
  compiling: float  # wall time
  compiling_process: float  # processor time


# The time of compilation in this process while it is counted.
_compiler = types.SimpleNamespace(wall=0.0, process=0.0, lowered=0.0)


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
  """Called at the end of each phase; compilation starts after lowering."""
  if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
    _compiler.lowered = time.process_time()
  if event == "/jax/core/compile/backend_compile_duration":
    _compiler.wall += duration_secs
    _compiler.process += time.process_time() - _compiler.lowered


@contextlib.contextmanager
def counting() -> Iterator[None]:
  """Counts compilation inside this context; outside `now` does not count it.

  jax calls a listener for every program: registered while training needs it.
  """
  jax.monitoring.register_event_duration_secs_listener(_on_event)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(_on_event)


def now() -> Clock:
  """The clocks now."""
  spent = time.perf_counter(), time.process_time()
  return Clock(*spent, _compiler.wall, _compiler.process)


def since(begin: Clock) -> dict[str, float]:
  """The time since `begin`, as metrics.

  Runs are compared by time/busy_s. On a CPU it is processor time (time/cpu_s),
  because other jobs would lengthen the wall time. On an accelerator it is wall
  time, because the processor only waits. It excludes compilation, which depends
  on the number of shapes, and the processor time of scoring workers.

  time/cores is processor time over wall time, both with compilation.
  """
  wall, total, compiling, compiling_cpu = map(operator.sub, now(), begin)
  cpu, on_cpu = total - compiling_cpu, jax.default_backend() == "cpu"
  return {
    "time/step_s": wall,
    "time/cpu_s": cpu,
    "time/busy_s": cpu if on_cpu else wall - compiling,
    "time/compile_s": compiling,
    "time/cores": total / wall,
  }


def timed(function: Callable[..., T], *args: Any) -> tuple[T, float]:
  """The result of a call, and its seconds."""
  start = time.perf_counter()
  return function(*args), time.perf_counter() - start
