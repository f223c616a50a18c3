"""--mode=train: the stages of the figure, and the loop."""

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from brorl_jax import config, errors, train
from brorl_jax.config import Config
from brorl_jax.errors import UserError, as_user_error
from brorl_jax.learner import state as states
from brorl_jax.main import report, stop_signals
from brorl_jax.main.recorder import Recorder, records_of_step
from brorl_jax.many import processes
from brorl_jax.model import adapters, huggingface, spec
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.report import load_runs
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import checkpoints, folder, intact, metrics
from brorl_jax.runs.checkpoints import Store
from brorl_jax.stages import advantages, learning, sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import Interrupted, State
from brorl_jax.verdicts.base import Example

# Errors in the files of a run: it cannot resume.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged)
_STOPS = (FloatingPointError, train.RunEnded, dynamic_sampling.TooManyInvalid)
# A network's file system may show a file late.
_SEEN_S = 30


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
  c, leads = this.config, processes.leads()
  if profile_step not in (None, *range(1, c.run.steps + 1)):
    steps = f"1 to {c.run.steps}"
    raise UserError(f"--profile_step={profile_step} is no step of {steps}")
  changed: Mapping[str, Any] = {}
  if begin_again:
    folder.files(workdir)  # refuses those of others
  else:
    values = config.as_dict(c)
    changed = folder.check(values, workdir, allow_change=allow_change)
  # orbax logs every file, and a traceback of each error that it raises.
  logging.set_verbosity(logging.FATAL)
  base = None if begin_again else folder.stored(workdir, "base")
  parts = _parts(this, workdir, allow_change or begin_again, base)
  hold = folder.hold(workdir) if leads else contextlib.nullcontext()
  with no_closed_loops(), contextlib.closing(parts.scorer), hold:
    require_one_folder(workdir)
    if leads and begin_again and (to := folder.set_aside(workdir)) is not None:
      print(f"moved the files of {workdir} to {to}")
    count = "" if processes.alone() else f" of {jax.process_count()} processes"
    print(
      *parts.examples.log_lines,
      f"mesh ({this.machine.axes}){count}",
      *parts.scorer.log_lines,
      *map(_summary, this.phases),
      sep="\n",
    )
    stopped = _train(this, workdir, parts, changed, from_step, profile_step)
  if stopped is not None:
    print(f"stopped after step {stopped}; the same command resumes")
    sys.exit(processes.STOPPED)
  if leads:
    finish(workdir)


class _Parts(NamedTuple):
  examples: Examples
  scorer: Scorer
  heldout: list[Example]
  state: State
  entries: dict[str, Any]  # more entries of config.json


@as_user_error(ValueError)
def _parts(this: Run, workdir: pathlib.Path, anew: bool, base: Any) -> _Parts:
  """Reads the data, starts the verifiers and loads the weights; unless `anew`
  they must fit to what the folder was begun with, and an adapter to its `base`.
  """
  before = lambda what: None if anew else folder.stored(workdir, what)
  resolve.refuse_changes(before("functions"), this.functions)
  examples = Examples(this.config, this.text)
  examples.refuse_changes(before("data"))
  scorer = Scorer(this.config.reward, examples)
  resolve.refuse_changes(before("functions"), scorer.functions)
  rounds = max(phase.config.sampling.rounds for phase in this.phases)
  if rounds and scorer.whole:
    must = f"() with {scorer.whole}, which takes all responses to a prompt"
    raise ValueError(f"config.sampling.rounds = {rounds} must be {must}")
  named = {**this.functions, **scorer.functions}
  held, source = examples.heldout(), this.source.source
  same = decisions(this.config, examples.fingerprint, named, source)
  processes.require_same(same)
  # Last, because loading takes longest.
  _, params = huggingface.load(
    source, dtype=this.config.policy.dtype, mesh=this.mesh
  )
  if this.policy.lora_rank:
    base = checkpoint_source.base_digest(source, params, base)
  state = states.initial_state(
    adapters.attached(this.policy, params, this.mesh, this.config.run.seed),
    this.phases[0].tx,
    this.mesh,
    keep_reference=this.keep_reference,
    offload=this.config.devices.offload,
  )
  entries = {
    "data": examples.fingerprint,
    "chat_template": getattr(this.text.template, "text", None),
    "functions": named,
    "files": examples.files,
    "forms": examples.forms,
    "dropped": examples.dropped,
    "left_out": examples.left_out,
    "sandbox": scorer.sandbox,
    "began_with": str(source.resolve()),
    "memory_bytes": this.policy.target.memory_bytes,
    "base": base,
  }
  return _Parts(examples, scorer, held, state, entries)


