"""--mode=train: builds the stages of the figure and runs the loop."""

import contextlib
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh

from brorl_jax import evaluate, meshes, processes, report, train
from brorl_jax.errors import NumbersError, StorageError, UserError
from brorl_jax.learner import state as states
from brorl_jax.main import (
  checkpoint_source,
  functions,
  precision,
  programs,
  settings,
  shared,
  sizes,
  watched,
)
from brorl_jax.main.commands import evaluate as evaluate_command
from brorl_jax.main.commands import plan
from brorl_jax.main.recorder import Recorder
from brorl_jax.main.stages import advantages, learning, sampling
from brorl_jax.main.stages.examples import Examples
from brorl_jax.main.stages.scoring import Scorer
from brorl_jax.model import architectures, huggingface, local, target
from brorl_jax.model.policy import Policy
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import (
  checkpoints,
  folder,
  going_back,
  intact,
  kept,
  lines,
  lock,
  metrics,
  notify,
  patience,
  sections,
)
from brorl_jax.runs.sections import Config
from brorl_jax.runs.sections.run import Run
from brorl_jax.tasks.base import Example
from brorl_jax.types import State

# Errors in the files of a run: it cannot resume.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged)
_STOPS = (
  FloatingPointError,
  train.Ended,
  dynamic_sampling.TooManyInvalid,
)


def run(
  c: Config,
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  begin_again: bool = False,
  from_step: int | None = None,
) -> None:
  """Checks the config, trains and prints the report."""
  settings.check_training(c)
  if from_step is not None:
    going_back.require_saved(workdir, from_step)
  values, changed, began = sections.as_dict(c), {}, None
  if begin_again:
    folder.check_again(workdir)
  else:
    changed = folder.check(values, workdir, allow_change=allow_change)
    began = precision.of_run(workdir)
  c, why = precision.settled(c, target.here(), began)
  # orbax logs every file, and a traceback of each error that it raises.
  logging.set_verbosity(logging.FATAL)
  how = dict(allow_change=allow_change or begin_again, begin_again=begin_again)
  stopped = _hold(c, workdir, changed, why, from_step, **how)
  if stopped is not None:
    print(f"stopped after step {stopped}; the same command goes on")
    sys.exit(processes.STOPPED)
  if processes.leads():
    title = f"N = {c.sampling.n}, {c.sampling.samples:,} rollouts per step"
    try:
      finish(workdir, title=title)
    except OSError as e:
      raise StorageError(
        f"{intact.one_line(e)}; the last step is saved; fix this and run the "
        "same command again for the figure"
      ) from None


def _hold(
  c: Config,
  workdir: pathlib.Path,
  changed: Mapping[str, Any],
  log_lines: list[str],
  from_step: int | None,
  *,
  allow_change: bool,
  begin_again: bool,
) -> int | None:
  """Builds all parts and trains while no other run may use the folder."""
  try:
    parts = _parts(c, workdir, allow_change=allow_change)
  except ValueError as e:
    raise UserError(str(e)) from None
  leads = processes.leads()
  hold = lock.hold(workdir) if leads else contextlib.nullcontext()
  scorer, quiet = contextlib.closing(parts.scorer), shared.no_closed_loops()
  with quiet, scorer, hold as held:
    shared.require_one_folder(workdir)
    if (
      leads and begin_again and (moved := folder.set_aside(workdir)) is not None
    ):
      print(f"moved the files of {workdir} to {moved}")
    log_lines = [
      *log_lines,
      shared.summary(parts.mesh, parts.state.params),
      *parts.scorer.log_lines,
      *(one.summary for one in parts.phases),
    ]
    print(*parts.examples.log_lines, *log_lines, programs.log_line(), sep="\n")
    if (why := kept.too_rare(c.run, c.eval.every)) is not None:
      print(f"warning: {why}")
    return _train(c, workdir, parts, changed, held, from_step)


