"""What a run writes of itself: metrics, samples, evaluations."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from brorl_jax import evaluate, metrics, types
from brorl_jax.main import covered, folder
from brorl_jax.main.examples import Examples
from brorl_jax.main.settings import Config
from brorl_jax.rl import stats
from brorl_jax.tasks.base import Example


class Record:
  """metrics.jsonl, samples.jsonl, eval/ and TensorBoard of one run."""

  def __init__(
    self,
    c: Config,
    workdir: pathlib.Path,
    examples: Examples,
    heldout: Sequence[Example],
    measure: Callable[[int], Callable[..., evaluate.Chunks]],
    changed: Mapping[str, Any],
    found: Mapping[str, Any],
    told: Callable[[], Mapping[str, Any]] = dict,
  ):
    """Opens nothing yet.

    Args:
      c: The config.
      workdir: Of the run.
      examples: What it trains on.
      heldout: What it is measured on.
      measure: At each step.
      changed: Fields that an earlier start had otherwise.
      found: What config.json says beside the config.
      told: More metrics of each step.
    """
    self._c, self._workdir, self._examples = c, workdir, examples
    self._heldout, self._measure = heldout, measure
    self._changed, self._found, self._told = changed, found, told
    self._files, self._warned = [], []
    self.started = False

  @functools.cached_property
  def _covered(self) -> covered.Covered:
    return covered.look(
      self._workdir, folder.configs(self._workdir) or [self._c.to_dict()]
    )

  def lacks(self, step: int) -> str | None:
    return self._covered.lacks(step)

  def warn(self, text: str) -> None:
    """One line on the terminal, and in events.jsonl once it is open."""
    print(f"warning: {text}")
    self._warned.append(text)

  def start(self, done: int) -> float:
    """As `train.Record` says.

    Raises:
      Damaged: The files do not hold the steps up to `done`, or they hold
        steps, and there is no checkpoint to go on from.
    """
    c, devices = self._c, jax.devices()
    why = folder.begun(self._workdir) if done < 0 else self.lacks(done)
    if why is not None:
      raise metrics.Damaged(why)
    self.started = True
    what = f"resumes after step {done}" if done >= 0 else "first step compiles"
    print(f"{len(devices)} {devices[0].device_kind}; {what}")
    if done < 0:  # before any file that no run would have without it
      folder.write_config(c, self._workdir, **self._found)
    lines = lambda *path: metrics.JsonLines(
      self._workdir.joinpath(*path), after=done, warn=self.warn
    )
    self._writer = metrics.Writer(
      self._workdir, after=done, steps=c.steps, warn=self.warn
    )
    self._samples = lines("samples.jsonl")
    self._events = lines("events.jsonl")
    self._curve = lines("eval", "curve.jsonl")
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
      folder.write_config(c, self._workdir, **self._found)
    return self._writer.busy_s

  def _tell_of_start(self, done: int) -> None:
    """What is other than before, with the last step that was done.

    So that a restart does not drop it.
    """
    before, now = folder.said(self._workdir, "machine"), folder.machine()
    if before not in (None, now):
      self.warn(
        f"this machine has {now}, the run had {before}: the last bits of "
        "numbers may differ from those of a run that stays on one"
      )
    for text in self._warned:
      self._events.write({"step": done, "event": "warning", "why": text})
    if done < self._c.steps:
      self._events.write({"step": done, "event": "resume"})
    if self._changed:
      self.event(done, {"event": "config", "changed": dict(self._changed)})

  def sync(self) -> None:
    for file in self._files:
      file.sync()

  def event(self, step: int, what: Mapping[str, Any]) -> None:
    self._events.write({"step": step, **what})
    self._writer.say(step, ", ".join(f"{k}: {v}" for k, v in what.items()))

  def step(
    self, step: int, scalars: Mapping[str, Any], kept: types.Groups
  ) -> None:
    self._writer.write_scalars(step, {**scalars, **self._told()})
    self._samples.write(*self._shown(step, kept))

  def _shown(self, step: int, kept: types.Groups) -> Iterator[dict[str, Any]]:
    reward = kept.scores.reward
    for p in range(min(self._c.samples_shown, len(reward))):
      example = self._examples.example(step, int(kept.prompts.index[p]))
      # Right and wrong ones in turn: a kept group has both.
      n = int((reward[p] if p % 2 == 0 else -reward[p]).argmax())
      ids = kept.rollouts.tokens[p, n][kept.rollouts.mask[p, n]].tolist()
      judged = kept.scores.judged[p, n]
      verdict = judged.verdict
      yield {
        "step": step,
        "id": example.id,
        "domain": example.domain,
        "task": example.task,
        "prompt": self._examples.asked(example),
        "response": self._examples.decode([ids])[0],
        "gold": example.entry.get("answer"),  # none for tests and constraints
        "answer": verdict.answer,
        "verdict": verdict.status,
        "reason": verdict.reason,
        "score": verdict.score,
        "reward": float(reward[p, n]),
        "seconds": round(judged.seconds, 6),  # that the verifier took
        "tokens": len(ids),
        "truncated": bool(kept.rollouts.truncated[p, n]),
      }

  def evaluate(self, step: int, params: PyTree) -> float:
    records = [*itertools.chain(*self._measure(step)(params, self._heldout))]
    evaluate.check_judged(records)
    said, rates = evaluate.summary(records), evaluate.rates(records)
    values, half = jnp.array(rates), None
    mean = float(values.mean())
    if len(rates) > 1:
      half = float(stats.mean_interval(values)[1])
    by_family = {
      task: numbers["pass_at_k"]["1"]
      for domain in said["by_domain"].values()
      for task, numbers in domain["by_task"].items()
    }
    self._records.write(*({"step": step, **record} for record in records))
    self._curve.write(
      {
        "step": step,
        "pass_at_1": mean,
        "half_width": half,  # of its 95 % interval; one prompt has none
        "by_family": by_family,
        "rates": rates,
        "summary": said,
      }
    )
    shown = {f"eval/pass_at_1/{task}": x for task, x in by_family.items()}
    shown["eval/pass_at_1"] = mean
    self._writer.write_evaluation(step, shown)
    return mean

  def close(self) -> None:
    for file in self._files:
      file.close()
