"""Writes the files of a run: metrics, samples, events, evaluations."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from brorl_jax import evaluate, types
from brorl_jax.main.stages.examples import Examples
from brorl_jax.rl import stats
from brorl_jax.runs import covered, folder, metrics, sections, sums
from brorl_jax.runs.sections import Config
from brorl_jax.tasks.base import Example


class Recorder:
  """metrics.jsonl, samples.jsonl, eval/ and trackers of one run."""

  def __init__(
    self,
    c: Config,
    workdir: pathlib.Path,
    examples: Examples,
    heldout: Sequence[Example],
    measure: Callable[[int], Callable[..., evaluate.Chunks]],
    changed: Mapping[str, Any],
    entries: Mapping[str, Any],
    more_metrics: Callable[[], Mapping[str, Any]] = dict,
  ):
    """Opens nothing yet.

    Args:
      c: The config.
      workdir: Folder of the run.
      examples: Training examples.
      heldout: Held-out examples.
      measure: From a step to the function that evaluates it.
      changed: Fields whose values differ from the previous start.
      entries: Entries of config.json besides the config.
      more_metrics: Returns further metrics; called in each step.
    """
    self._c, self._workdir, self._examples = c, workdir, examples
    self._heldout, self._measure = heldout, measure
    self._changed, self._found, self._more_metrics = (
      changed,
      entries,
      more_metrics,
    )
    self._files, self._warned = [], []
    self.started = False

  @functools.cached_property
  def _covered(self) -> covered.Covered:
    return covered.look(
      self._workdir,
      folder.configs(self._workdir) or [sections.as_dict(self._c)],
    )

  def lacks(self, step: int) -> str | None:
    return self._covered.lacks(step)

  def warn(self, text: str) -> None:
    """One line on the terminal, and in events.jsonl once it is open."""
    print(f"warning: {text}")
    self._warned.append(text)

  def start(self, done: int) -> float:
    """See `train.Recorder`.

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
      folder.write_config(sections.as_dict(c), self._workdir, **self._found)
    sums.shorten(self._workdir, done)
    lines = lambda *path: metrics.JsonLines(
      self._workdir.joinpath(*path), after=done, warn=self.warn
    )
    self._samples = lines("samples.jsonl")
    self._events = lines("events.jsonl")
    self._curve = lines("eval", "curve.jsonl")
    curve = metrics.each_line(self._workdir / "eval" / "curve.jsonl")
    self._writer = metrics.Writer(
      self._workdir,
      after=done,
      steps=c.run.steps,
      warn=self.warn,
      wandb=c.run.wandb,
      config=sections.as_dict(c),
      evaluations=((line["step"], _scalars(line)) for line in curve),
    )
    self._records = lines("eval", "records.jsonl")
    self._files = [
      self._samples,
      self._events,
      self._curve,
      self._records,
      self._writer,
    ]

    if done >= 0:
      self._tell_of_start(done)
      folder.write_config(sections.as_dict(c), self._workdir, **self._found)
    return self._writer.busy_s

  def _tell_of_start(self, done: int) -> None:
    """Records a resume and what has changed, at the last finished step.

    A later restart drops events after the step that it resumes from.
    """
    before, now = folder.stored(self._workdir, "machine"), folder.machine()
    if before not in (None, now):
      self.warn(
        f"this machine has {now}, but the run was on {before}: the last bits "
        "of numbers may differ"
      )
    for text in self._warned:
      self._events.write({"step": done, "event": "warning", "why": text})
    if done < self._c.run.steps:
      self._events.write({"step": done, "event": "resume"})
    if self._changed:
      self.event(done, {"event": "config", "changed": dict(self._changed)})

  def sync(self) -> None:
    for file in self._files:
      file.sync()
    named = {
      "metrics.jsonl": self._writer,
      "samples.jsonl": self._samples,
      "eval/curve.jsonl": self._curve,
      "eval/records.jsonl": self._records,
    }
    sums.write(self._workdir, {name: file.sum for name, file in named.items()})

  def event(self, step: int, what: Mapping[str, Any]) -> None:
    self._events.write({"step": step, **what})
    self._writer.say(step, ", ".join(f"{k}: {v}" for k, v in what.items()))

  def step(
    self, step: int, scalars: Mapping[str, Any], kept: types.Groups
  ) -> None:
    self._writer.write_scalars(step, {**scalars, **self._more_metrics()})
    self._samples.write(*self._shown(step, kept))

  def _shown(self, step: int, kept: types.Groups) -> Iterator[dict[str, Any]]:
    reward = kept.scores.reward
    for p in range(min(self._c.run.samples_shown, len(reward))):
      example = self._examples.example(step, int(kept.prompts.index[p]))
      # Right and wrong responses alternate: a kept group has both.
      n = int((reward[p] if p % 2 == 0 else -reward[p]).argmax())
      ids = kept.rollouts.tokens[p, n][kept.rollouts.mask[p, n]].tolist()
      scored = kept.scores.responses[p, n]
      verdict = scored.verdict
      yield {
        "step": step,
        "id": example.id,
        "domain": example.domain,
        "task": example.task,
        "prompt": self._examples.asked(example),
        "response": self._examples.decode([ids])[0],
        "gold": example.entry.get("answer"),  # None for tests and constraints
        "answer": verdict.answer,
        "verdict": verdict.status,
        "reason": verdict.reason,
        "score": verdict.score,
        "reward": float(reward[p, n]),
        "seconds": round(scored.seconds, 6),  # of the verifier
        "tokens": len(ids),
        "truncated": bool(kept.rollouts.truncated[p, n]),
      }

  def measured(self, step: int, params: PyTree) -> evaluate.Chunks:
    """The records of an evaluation; writes nothing."""
    return self._measure(step)(params, self._heldout)

  def evaluate(self, step: int, params: PyTree) -> float:
    records = [*itertools.chain(*self.measured(step, params))]
    evaluate.check_invalid(records)
    summary, rates = evaluate.summary(records), evaluate.rates(records)
    values, half = jnp.array(rates), None
    mean = float(values.mean())
    if len(rates) > 1:
      half = float(stats.mean_interval(values)[1])
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


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
  """The scalars of a line of eval/curve.jsonl for trackers."""
  tasks = {f"eval/pass_at_1/{k}": x for k, x in line["by_family"].items()}
  return {**tasks, "eval/pass_at_1": line["pass_at_1"]}