def stages(
  this: Run, phase: Phase, examples: Examples, scorer: Scorer, store: Store
) -> train.Stages:
  """The stages of the figure, in a phase of a run."""
  c = phase.config
  most = c.filter.max_oversampling * c.sampling.prompts
  return train.Stages(
    target=c.sampling.prompts,
    plan=sampling.round_plan(phase),
    accelerated=not this.policy.target.on_cpu,
    least=c.optim.minibatches,
    max_age=c.run.max_age,
    candidates=functools.partial(examples.candidates, most=most),
    prompts=examples.prompts,
    rollouts=functools.partial(sampling.stream_rollouts, this, phase),
    scores=scorer.scores,
    informative=functools.partial(advantages.informative, phase),
    advantages=functools.partial(advantages.credit, phase),
    update=functools.partial(learning.update_policy, this, phase),
    guard=functools.partial(learning.check_guards, c.guard),
    reference=functools.partial(learning.reset_reference, phase, store.best),
  )


def _stages_at(each: list[Any], step: int) -> train.Stages:
  """With what changes, in the first step of a phase."""
  phase, made = next(x for x in reversed(each) if x[0].since <= step)
  if step != phase.since or phase.changed is None:
    return made
  return made._replace(changed=dict(phase.changed))


def _summary(phase: Phase) -> str:
  c = phase.config
  lr, base = resolve.scaled_lr(c), c.optim.lr
  drawn = f"{c.sampling.prompts} prompts x {c.sampling.per_prompt} rollouts"
  rate = f"lr {lr:.3g} = {base:g} x {lr / base:.3g}"
  first = f"from step {phase.since}: {drawn}; {sampling.form(phase)}"
  return f"{first}\n{rate} (lr_samples {c.optim.lr_samples})"


def _train(
  this: Run,
  workdir: pathlib.Path,
  parts: _Parts,
  changed: Mapping[str, Any],
  from_step: int | None,
  profile_step: int | None,
) -> int | None:
  """The step at which a signal stopped it before the last; None at the end.

  Every error that ends it early is a UserError of one line.
  """
  c, examples, scorer = this.config, parts.examples, parts.scorer
  data = parts.entries["data"] | parts.entries["functions"]
  before = folder.stored(workdir, "run")
  identity = processes.first(before or folder.identity(config.as_dict(c), data))
  recorder = Recorder(
    c,
    workdir,
    examples,
    parts.heldout,
    functools.partial(records_of_step, this, examples, scorer),
    changed,
    parts.entries | {"run": identity},
    scorer.replaced,
    profile_step,
    _memory(this),
  )
  store = Store(
    workdir / "checkpoints",
    keep=c.run.keep_checkpoints,
    keep_every=c.run.keep_every,
    run=identity,
    from_step=from_step,
    warn=recorder.warn,
    part=states.saved,
    whole=states.restored,
  )
  each = [(p, stages(this, p, examples, scorer, store)) for p in this.phases]
  stages_at = functools.partial(_stages_at, each)
  stop = Stop()
  with recorder, processes.last_word(recorder.cut):
    try:
      with closing(store), stop:
        ended = train.train(
          parts.state,
          stages_at,
          store,
          recorder,
          seed=c.run.seed,
          steps=c.run.steps,
          save_every=c.run.save_every,
          eval_every=c.eval.every,
          max_samples=c.run.max_samples,
          agree=stop,
          asked=lambda: stop.asked,
        )
        step = int(ended.step)
    except Interrupted:
      step, stop.asked = store.good or 0, True
    except (*_UNUSABLE, *_STOPS, checkpoints.Unsaved, OSError) as e:
      if not isinstance(e, _STOPS):  # nothing that another's death may cause
        processes.settle()
      raise _ended(e, changed, store.good, started=recorder.started) from None
    recorder.stopped = stop.asked and step < c.run.steps
  return step if recorder.stopped else None


def _memory(this: Run) -> dict[str, Any]:
  """By which the next start knows whether this one was killed for memory."""
  if not this.policy.target.on_cpu:  # their memory is not the host's
    return {}
  return {
    "planned_bytes": max(phase.memory.need for phase in this.phases),
    "available_bytes": spec.available_bytes() + metrics.peak_bytes(),
    "memory_kills": spec.memory_kills(),
  }