def _train(
  c: Config,
  workdir: pathlib.Path,
  parts: "_Parts",
  changed: Mapping[str, Any],
  held: lock.Lock | None,
  from_step: int | None,
) -> int | None:
  """Trains; every error that ends it early is a UserError of one line.

  Returns:
    The step at which it was told to stop before the last; None at the end.
  """
  at = lambda step: next(
    p for p in reversed(parts.phases) if p.since <= max(step, 1)
  )
  identity = processes.first(
    folder.stored(workdir, "run")
    or folder.identity(
      sections.as_dict(c), parts.entries["data"] | parts.entries["functions"]
    )
  )
  telling = notify.Notify(c.run.notify if processes.leads() else "")
  recorder = Recorder(
    c,
    workdir,
    parts.examples,
    parts.heldout,
    lambda step: at(step).measure,
    changed,
    parts.entries | {"run": identity},
    parts.scorer.replaced,
    telling,
  )
  store = _store(c.run, workdir, identity, recorder.warn)
  limit = patience.limit(c.run.save_timeout_s, lambda: store.good)
  stop = shared.Stop()
  ours = recorder if processes.alone() else shared.Together(recorder)
  last = processes.last_word(shared.cut(recorder, telling))
  with limit, contextlib.closing(telling), recorder, last:
    try:
      with shared.closing(store), stop:
        if from_step is not None:
          store.require(from_step, parts.state, ours.lacks)
        going_back.before_start(workdir, from_step)
        recorder.look_again()
        state = train.train(
          parts.state,
          lambda step: watched.stages(
            at(step).stages(step), step, recorder.beat, ours.event
          ),
          store,
          ours,
          seed=c.run.seed,
          steps=c.run.steps,
          save_every=c.run.save_every,
          eval_every=c.eval.every,
          pipeline=c.run.pipeline,
          max_busy_s=c.run.max_busy_s or math.inf,
          max_samples=c.run.max_samples,
          agree=stop,
        )
    except (*_UNUSABLE, *_STOPS, checkpoints.Unsaved, OSError) as e:
      if not isinstance(e, _STOPS):  # nothing that another's death may cause
        processes.settle()
      if held is not None and not ours.started:
        held.undo()
      raise _ended(e, changed, store.good, started=ours.started) from None
    step = int(state.step)
    recorder.stopped = stop.asked and step < c.run.steps
  return step if recorder.stopped else None


def _store(
  c: Run, workdir: pathlib.Path, run: str, warn: Callable[[str], None]
) -> checkpoints.Store:
  """The steps of a run, by its identity."""
  return checkpoints.Store(
    workdir / "checkpoints",
    keep=c.keep_checkpoints,
    keep_every=c.keep_every,
    run=run,
    warn=warn,
  )


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


class _Parts(NamedTuple):
  """Everything that a validated run needs."""

  mesh: Mesh
  examples: Examples
  scorer: Scorer
  phases: "list[Phase]"
  heldout: list[Example]
  state: State
  entries: dict[str, Any]  # more entries of config.json


def _parts(c: Config, workdir: pathlib.Path, *, allow_change: bool) -> _Parts:
  """Builds the parts; raises ValueError if they do not fit together."""
  source = huggingface.locate(c.policy.checkpoint)
  mesh = meshes.make_mesh(**c.devices.mesh)
  policy = architectures.read_policy(source, dtype=c.policy.dtype)
  text = checkpoint_source.read_tokenizer(
    checkpoint_source.CheckpointSource(source), c.policy.chat_template
  )
  checkpoint_source.check_vocabulary(source, text, policy)
  before = lambda what: None if allow_change else folder.stored(workdir, what)
  own = functions.digests(settings.phases(c))
  functions.refuse_changes(before("functions"), own)
  examples = Examples.of(c, text)
  keep = learning.keeps_reference(c)
  examples.refuse_changes(before("data"))
  scorer = Scorer(c.reward, examples)
  functions.refuse_changes(before("functions"), scorer.functions)
  phases = [
    phase(which, examples, scorer, policy, mesh, keep_reference=keep)
    for which in settings.phases(c)
  ]
  heldout = examples.heldout()
  processes.require_same(
    shared.decisions(c, examples.fingerprint, own | scorer.functions, source)
  )
  # Last, because loading takes longest.
  _, params = huggingface.load(source, dtype=c.policy.dtype, mesh=mesh)
  tx, _ = learning.optimizer(c.optim, c.sampling)
  state = states.initial_state(
    params, tx, mesh, keep_reference=keep, offload=c.devices.offload
  )
  entries = {
    "data": examples.fingerprint,
    "chat_template": text.template and text.template.text,
    "functions": own | scorer.functions,
    "files": examples.files,
    "left_out": examples.left_out,
    "sandbox": scorer.sandbox,
    "began_with": str(source.resolve()),
  }
  return _Parts(mesh, examples, scorer, phases, heldout, state, entries)


