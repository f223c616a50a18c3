"""--mode=train: builds the stages of the figure and runs the loop."""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from brorl_jax import config, train
from brorl_jax.errors import NumbersError, StorageError, UserError
from brorl_jax.learner import state as states
from brorl_jax.main import heldout, programs, report, shared
from brorl_jax.main.recorder import Recorder
from brorl_jax.many import processes
from brorl_jax.model import huggingface
from brorl_jax.plan import functions
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.report import load_runs
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import (
  checkpoints,
  events,
  folder,
  going_back,
  intact,
  kept,
  lock,
  metrics,
)
from brorl_jax.stages import advantages, learning, sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import State
from brorl_jax.verdicts.base import Example

# Errors in the files of a run: it cannot resume.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged)
_STOPS = (
  FloatingPointError,
  train.RunEnded,
  dynamic_sampling.TooManyInvalid,
)


def run(
  this: Run,
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  begin_again: bool = False,
  from_step: int | None = None,
  profile_step: int | None = None,
) -> None:
  """Trains in a folder, and prints the report."""
  if profile_step not in (None, *range(1, (last := this.config.run.steps) + 1)):
    raise UserError(f"--profile_step={profile_step} is no step of 1 to {last}")
  if from_step is not None:
    going_back.require_saved(workdir, from_step)
  changed: Mapping[str, Any] = {}
  if begin_again:
    folder.check_again(workdir)
  else:
    values = config.as_dict(this.config)
    changed = folder.check(values, workdir, allow_change=allow_change)
  # orbax logs every file, and a traceback of each error that it raises.
  logging.set_verbosity(logging.FATAL)
  try:
    parts = _parts(this, workdir, anew=allow_change or begin_again)
  except ValueError as e:
    raise UserError(str(e)) from None
  stopped = _hold(
    this, workdir, parts, changed, from_step, begin_again, profile_step
  )
  if stopped is not None:
    print(f"stopped after step {stopped}; the same command resumes")
    sys.exit(processes.STOPPED)
  if processes.leads():
    report.publish([load_runs.read(workdir, workdir.name)], workdir)


class _Parts(NamedTuple):
  """What a run works with, beside its `Run`."""

  examples: Examples
  scorer: Scorer
  heldout: list[Example]
  state: State
  entries: dict[str, Any]  # more entries of config.json


def _parts(this: Run, workdir: pathlib.Path, *, anew: bool) -> _Parts:
  """Reads the data, starts the verifiers and loads the weights.

  Raises ValueError if they do not fit together, or, unless `anew`, not to the
  data and functions of the folder.
  """
  before = lambda what: None if anew else folder.stored(workdir, what)
  functions.refuse_changes(before("functions"), this.functions)
  examples = Examples.of(this.config, this.text)
  examples.refuse_changes(before("data"))
  scorer = Scorer(this.config.reward, examples)
  functions.refuse_changes(before("functions"), scorer.functions)
  named = {**this.functions, **scorer.functions}
  held, source = examples.heldout(), this.source.source
  processes.require_same(
    shared.decisions(this.config, examples.fingerprint, named, source)
  )
  # Last, because loading takes longest.
  _, params = huggingface.load(
    source, dtype=this.config.policy.dtype, mesh=this.mesh
  )
  state = states.initial_state(
    params,
    this.phases[0].tx,
    this.mesh,
    keep_reference=this.keep_reference,
    offload=this.config.devices.offload,
  )
  template = this.text.template
  entries = {
    "data": examples.fingerprint,
    "chat_template": template and template.text,
    "functions": named,
    "files": examples.files,
    "left_out": examples.left_out,
    "sandbox": scorer.sandbox,
    "began_with": str(source.resolve()),
  }
  return _Parts(examples, scorer, held, state, entries)


def stages(
  this: Run, phase: Phase, examples: Examples, scorer: Scorer
) -> train.Stages:
  """The stages of the figure, in a phase of a run."""
  c = phase.config
  most = c.filter.max_oversampling * c.sampling.prompts
  places = c.sampling.places // this.machine.processes
  return train.Stages(
    target=c.sampling.prompts,
    plan=sampling.round_plan(phase),
    least=c.optim.minibatches,
    candidates=functools.partial(examples.candidates, most=most),
    prompts=examples.prompts,
    rollouts=functools.partial(sampling.stream_rollouts, this, phase),
    scores=scorer.scores,
    informative=functools.partial(advantages.informative, phase, places),
    advantages=functools.partial(advantages.credit, phase),
    update=functools.partial(learning.update_policy, this, phase),
    guard=functools.partial(learning.check_guards, c.guard),
    reference=functools.partial(learning.reset_reference, phase),
  )