def _ended(
  error: Exception,
  changed: Mapping[str, Any],
  good: int | None,
  *,
  started: bool,
) -> UserError:
  if isinstance(error, OSError):
    step = "none" if good is None else good
    left = f"the last good step is {step}" if started else "nothing was started"
    why = f"{intact.one_line(error)}; {left}"
    return errors.StorageError(f"{why}; {errors.AGAIN}")
  if isinstance(error, checkpoints.Unsaved):
    return errors.StorageError(f"{error}; {errors.AGAIN}")
  if isinstance(error, checkpoints.Unreachable):
    return errors.StorageError(str(error))
  if isinstance(error, _STOPS):
    return errors.NumbersError(str(error))
  if started or isinstance(error, checkpoints.NoWayBack):
    return UserError(str(error))
  if not changed:
    return folder.lost(str(error))
  what = f"this start changes {folder.few([*changed])}"
  must = "keep the old values, choose another workdir, or pass --begin_again"
  return UserError(f"{error}; {what}; no file was changed: {must}")


def finish(workdir: pathlib.Path) -> None:
  """Writes the page of a finished run."""
  try:
    report.publish([load_runs.read(workdir, workdir.name)], workdir)
  except OSError as e:
    why = f"{intact.one_line(e)}; the last step is saved; {errors.AGAIN}"
    raise errors.StorageError(f"{why} for the page") from None


def decisions(
  c: Config,
  data: Mapping[str, Any],
  functions: Mapping[str, Any],
  source: pathlib.Path,
) -> dict[str, Any]:
  """What must be the same in all processes; of weights the sizes."""
  policy, code = hashlib.sha256(), hashlib.sha256()
  for path in sorted(source.iterdir()):
    if path.suffix == ".json":
      policy.update(path.read_bytes())
    if path.suffix == ".safetensors":
      policy.update(f"{path.name} {path.stat().st_size}".encode())
  for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
    code.update(path.read_bytes())
  fields = config.flat(config.as_dict(c))
  return {
    **{f"config.{name}": value for name, value in fields.items()},
    **{f"data {name}": value for name, value in data.items()},
    **{f"function {name}": value for name, value in functions.items()},
    **folder.versions(),
    "Python": platform.python_version(),
    "the policy's files (a hash)": policy.hexdigest()[:16],
    "the code of brorl_jax (a hash)": code.hexdigest()[:16],
  }


def require_one_folder(workdir: pathlib.Path) -> None:
  """Raises UserError, in all processes, if they do not see the same folder."""
  if processes.alone():
    return
  path, token = workdir / ".shared", processes.first(os.urandom(8).hex())
  if processes.leads():
    path.write_text(token)
  processes.gather(None)
  seen, end = False, time.monotonic() + _SEEN_S
  while not seen and time.monotonic() < end:
    with contextlib.suppress(OSError):
      seen = path.read_text() == token
    time.sleep(0.0 if seen else 0.2)
  every = processes.gather(seen)
  if processes.leads():
    path.unlink(missing_ok=True)
  if not all(every):
    raise UserError(
      f"--workdir={workdir}: process {every.index(False)} does not see what "
      "process 0 writes there; give a folder on a file system of all hosts"
    )


@contextlib.contextmanager
def closing(store: Store) -> Iterator[None]:
  """`contextlib.closing`, but for an error in one process of many.

  Closing needs all of them, and the others may wait for this one elsewhere. A
  run whose numbers end it ends in all of them, with the last step saved.
  """
  try:
    yield
  except BaseException as e:
    ends = train.RunEnded, Interrupted
    together = processes.alone() or isinstance(e, ends)
    store.close() if together else store.leave()
    raise
  store.close()


@contextlib.contextmanager
def no_closed_loops() -> Iterator[None]:
  """Leaves out what is printed after a save has failed.

  orbax closes its event loop at the first error. Every other write that
  tensorstore then ends calls that loop, and the interpreter prints a traceback
  of "Event loop is closed" for each: 40 of them above the one line.
  """
  before, closed = sys.unraisablehook, "RuntimeError('Event loop is closed')"
  sys.unraisablehook = lambda x: repr(x.exc_value) == closed or before(x)
  try:
    yield
  finally:
    sys.unraisablehook = before


class Stop:
  """Whether the run is to stop, in which all agree. The first SIGTERM, or a
  SIGHUP, asks for the end; a second SIGTERM ends this process at once.
  """

  asked = False  # by a signal to any process

  def __enter__(self) -> "Stop":
    # Until here, see __main__.terminate.
    ends = stop_signals()
    self._before = {n: signal.signal(n, self._on_signal) for n in ends}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, _: object) -> None:
    self.asked = True
    # A terminal that closes may send SIGHUP twice, systemd one after SIGTERM.
    if number == signal.SIGTERM:
      signal.signal(number, signal.SIG_DFL)

  def __call__(self) -> bool:
    self.asked = any(processes.gather(self.asked))
    return self.asked