class Phase(NamedTuple):
  """The stages of the steps from `since` on."""

  since: int
  stages: Callable[[int], train.Stages]
  measure: Callable[..., evaluate.Chunks]
  summary: str  # lines for the log


def phase(
  which: sections.Phase,
  examples: Examples,
  scorer: Scorer,
  policy: Policy,
  mesh: Mesh,
  *,
  keep_reference: bool,
) -> Phase:
  """Builds the stages of a phase; needs no parameters.

  Raises:
    ValueError: It does not fit the policy, the devices or their memory.
  """
  since, c, changed = which
  axes = meshes.of(mesh)
  c = sizes.settled(c, policy, axes=axes, keep_reference=keep_reference)
  settings.check_mesh(c, axes.rows)
  settings.check_lengths(c, policy.max_positions)
  count, own = jax.process_count(), local.mesh_of(mesh)
  plans = plan.make(
    c, policy, axes=axes, keep_reference=keep_reference, processes=count
  )
  tx, schedule = learning.optimizer(c.optim, c.sampling)
  target = c.sampling.prompts
  most = c.filter.max_oversampling * target

  stages = train.Stages(
    target=target,
    plan=sampling.plan_of(c.sampling, candidates=most),
    least=target if c.filter.starved == "skip" else c.optim.minibatches,
    candidates=functools.partial(examples.candidates, most=most),
    prompts=examples.prompts,
    rollouts=sampling.streamed(
      c.sampling, policy, examples.stop_ids, own, plans.rollouts, count
    ),
    scores=scorer.scores,
    informative=advantages.filter_stage(
      c.filter, c.reward, places=c.sampling.places // count
    ),
    visited=advantages.visit_stage(c.filter, c.sampling),
    advantages=advantages.advantages_stage(c.advantage, c.reward, c.sampling),
    update=learning.update_stage(c, policy, tx, schedule, mesh),
    guard=learning.guard_stage(c.guard, bad_steps=c.run.bad_steps),
    reference=learning.reference_stage(c.reference, tx),
  )
  first = stages._replace(changed=changed and dict(changed))
  lr = learning.scaled_lr(c.optim, c.sampling)
  return Phase(
    since,
    lambda step: first if step == since else stages,
    evaluate_command.measure(
      c, policy, examples, scorer, own, plans.evaluations, plans.chunk
    ),
    f"from step {since}: {target} prompts x {c.sampling.per_prompt} rollouts; "
    f"{sampling.form(c.sampling, policy, plans.rollouts)}\n"
    f"lr {lr:.3g} = {c.optim.lr:g} x {lr / c.optim.lr:.3g} "
    f"(lr_scaling {c.optim.lr_scaling!r})",
  )


def finish(workdir: pathlib.Path, *, title: str) -> None:
  """Writes the figure and prints the table of a finished run."""
  try:
    curve, steps = (
      [*lines.each_line(workdir.joinpath(*path), check)]
      for *path, check in (
        ("eval", "curve.jsonl", report.check_evaluation),
        ("metrics.jsonl", report.check_step),
      )
    )
  except metrics.Damaged as e:
    raise UserError(
      f"{e}; the rest of the run is whole: correct or remove this line"
    ) from None
  figure = workdir / "report" / "learning_curve.png"
  report.learning_curve(figure, curve, steps, title=title)
  print(report.table(curve[0], curve[-1], steps))
  print(f"  {figure}")
  print(f"  a page: brorl --mode=report --workdir={workdir}")