def _summary(phase: Phase) -> str:
  """Lines for the log."""
  c = phase.config
  lr, base = functions.scaled_lr(c), c.optim.lr
  return (
    f"from step {phase.since}: {c.sampling.prompts} prompts x "
    f"{c.sampling.per_prompt} rollouts; {sampling.form(phase)}\n"
    f"lr {lr:.3g} = {base:g} x {lr / base:.3g} "
    f"(lr_samples {c.optim.lr_samples})"
  )


def _hold(
  this: Run,
  workdir: pathlib.Path,
  parts: _Parts,
  changed: Mapping[str, Any],
  from_step: int | None,
  begin_again: bool,
  profile_step: int | None,
) -> int | None:
  """Trains while no other run may use the folder; see `_train`."""
  leads = processes.leads()
  hold = lock.hold(workdir) if leads else contextlib.nullcontext()
  scorer, quiet = contextlib.closing(parts.scorer), shared.no_closed_loops()
  with quiet, scorer, hold:
    shared.require_one_folder(workdir)
    if leads and begin_again:
      if (moved := folder.set_aside(workdir)) is not None:
        print(f"moved the files of {workdir} to {moved}")
    print(
      *parts.examples.log_lines,
      shared.summary(this.machine.axes, parts.state.params),
      *parts.scorer.log_lines,
      *map(_summary, this.phases),
      programs.log_line(),
      sep="\n",
    )
    c = this.config
    if (why := kept.too_rare(c.run, c.eval.every)) is not None:
      print(f"warning: {why}")
    return _train(this, workdir, parts, changed, from_step, profile_step)


def _train(
  this: Run,
  workdir: pathlib.Path,
  parts: _Parts,
  changed: Mapping[str, Any],
  from_step: int | None,
  profile_step: int | None,
) -> int | None:
  """The step at which SIGTERM stopped it before the last; None at the end.

  Every error that ends it early is a UserError of one line.
  """
  c, examples, scorer = this.config, parts.examples, parts.scorer
  identity = processes.first(
    folder.stored(workdir, "run")
    or folder.identity(
      config.as_dict(c), parts.entries["data"] | parts.entries["functions"]
    )
  )
  recorder = Recorder(
    c,
    workdir,
    examples,
    parts.heldout,
    functools.partial(heldout.at_step, this, examples, scorer),
    changed,
    parts.entries | {"run": identity},
    scorer.replaced,
    functools.partial(events.notify, c.run.notify if processes.leads() else ""),
    profile_step,
  )
  store = checkpoints.Store(
    workdir / "checkpoints",
    keep=c.run.keep_checkpoints,
    keep_every=c.run.keep_every,
    run=identity,
    warn=recorder.warn,
  )
  each = [(p, stages(this, p, examples, scorer)) for p in this.phases]
  stop = shared.Stop()
  ours = recorder if processes.alone() else shared.Together(recorder)
  with recorder, processes.last_word(recorder.cut):
    try:
      with shared.closing(store), stop:
        if from_step is not None:
          store.require(from_step, parts.state, ours.lacks)
        going_back.before_start(workdir, from_step)
        state = train.train(
          parts.state,
          functools.partial(_stages_at, each),
          store,
          ours,
          seed=c.run.seed,
          steps=c.run.steps,
          save_every=c.run.save_every,
          eval_every=c.eval.every,
          pipeline=c.run.pipeline,
          max_samples=c.run.max_samples,
          agree=stop,
        )
    except (*_UNUSABLE, *_STOPS, checkpoints.Unsaved, OSError) as e:
      if not isinstance(e, _STOPS):  # nothing that another's death may cause
        processes.settle()
      raise _ended(e, changed, store.good, started=ours.started) from None
    step = int(state.step)
    recorder.stopped = stop.asked and step < c.run.steps
  return step if recorder.stopped else None


def _stages_at(
  each: Sequence[tuple[Phase, train.Stages]], step: int
) -> train.Stages:
  """The stages of a step's phase; in its first step with what it changes."""
  phase, made = next(x for x in reversed(each) if x[0].since <= step)
  if step != phase.since or phase.changed is None:
    return made
  return made._replace(changed=dict(phase.changed))


def _ended(
  error: Exception,
  changed: Mapping[str, Any],
  good: int | None,
  *,
  started: bool,
) -> UserError:
  """The error of a run that ended early."""
  if isinstance(error, OSError):
    step = "none" if good is None else good
    left = f"the last good step is {step}" if started else "nothing was started"
    return StorageError(
      f"{intact.one_line(error)}; {left}; fix this and run the same command "
      "again"
    )
  if isinstance(error, checkpoints.Unsaved):
    return StorageError(f"{error}; fix this and run the same command again")
  if isinstance(error, checkpoints.Unreachable):
    return StorageError(str(error))
  if isinstance(error, _STOPS):
    return NumbersError(str(error))
  if started or isinstance(error, checkpoints.NoWayBack):
    return UserError(str(error))
  why = f"; this start changes {', '.join(changed)}" if changed else ""
  return folder.lost(f"{error}{why}")
