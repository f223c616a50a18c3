"""Writes the files of a run: metrics, samples, events, evaluations."""

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from brorl_jax import config, evaluate, types
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.main import records
from brorl_jax.many import processes
from brorl_jax.report import stats
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import covered, events, folder, intact, machine, metrics
from brorl_jax.stages.examples import Examples
from brorl_jax.verdicts.base import Example


class Recorder:
  """metrics.jsonl, samples.jsonl, events.jsonl, eval/ and trackers of one run.

  As a context it records how the run ended, and closes the files.

  Attributes:
    started: Whether a file may have been changed.
    stopped: Set by who knows it: SIGTERM ended the run before its last step.
  """

  def __init__(
    self,
    c: Config,
    workdir: pathlib.Path,
    examples: Examples,
    heldout: Sequence[Example],
    measure: Callable[[int, PyTree, Sequence[Example]], evaluate.Chunks],
    changed: Mapping[str, Any],
    entries: Mapping[str, Any],
    replaced: Callable[[], Mapping[str, int]] = dict,
    tell: Callable[[Mapping[str, Any]], None] = lambda event: None,
  ):
    """Opens nothing yet.

    Args:
      c: The config.
      workdir: Folder of the run.
      examples: Training examples.
      heldout: Held-out examples.
      measure: (step, parameters, held-out examples) -> records.
      changed: Fields whose values differ from the previous start.
      entries: Entries of config.json besides the config.
      replaced: Returns how many worker processes were replaced since it was
        last called, by reason.
      tell: Called with each event that somebody should know of.
    """
    self._c, self._workdir, self._examples = c, workdir, examples
    self._heldout, self._measure = heldout, measure
    self._changed, self._found = changed, entries
    self._replaced, self._tell = replaced, tell
    self._files, self._early = [], []
    self._last = self._began = 0  # steps: the last finished, the first
    self._open = False
    self.started = self.stopped = False

  @functools.cached_property
  def _covered(self) -> covered.Covered:
    return covered.look(
      self._workdir,
      folder.configs(self._workdir) or [config.as_dict(self._c)],
    )

  def lacks(self, step: int) -> str | None:
    return self._covered.lacks(step)

  def warn(self, text: str, **more: Any) -> None:
    """One line on the terminal, and an event once events.jsonl is open."""
    print(f"warning: {text}")
    event = {"event": "warning", "why": text, **more}
    if not self._open:
      self._early.append(event)
      return
    with contextlib.suppress(OSError):  # of which the next step tells
      self._write(self._last, event)

  def start(self, done: int) -> None:
    """See `train.StepRecorder`.

    Raises:
      Damaged: The files do not cover the steps up to `done`, or they have
        steps although there is no checkpoint.
    """
    c, devices = self._c, jax.devices()
    why = folder.begun(self._workdir) if done < 0 else self.lacks(done)
    if why is not None:
      raise metrics.Damaged(why)
    self.started = True
    what = f"resumes after step {done}" if done >= 0 else "first step compiles"
    print(f"{len(devices)} {devices[0].device_kind}; {what}")
    if done < 0:  # config.json is the first file of a run
      folder.write_config(config.as_dict(c), self._workdir, **self._found)
    lines = functools.partial(metrics.JsonLines, after=done, warn=self.warn)
    workdir = self._workdir
    self._samples = lines(workdir / "samples.jsonl")
    self._visits = lines(workdir / "visits.jsonl")
    self._events = lines(workdir / "events.jsonl", keep=events.of_process)
    self._curve = lines(workdir / "eval" / "curve.jsonl")
    curve = metrics.each_line(workdir / "eval" / "curve.jsonl")
    self._writer = metrics.Writer(
      self._workdir,
      after=done,
      steps=c.run.steps,
      warn=self.warn,
      wandb=c.run.wandb,
      config=config.as_dict(c),
      evaluations=((line["step"], _scalars(line)) for line in curve),
    )
    self._records = lines(workdir / "eval" / "records.jsonl")
    self._files = [
      self._samples,
      self._visits,
      self._events,
      self._curve,
      self._records,
      self._writer,
    ]

    self._last = self._began = max(done, 0)
    self._open = True
    self._tell_of_start(done)
    if done >= 0:
      folder.write_config(config.as_dict(c), self._workdir, **self._found)

  def _tell_of_start(self, done: int) -> None:
    """Records a start or resume, and what is not as it was before."""
    if done >= 0 and (found := machine.differences(self._workdir)):
      each = [f"{k} {a!r} -> {b!r}" for k, (a, b) in found.items()]
      self.warn(
        f"not bit-identical from here: {', '.join(each)}", changed=found
      )
    for event in self._early:
      self._write(self._last, event)
    if done < 0:
      self._write(0, {"event": "start", **events.here()})
      if left_out := events.left_out(self._found.get("left_out") or ()):
        self._write(0, left_out)
    elif done < self._c.run.steps:
      path = self._workdir / "events.jsonl"
      more = {"again": self._covered.steps - done}
      more |= {"after": events.last_word(path), **events.here()}
      self._write(done, {"event": "resume", **more})
    if self._changed:
      self.event(done, {"event": "config", "changed": dict(self._changed)})

  def sync(self) -> None:
    for file in self._files:
      file.sync()

  def event(self, step: int, what: Mapping[str, Any]) -> None:
    self._write(step, what)
    more = (f"{k}: {v}" for k, v in what.items() if k != "event")
    self._writer.say(
      step, f"{what['event']}: {what.get('why') or ', '.join(more)}"
    )

  def _write(self, step: int, what: Mapping[str, Any]) -> None:
    line = {"step": step, "time": events.now(), **what}
    try:
      self._events.write(line)
    finally:  # on a full disk too
      self._told(line)

  def _told(self, line: Mapping[str, Any]) -> None:
    if line["event"] in events.TOLD:
      where = {"workdir": str(self._workdir.absolute())}
      self._tell({**line, **where, **events.here()})

  def step(
    self,
    step: int,
    scalars: Mapping[str, Any],
    kept: types.Groups,
    sampled: SampledGroups,
  ) -> None:
    replaced = self._replaced()
    count = sum(replaced.values())
    more = {"score/replaced_workers": count}
    self._writer.write_scalars(step, {**scalars, **more})
    self._samples.write(*records.samples(step, kept, self._examples))
    self._visits.write(*records.visits(step, sampled, self._examples))
    self._last = step
    if count:
      why = events.most_often(replaced)
      self.event(step, {"event": "workers", "count": count, "why": why})
    groups = sampled.groups
    responses = groups.scores.responses[groups.rollouts.drawn]
    failed = [(x.task, x.verdict.reason) for x in responses if not x.valid]
    self._tell_of_unjudged(step, failed, len(responses))

  def _tell_of_unjudged(
    self, step: int, failed: Sequence[tuple[str, str]], of: int
  ) -> None:
    if event := events.unjudged(failed, of):
      self.event(step, event)

  def dump(
    self,
    step: int,
    kept: types.Groups,
    credit: types.Credit,
    drawn: types.Groups,
  ) -> None:
    """Writes stopped/step_N.npz: the groups of a step and their advantages.

    Where no group was kept, all that were drawn, without advantages.
    """
    trained = {"advantage": credit.advantage, "counts": credit.counts}
    if not len(credit.advantage):
      kept, trained = drawn, {}
    out = kept.rollouts
    # Without padding, one response behind the other: 128 x 512 of 15,360 tokens
    # would be 9 GB.
    arrays = {
      "prompt": kept.prompts.tokens,
      "prompt_mask": kept.prompts.mask,
      "tokens": out.tokens[out.mask],
      "logp": out.logp[out.mask],
      "length": out.mask.sum(axis=2),
      "reward": kept.scores.reward,
      **trained,
    }
    path = self._workdir / "stopped" / f"step_{step}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)

  def measured(self, step: int, params: PyTree) -> evaluate.Chunks:
    """The records of an evaluation; writes nothing."""
    return self._measure(step, params, self._heldout)

  def evaluate(self, step: int, params: PyTree) -> float:
    records = [*itertools.chain(*self.measured(step, params))]
    evaluate.check_invalid(records)
    failed = [
      (one["task"], one["reason"])
      for one in records
      if one["status"] == "invalid"
    ]
    self._tell_of_unjudged(step, failed, len(records))
    summary, rates = evaluate.summary(records), evaluate.rates(records)
    mean = float(jnp.array(rates).mean())
    half = stats.mean_interval(np.array(rates))[1] if len(rates) > 1 else None
    by_family = {
      task: numbers["pass_at_k"]["1"]
      for domain in summary["by_domain"].values()
      for task, numbers in domain["by_task"].items()
    }
    self._records.write(*({"step": step, **record} for record in records))
    line = {
      "step": step,
      "pass_at_1": mean,
      "half_width": half,  # of the 95 % interval; None with one prompt
      "by_family": by_family,
      "rates": rates,
      "summary": summary,
    }
    self._curve.write(line)
    self._writer.write_evaluation(step, _scalars(line))
    return mean

  def close(self) -> None:
    for file in self._files:
      file.close()

  def __enter__(self) -> "Recorder":
    return self

  def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
    try:
      if error is None or isinstance(error, Exception):
        self._end(*self._how(error))
    finally:
      self.close()

  def cut(self, why: str, status: int) -> None:
    """Records an end in the middle of a step; in any thread."""
    if self._open:
      self._end(why, status)

  def _how(self, error: Exception | None) -> tuple[str, int]:
    """Why the run ends, and the status of the process."""
    if isinstance(error, UserError):
      return str(error), error.status
    if error is not None:
      return f"{type(error).__name__}: {intact.one_line(error)}", 1
    if self.stopped:
      return "stopped by SIGTERM", processes.STOPPED
    whole = self._last >= self._c.run.steps
    return "done" if whole else "done: run.max_samples is reached", 0

  def _end(self, why: str, status: int) -> None:
    event = {"event": "end", "why": why, "status": status, **events.here()}
    if not self._open:  # refused: the files stay as they are
      self._told({"step": self._last, "time": events.now(), **event})
    elif status or self._began < self._c.run.steps:
      with contextlib.suppress(OSError):  # which may be why it ends
        self._write(self._last, event)


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
  """The scalars of a line of eval/curve.jsonl for trackers."""
  tasks = {f"eval/pass_at_1/{k}": x for k, x in line["by_family"].items()}
  return {**tasks, "eval/pass_at_1": line["pass_at_1"]}
