"""Writes the files of a run: metrics, samples, events, evaluations."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import pathlib
import platform
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from brorl_jax import config, evaluate, types
from brorl_jax.config import Config
from brorl_jax.errors import UserError, first_line, printable
from brorl_jax.many import processes
from brorl_jax.model import sharding, spec
from brorl_jax.plan.memory import RolloutPlan, size
from brorl_jax.plan.resolve import Run, WithPolicy
from brorl_jax.report import stats
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import folder, intact, lines, metrics
from brorl_jax.stages import sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import Chunk, Credit, Finished, Groups, Rollouts
from brorl_jax.verdicts.base import Example, Values

_SAMPLES = 4  # rollouts of a step in samples.jsonl
# Characters of a prompt or a response: on the terminal, and on trackers.
_LINE, _TEXT = 100, 4000
# Events of a process are not repeated, so that a resume drops none. Those of
# training (a phase, a reset, a skipped update) follow from the steps: they are
# dropped with the lines of the steps that are computed again.
OF_PROCESS = "start resume config data warning workers end".split()
# What a resume says of a process that wrote nothing when it ended.
NO_WORD = "nothing: it was killed, or its machine failed"
KILLED = "it was killed, probably for memory"
_SIZES = "planned_bytes", "available_bytes"  # of `Recorder.memory`
_NEARLY = 0.95  # a plan has 90 % of what is available


def records(
  this: WithPolicy,
  c: Config,
  how: RolloutPlan,
  examples: Examples,
  scorer: Scorer,
  params: PyTree,
  prompts: Sequence[Example],
  *,
  first: int = 0,
) -> evaluate.Chunks:
  """The records of held-out prompts from number `first` on, sampled as `c`
  says: rollout n of example p draws from (seed, 0, p, n) every time.
  """
  # Training does not use the key of step 0.
  key = jax.random.fold_in(jax.random.key(c.run.seed), 0)
  how = how.only(-(-len(prompts) // jax.process_count()))

  def rollouts(params: PyTree, part: Sequence[Example], start: int) -> Rollouts:
    index = np.arange(start, start + len(part), dtype=np.int32)
    asked = examples.pad(part, index)
    of = lambda prompts: [part[i - start] for i in prompts.index]
    reply = lambda prompts, made: scorer.reply(of(prompts), made)
    by = reply if scorer.episodes else None
    return sampling.sample_heldout(this, c, how, params, asked, key, by)

  own = sharding.local_copy(params, sharding.local_mesh(this.mesh))
  more: dict[str, Any] = {"score_responses": scorer.score_responses}
  more |= {"texts": scorer.texts, "chunk": how.load.prompts, "first": first}
  return evaluate.evaluate(own, prompts, rollouts=rollouts, **more)


def records_of_step(
  this: Run,
  examples: Examples,
  scorer: Scorer,
  step: int,
  params: PyTree,
  prompts: Sequence[Example],
) -> evaluate.Chunks:
  """The records of an evaluation in a run, sampled as its phase says."""
  phase = next(p for p in reversed(this.phases) if p.since <= max(step, 1))
  c, how = phase.config, phase.memory.heldout
  return records(this, c, how, examples, scorer, params, prompts)


def this_process() -> dict[str, Any]:
  """Which process of which machine this is."""
  return {"pid": os.getpid(), "host": platform.node()}


def last_word(path: pathlib.Path) -> str | None:
  """Why the last process of events.jsonl ended; None if none is named."""
  said, begun = None, {}
  for line in lines.each_line(path):
    if line.get("event") in ("start", "resume"):
      said, begun = NO_WORD, line
    elif line.get("event") == "end":
      said = str(line.get("why"))
  if said == NO_WORD and "memory_kills" in begun:
    return _for_memory(path.parent, begun) or said
  return said


def _for_memory(workdir: pathlib.Path, begun: Values) -> str | None:
  """What shows that a process was killed for memory, or None: the kernel killed
  one in its control groups, or its steps had nearly all that was available.
  """
  kills, (planned, of) = begun["memory_kills"], (begun[x] for x in _SIZES)
  steps = lines.each_line(workdir / "metrics.jsonl")
  own = (x for x in steps if x.get("step", 0) > begun["step"])
  peak = max((x.get("memory/peak_bytes", 0) for x in own), default=0)
  more = (n > kills.get(name, n) for name, n in spec.memory_kills().items())
  if not any(more) and peak < _NEARLY * of:
    return None
  used = f" and used {size(peak)} in its steps" if peak else ""
  return (
    f"{KILLED}: it planned {size(planned)} of {size(of)}{used}; --allow_config_"
    f"change --config.devices.memory_bytes={planned * 3 // 4} plans less, or "
    "says what must be smaller"
  )


@dataclasses.dataclass(eq=False)
class Recorder(contextlib.AbstractContextManager["Recorder"]):
  """metrics.jsonl, samples.jsonl, events.jsonl, eval/ and trackers of one run.

  Its methods are those of `loop.StepRecorder`. Of many processes number 0
  reads and writes the files, and the others learn what it found. As a context
  it records how the run ended.
  """

  c: Config
  workdir: pathlib.Path
  examples: Examples
  heldout: Sequence[Example]
  # (step, parameters, held-out examples) -> records
  measure: Callable[[int, PyTree, Sequence[Example]], evaluate.Chunks]
  changed: Values  # fields that the previous start had otherwise
  entries: Values  # of config.json, besides the config
  # Worker processes replaced since the last call, by reason.
  replaced: Callable[[], Mapping[str, int]] = dict
  profile_step: int | None = None  # whose trace is written to profile/
  # By which the next start knows that this one was killed for memory.
  memory: Values = dataclasses.field(default_factory=dict)
  # What is told of each step.
  told: Callable[[int, Values], None] = lambda *_: None
  started = False  # whether a file may have been changed
  stopped = False  # set if a signal ended the run before its last step
  _open = _tracing = False  # the files are open in process 0 alone
  _last = _began = 0  # steps: the last finished, the first

  def __post_init__(self) -> None:
    self._files, self._early = [], []

  @functools.cached_property
  def _covered(self) -> lines.Covered:
    configs = folder.configs(self.workdir) or [config.as_dict(self.c)]
    return lines.covered(self.workdir, configs)

  def lacks(self, step: int) -> str | None:
    leads = processes.leads()
    return processes.first(self._covered.lacks(step) if leads else None)

  def warn(self, text: str, **more: Any) -> None:
    """One line on the terminal, and an event once events.jsonl is open."""
    print(f"warning: {printable(text)}")
    event = {"event": "warning", "why": text, **more}
    if not self._open:
      self._early.append(event)
      return
    with contextlib.suppress(OSError):  # of which the next step tells
      self._write(self._last, event)

  def start(self, done: int) -> None:
    """Raises Damaged if the files lack steps, or of -1 have some."""
    if processes.leads():
      self._start(done)
    processes.first(None)  # a start that fails ends here for all
    self.started = True

  def _start(self, done: int) -> None:
    c, devices, workdir = self.c, jax.devices(), self.workdir
    why = folder.begun(workdir) if done < 0 else self._covered.lacks(done)
    if why is not None:
      raise metrics.Damaged(why)
    self.started = True
    what = f"resumes after step {done}" if done >= 0 else "first step compiles"
    print(f"{len(devices)} {devices[0].device_kind}; {what}")
    values = config.as_dict(c)
    if done < 0:  # config.json is the first file of a run
      folder.write_config(values, workdir, **self.entries)
    opened = functools.partial(lines.JsonLines, after=done, warn=self.warn)
    self._samples = opened(workdir / "samples.jsonl")
    self._visits = opened(workdir / "visits.jsonl")
    of_process = lambda line: line.get("event") in OF_PROCESS
    self._events = opened(workdir / "events.jsonl", keep=of_process)
    self._curve = opened(workdir / "eval" / "curve.jsonl")
    self._records = opened(workdir / "eval" / "records.jsonl")
    how = {"warn": self.warn, "wandb": c.run.wandb, "config": values}
    self._writer = metrics.Writer(workdir, after=done, steps=c.run.steps, **how)
    self._files = [self._samples, self._visits, self._events, self._curve]
    self._files += [self._records, self._writer]
    self._last = self._began = max(done, 0)
    self._open = True
    self._record_start(done)
    if done >= 0:
      folder.write_config(values, workdir, **self.entries)
      self._trace(done + 1)

  def _record_start(self, done: int) -> None:
    if done >= 0 and (found := folder.differences(self.workdir)):
      each = [f"{k} {a!r} -> {b!r}" for k, (a, b) in found.items()]
      why = f"not bit-identical from here: {', '.join(each)}"
      self.warn(why, changed=found)
    after = last_word(self.workdir / "events.jsonl")
    if after and after.startswith(KILLED):
      self.warn(f"of the last start: {after}")
    planned, left = (self.memory.get(x, 0) for x in _SIZES)
    if planned > left:  # as it was when the run began
      self.warn(f"{size(planned)} are planned, and {size(left)} are available")
    for event in self._early:
      self._write(self._last, event)
    me = {**this_process(), **self.memory}
    if done < 0:
      self._write(0, {"event": "start", **me})
      if refused := self.entries.get("left_out"):
        why = f"{len(refused)} lines left out; the first: {refused[0]}"
        event = {"event": "data", "count": len(refused), "why": why}
        self._write(0, event)
    elif done < self.c.run.steps:
      more = {"again": self._covered.steps - done, "after": after}
      self._write(done, {"event": "resume", **more, **me})
    if self.changed:
      self.event(done, {"event": "config", "changed": dict(self.changed)})

  def _trace(self, step: int = 0) -> None:
    """Ends a trace; begins one if this is the step that is asked for."""
    ends, self._tracing = self._tracing, step == self.profile_step
    try:
      if ends:
        jax.profiler.stop_trace()
      if self._tracing:
        jax.profiler.start_trace(self.workdir / "profile")
    except Exception as e:  # of the profiler or the disk: it ends no run
      self._tracing = False
      self.warn(f"--profile_step: {first_line(e)}")

  def sync(self) -> None:
    for file in self._files:
      file.sync()

  def event(self, step: int, what: Values) -> None:
    if not self._open:
      return
    self._write(step, what)
    more = ", ".join(f"{k}: {v}" for k, v in what.items() if k != "event")
    self._writer.say(step, f"{what['event']}: {what.get('why') or more}")

  def _write(self, step: int, what: Values) -> None:
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    at = at.replace("+00:00", "Z")
    self._events.write({"step": step, "time": at, **what})

  def step(
    self, step: int, scalars: Values, kept: Groups, sampled: SampledGroups
  ) -> None:
    if not self._open:
      return
    self._trace()
    replaced, groups = self.replaced(), sampled.groups
    count = sum(replaced.values())
    scalars = {**scalars, "score/replaced_workers": count}
    self._writer.write_scalars(step, scalars, metrics.histograms(groups))
    self._samples.write(*samples(step, kept, groups, self.examples))
    self._visits.write(*visits(step, sampled, self.examples))
    self._last = step
    if count:
      ranked = collections.Counter(replaced).most_common(3)
      why = "; ".join(f"{n} x {reason}" for reason, n in ranked)
      self.event(step, {"event": "workers", "count": count, "why": why})
    responses = groups.scores.responses[groups.rollouts.drawn]
    failed = [(x.task, x.verdict.reason) for x in responses if not x.valid]
    self._record_unjudged(step, failed, len(responses))
    self.told(step, scalars)
    self._trace(step + 1)

  def _record_unjudged(
    self, step: int, failed: Sequence[tuple[str, str]], of: int
  ) -> None:
    """`failed` has the task and the reason of each."""
    if failed:
      (task, why), _ = collections.Counter(failed).most_common(1)[0]
      event = {"event": "unjudged", "count": len(failed), "of": of}
      self.event(step, {**event, "task": task, "why": why})

  def dump(
    self, step: int, kept: Groups, credit: Credit, drawn: Groups
  ) -> None:
    """Writes stopped/step_N.npz: the groups of a step and their advantages.

    Where no group was kept, all that were drawn, without advantages.
    """
    if not self._open:
      return
    trained = {"advantage": credit.advantage, "counts": credit.counts}
    if not len(credit.advantage):
      kept, trained = drawn, {}
    # Without padding: 128 x 512 responses of 15,360 tokens would be 9 GB.
    real = types.without_padding(kept.rollouts)
    arrays = {
      "prompt": kept.prompts.tokens,
      "prompt_mask": kept.prompts.mask,
      **{name: real[name] for name in ("tokens", "logp", "length")},
      "reward": kept.scores.reward,
      **trained,
    }
    path = self.workdir / "stopped" / f"step_{step}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)

  @property
  def _key(self) -> str:
    """What rollouts depend on, besides the checkpoint."""
    return folder.identity(config.as_dict(self.c), self.entries.get("data"))

  def keep(self, step: int, finished: Finished) -> None:
    """Writes sampled/step_N.PROCESS.npz, with a max_age also if nothing was;
    see `sampled`.
    """
    if not finished and not self.c.run.max_age:
      return
    every = [*finished.values()]
    part = self.workdir / "sampled" / f"part.{jax.process_index()}.npz"
    part.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {"key": self._key, "chunks": np.array([*finished])}
    arrays["processes"] = jax.process_count()
    if every:
      arrays["most"] = every[0].mask.shape[2]
      arrays |= types.behind([*map(types.without_padding, every)])
    np.savez(part, allow_pickle=False, **arrays)
    with part.open("rb") as file:
      os.fsync(file.fileno())  # before the checkpoint that it belongs to
    part.replace(part.with_name(part.name.replace("part", f"step_{step}")))
    if self._open and self.c.run.max_age:
      self._drop_before(step)

  def _drop_before(self, step: int) -> None:
    """Removes what belongs to no checkpoint. The newest may be being saved."""
    names = (self.workdir / "sampled").glob("step_*.npz")
    of = {path: int(path.name[len("step_") :].split(".")[0]) for path in names}
    newest = max((n for n in of.values() if n < step), default=0)
    for path, n in of.items():
      saved = self.workdir / "checkpoints" / str(n - 1)
      if n < newest and not saved.exists():
        path.unlink()

  def sampled(self, step: int) -> Finished:
    """What was sampled of this step before it began. Without a max_age files of
    other steps are removed; one that cannot be read is left out. With a max_age
    that raises UserError, unless the start changes the config.
    """
    found, count, age = dict[Chunk, Rollouts](), 1, self.c.run.max_age
    goes_on = age > 0 and step > 1
    crosses = goes_on and not self.changed
    of = lambda i: self.workdir / "sampled" / f"step_{step}.{i}.npz"
    for path in sorted(of(0).parent.glob("step_*.npz")):
      try:
        if path.name.startswith(f"step_{step}."):
          more, processes_then = read_sampled(path, self._key)
          found, count = found | more, max(count, processes_then)
        elif self._open and not age:
          path.unlink()
      except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        if crosses:
          raise _lost(path, f"cannot be read: {first_line(e)}") from None
        self.warn(f"{path} is not used: {first_line(e)}")
    for path in (of(i) for i in range(count * crosses)):
      if not path.exists():
        raise _lost(path, "is missing")
    if goes_on and not (crosses or of(jax.process_index()).exists()):
      self.keep(step, {})  # which a later start without a change looks for
    return found

  def evaluate(self, step: int, params: PyTree) -> float:
    self._trace()
    found = [*itertools.chain(*self.measure(step, params, self.heldout))]
    leads = processes.leads()
    return processes.first(self._evaluated(step, found) if leads else 0.0)

  def _evaluated(self, step: int, found: list[dict[str, Any]]) -> float:
    evaluate.check_invalid(found)
    invalid = [one for one in found if one["status"] == "invalid"]
    failed = [(one["task"], one["reason"]) for one in invalid]
    self._record_unjudged(step, failed, len(found))
    summary, rates = evaluate.summary(found), evaluate.rates(found)
    mean = float(jnp.array(rates).mean())
    half = stats.mean_interval(np.array(rates))[1] if len(rates) > 1 else None
    by_family = {
      task: numbers["pass_at_k"]["1"]
      for domain in summary["by_domain"].values()
      for task, numbers in domain["by_task"].items()
    }
    self._records.write(*({"step": step, **record} for record in found))
    line = {"step": step, "pass_at_1": mean}
    line["half_width"] = half  # of the 95 % interval; None with one prompt
    line |= {"by_family": by_family, "rates": rates, "summary": summary}
    self._curve.write(line)
    before = lines.each_line(self.workdir / "eval" / "curve.jsonl")
    if step and (why := inversion(next(before, line), line)) is not None:
      self.event(step, {"event": "inversion", "why": why})
    scalars = {f"eval/pass_at_1/{k}": x for k, x in by_family.items()}
    scalars["eval/pass_at_1"] = mean
    short, text = pair(found, _LINE), pair(found, _TEXT)
    self._writer.write_evaluation(step, scalars, short, text)
    if not step:
      self._trace(1)
    return mean

  def close(self) -> None:
    self._trace()
    for file in self._files:
      file.close()

  def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
    try:
      if isinstance(error, jax.errors.JaxRuntimeError):
        processes.settle()  # the death of another may have caused it
      if error is None or isinstance(error, Exception):
        self._end(*self._how(error))
    finally:
      self.close()

  def cut(self, why: str, status: int) -> None:
    """Records an end in the middle of a step; in any thread."""
    if self._open:
      self._end(why, status)

  def _how(self, error: Exception | None) -> tuple[str, int]:
    if isinstance(error, UserError):
      return str(error), error.status
    if error is not None:
      return f"{type(error).__name__}: {intact.one_line(error)}", 1
    if self.stopped:
      return "stopped by SIGTERM or SIGHUP", processes.STOPPED
    whole = self._last >= self.c.run.steps
    return "done" if whole else "done: run.max_samples is reached", 0

  def _end(self, why: str, status: int) -> None:
    event = {"event": "end", "why": why, "status": status, **this_process()}
    # Not open: refused, so the files stay as they are.
    if self._open and (status or self._began < self.c.run.steps):
      with contextlib.suppress(OSError):  # which may be why it ends
        self._write(self._last, event)


def inversion(first: Values, now: Values) -> str | None:
  """Both changes, if more held-out responses are right and fewer prompts have a
  right one, each outside the 95 % interval of the same prompts; else None.
  """
  rates = [np.array(line["rates"]) for line in (first, now)]
  if len(rates[0]) < 2 or len(rates[0]) != len(rates[1]):
    return None
  solved = [1.0 * (rate > 0.0) for rate in rates]
  rise, rise_half = stats.mean_interval(rates[1] - rates[0])
  fall, fall_half = stats.mean_interval(solved[0] - solved[1])
  if rise <= rise_half or fall <= fall_half:
    return None
  n = now["summary"]["all"]["samples"]
  return (
    f"pass@1 rose from {rates[0].mean():.3f} to {rates[1].mean():.3f}, but "
    f"prompts with a right one of {n} fell from {solved[0].mean():.3f} to "
    f"{solved[1].mean():.3f}; configs/need.py, or a larger sampling.n with "
    "advantage.kind = 'maxrl', keeps more"
  )


def samples(
  step: int, kept: Groups, drawn: Groups, examples: Examples
) -> Iterator[dict[str, Any]]:
  """A response to each of some prompts, right and wrong ones in turn: the first
  prompts that the step trains on, then the first of the others.
  """
  trained = np.isin(drawn.prompts.index, kept.prompts.index)
  reward = drawn.scores.reward
  for i, p in enumerate(np.argsort(~trained, kind="stable")[:_SAMPLES]):
    example = examples.example(step, int(drawn.prompts.index[p]))
    # Right and wrong responses alternate: a kept group has both.
    value = reward[p] if i % 2 == 0 else -reward[p]
    n = int(np.where(drawn.rollouts.drawn[p], value, -np.inf).argmax())
    mask = drawn.rollouts.mask[p, n]
    ids = drawn.rollouts.tokens[p, n][mask]
    own = types.own_tokens(True, drawn.rollouts.logp[p, n][mask])
    scored = drawn.scores.responses[p, n]
    verdict = scored.verdict
    yield {
      "step": step,
      **{name: getattr(example, name) for name in ("id", "domain", "task")},
      "kept": bool(trained[p]),
      "prompt": examples.asked(example),
      "response": examples.shown(ids, own),
      "gold": example.entry.get("answer"),  # None for tests and constraints
      "answer": verdict.answer,
      "verdict": verdict.status,
      "reason": verdict.reason,
      "score": verdict.score,
      "reward": float(reward[p, n]),
      "seconds": round(scored.seconds, 6),  # of the verifier
      "tokens": len(ids),
      "truncated": bool(drawn.rollouts.truncated[p, n]),
    }


def visits(
  step: int, sampled: SampledGroups, examples: Examples
) -> Iterator[dict[str, Any]]:
  """What each prompt that was drawn got, in candidate order."""
  prompts, rollouts, scores = sampled.groups
  counts = {
    "drawn": rollouts.drawn.sum(axis=1),
    "right": sampled.groups.right.sum(axis=1),
    "invalid": (~scores.valid & rollouts.drawn).sum(axis=1),
    "tokens": rollouts.mask.sum(axis=(1, 2)),
  }
  for i, p in enumerate(prompts.index.tolist()):
    example = examples.example(step, p)
    line = {"step": step, "id": example.id, "task": example.task}
    line |= {name: int(count[i]) for name, count in counts.items()}
    yield line | {"kept": bool(sampled.kept[i])}


def _lost(path: pathlib.Path, why: str) -> UserError:
  return UserError(
    f"{path}, from which rollouts go on, {why}; put it back, or go on without "
    "it: --allow_config_change --config.run.max_age=0"
  )


def read_sampled(path: pathlib.Path, key: str) -> tuple[Finished, int]:
  """The chunks in a file of `Recorder.keep`, none of another config, and of how
  many processes it is one.
  """
  with path.open("rb") as opened, np.load(opened) as file:
    count = int(file["processes"])
    if str(file["key"]) != key or not len(file["chunks"]):
      return {}, count
    out = types.padded(file, int(file["most"]))
    chunks = [Chunk(*chunk) for chunk in file["chunks"].tolist()]
  return dict(zip(chunks, types.each(out), strict=True)), count


def pair(found: Sequence[evaluate.Record], most: int) -> str:
  """The first right and wrong response, at most `most` characters a part."""
  shown = []
  for passed in (True, False):
    some = [x for x in found if "response" in x and x["pass"] == passed]
    for one in some[:1]:
      why = f"  ({_clipped(one['reason'], most)})" if one["reason"] else ""
      shown += [
        f"  {one['status']}  {one['task']}: {_clipped(one['prompt'], most)}",
        f"    -> {_clipped(one['response'], most)}{why}",
      ]
  return "\n".join(shown)


def _clipped(text: str, most: int) -> str:
  """One line without control characters, which could steer a terminal."""
  line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
  return line if len(line) <= most else f"{line[:most]}..."
