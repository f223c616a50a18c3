"""--mode=train, and training from Python: the stages, and the loop."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from brorl_jax import config, errors, loop
from brorl_jax import main as process
from brorl_jax.config import Config
from brorl_jax.errors import UserError, as_user_error
from brorl_jax.learner import state as states
from brorl_jax.main import report, sample, settings, stop_signals
from brorl_jax.main.recorder import Recorder, records_of_step
from brorl_jax.many import processes
from brorl_jax.model import adapters, huggingface, spec
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.report import load_runs
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import checkpoints, folder, intact, lines, metrics
from brorl_jax.runs.checkpoints import Store
from brorl_jax.stages import advantages, learning, sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import Interrupted, State
from brorl_jax.verdicts import own
from brorl_jax.verdicts.base import Example, Values

# Errors in the files of a run: it cannot resume.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged)
_STOPS = (FloatingPointError, loop.RunEnded, dynamic_sampling.TooManyInvalid)
# Called after each step with its number and metrics; True ends the run.
Callback = Callable[[int, Values], Any]
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
  rewards: Mapping[str, Callable] | None = None,
  callbacks: Sequence[Callback] = (),
) -> int | None:
  """Trains in a folder, and prints the report. Returns the step at which a
  signal or a callback stopped it before its last, or None.

  `rewards` are functions of this process that config.reward.verifier names.
  """
  c, leads = this.config, processes.leads()
  if profile_step not in (None, *range(1, c.run.steps + 1)):
    steps = f"1 to {c.run.steps}"
    raise UserError(f"--profile_step={profile_step} is no step of {steps}")
  changed: Values = {}
  if begin_again:
    folder.files(workdir)  # refuses those of others
  else:
    values = config.as_dict(c)
    changed = folder.check(values, workdir, allow_change=allow_change)
  # orbax logs every file, and a traceback of each error that it raises.
  logging.set_verbosity(logging.FATAL)
  base = None if begin_again else folder.stored(workdir, "base")
  parts = _parts(this, workdir, allow_change or begin_again, base, rewards)
  hold = folder.hold(workdir) if leads else contextlib.nullcontext()
  with no_closed_loops(), contextlib.closing(parts.scorer), hold:
    require_one_folder(workdir)
    if leads and begin_again and (to := folder.set_aside(workdir)) is not None:
      print(f"moved the files of {workdir} to {to}")
    summary = functools.partial(_summary, episodes=parts.scorer.episodes)
    count = "" if processes.alone() else f" of {jax.process_count()} processes"
    print(
      *parts.examples.log_lines,
      f"mesh ({this.machine.axes}){count}",
      *parts.scorer.log_lines,
      *map(summary, this.phases),
      sep="\n",
    )
    how = from_step, profile_step, callbacks
    stopped = _train(this, workdir, parts, changed, *how)
  if stopped is not None:
    print(f"stopped after step {stopped}; the same command resumes")
  elif leads:
    finish(workdir)
  return stopped


class _Parts(NamedTuple):
  examples: Examples
  scorer: Scorer
  heldout: list[Example]
  state: State
  entries: dict[str, Any]  # more entries of config.json


@as_user_error(ValueError)
def _parts(
  this: Run, workdir: pathlib.Path, anew: bool, base: Any, rewards: Any = None
) -> _Parts:
  """Reads the data, starts the verifiers and loads the weights; unless `anew`
  they must fit to what the folder was begun with, and an adapter to its `base`.
  """
  before = lambda what: None if anew else folder.stored(workdir, what)
  resolve.refuse_changes(before("functions"), this.functions)
  examples = Examples(this.config, this.text)
  examples.refuse_changes(before("data"))
  scorer = Scorer(this.config.reward, examples, rewards)
  resolve.refuse_changes(before("functions"), scorer.functions)
  rounds = max(phase.config.sampling.rounds for phase in this.phases)
  if rounds and scorer.whole:
    must = f"() with {scorer.whole}, which takes all responses to a prompt"
    raise ValueError(f"config.sampling.rounds = {rounds} must be {must}")
  named = {**this.functions, **scorer.functions}
  if scorer.episodes and this.config.run.max_age:
    raise ValueError("config.run.max_age must be 0 with an environment")
  held, source = examples.heldout(), this.source.source
  same = decisions(this.config, examples.fingerprint, named, source)
  processes.require_same(same)
  # Last, because loading takes longest.
  dtype = this.config.policy.dtype
  _, params = huggingface.load(source, dtype=dtype, mesh=this.mesh)
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
) -> loop.Stages:
  """The stages of the figure, in a phase of a run."""
  c = phase.config
  most = c.filter.max_oversampling * c.sampling.prompts
  turns, made = scorer.episodes, sampling.stream_rollouts
  return loop.Stages(
    target=c.sampling.prompts,
    plan=sampling.round_plan(phase),
    accelerated=not this.policy.target.on_cpu,
    least=c.optim.minibatches,
    max_age=c.run.max_age,
    candidates=functools.partial(examples.candidates, most=most),
    prompts=examples.prompts,
    rollouts=functools.partial(made, this, phase, turns=turns),
    reply=scorer.replies if turns else None,
    scores=scorer.scores,
    informative=functools.partial(advantages.informative, phase),
    advantages=functools.partial(advantages.credit, phase),
    update=functools.partial(learning.update_policy, this, phase),
    guard=functools.partial(learning.check_guards, c.guard),
    reference=functools.partial(learning.reset_reference, phase, store.best),
  )


def _stages_at(each: list[Any], step: int) -> loop.Stages:
  """With what changes, in the first step of a phase."""
  phase, made = next(x for x in reversed(each) if x[0].since <= step)
  if step != phase.since or phase.changed is None:
    return made
  return made._replace(changed=dict(phase.changed))


def _summary(phase: Phase, episodes: bool) -> str:
  c = phase.config
  lr, base = resolve.scaled_lr(c), c.optim.lr
  drawn = f"{c.sampling.prompts} prompts x {c.sampling.per_prompt} rollouts"
  rate = f"lr {lr:.3g} = {base:g} x {lr / base:.3g}"
  first = f"from step {phase.since}: {drawn}; {sampling.form(phase, episodes)}"
  return f"{first}\n{rate} (lr_samples {c.optim.lr_samples})"


def _train(
  this: Run,
  workdir: pathlib.Path,
  parts: _Parts,
  changed: Values,
  from_step: int | None,
  profile_step: int | None,
  callbacks: Sequence[Callback],
) -> int | None:
  """The step at which it was stopped before the last; None at the end.

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
  scorer.folder = workdir / "sampled"
  stop = Stop()
  recorder.told = functools.partial(stop.told_by, callbacks)
  with recorder, processes.last_word(recorder.cut):
    try:
      with closing(store), stop:
        ended = loop.train(
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
  error: Exception, changed: Values, good: int | None, *, started: bool
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
  c: Config, data: Values, functions: Values, source: pathlib.Path
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
    ends = loop.RunEnded, Interrupted
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
    # Until here, see __main__.terminate. Python has signals in one thread only.
    main = threading.current_thread() is threading.main_thread()
    ends = stop_signals() if main else ()
    self._before = {n: signal.signal(n, self._on_signal) for n in ends}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def told_by(
    self, callbacks: Sequence[Callback], step: int, scalars: Values
  ) -> None:
    """Calls them all after a step; one that returns True asks for the end."""
    if any([call(step, scalars) is True for call in callbacks]):
      self.asked = True

  def _on_signal(self, number: int, _: object) -> None:
    self.asked = True
    # A terminal that closes may send SIGHUP twice, systemd one after SIGTERM.
    if number == signal.SIGTERM:
      signal.signal(number, signal.SIG_DFL)

  def __call__(self) -> bool:
    self.asked = any(processes.gather(self.asked))
    return self.asked


# ----------------------------------------------------------------- from Python


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """A run in its folder. `stopped` is the step at which a signal or a callback
  ended it before its last, or None; the same call goes on there.
  """

  workdir: pathlib.Path
  stopped: int | None = None

  @functools.cached_property
  def metrics(self) -> dict[str, np.ndarray]:
    """Each metric as an array over steps; NaN where a step does not have it."""
    steps = [*lines.each_line(self.workdir / "metrics.jsonl")]
    of = lambda name: [x.get(name, np.nan) for x in steps]
    names = {name for x in steps for name in x}
    return {name: np.array(of(name), float) for name in sorted(names)}

  @property
  def samples(self) -> list[dict[str, Any]]:
    """A few responses of each step, with their verdicts and rewards."""
    return [*lines.each_line(self.workdir / "samples.jsonl")]

  @property
  def evaluations(self) -> dict[int, float]:
    """Pass@1 on the held-out prompts, by step; 0 is before training."""
    curve = lines.each_line(self.workdir / "eval" / "curve.jsonl")
    return {x["step"]: x["pass_at_1"] for x in curve}

  @functools.cached_property
  def policy(self) -> sample.TextPolicy:
    """The policy of the newest checkpoint, with text as input and output."""
    return sample.load(self.workdir)

  def plot(self) -> Any:
    """A figure of the rewards and of the evaluations, for a notebook."""
    from matplotlib.figure import Figure  # .6 s, which a run does without

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(self.metrics["step"], self.metrics["reward/mean"], label="reward")
    steps, scores = zip(*self.evaluations.items(), strict=True)
    axes.plot(steps, scores, "o-", label="pass@1, held out")
    axes.set_xlabel("step")
    axes.legend()
    return figure


def train(
  config: str | ConfigDict,
  workdir: str | os.PathLike[str],
  *,
  changes: Mapping[str, Any] | None = None,
  reward: Callable | Sequence[Callable] = (),
  data: str | os.PathLike[str] | Sequence[Any] = (),
  callbacks: Sequence[Callback] = (),
  allow_config_change: bool = False,
  begin_again: bool = False,
) -> TrainedRun:
  """Trains in this process, as the command does; the same call resumes.

      run = brorl_jax.train("n512:steps", "runs/mine", reward=score, data=rows)
      run.metrics["reward/mean"], run.policy.sample("6 * 7 = ?")

  Raises UserError in one line for whatever the command refuses.

  Args:
    config: A file, the name of a packaged config, or what a file's get_config()
      returns.
    workdir: Folder of the run.
    changes: Values by field, such as {"run.steps": 3, "optim.lr": 1e-6}.
    reward: Functions (response, example, step) or (responses, example, step) of
      this process, see brorl_jax/verdicts/README.md; they may be `async`. The
      rewards of several are added. A call that is late becomes invalid, but
      its thread goes on.
    data: Rows {"prompt": ..., "answer": ...}, which are written beside the
      folder, to WORKDIR.jsonl, or files as in config.data.files.
    callbacks: Called with the number and the metrics of each step; the run
      ends behind a step for which one returns True.
    allow_config_change: Resume with a changed config.
    begin_again: Start at step 1; the files of the folder are set aside.
  """
  from_file = isinstance(config, str)
  c = settings.read(config) if from_file else copy.deepcopy(config)
  place, changed = pathlib.Path(workdir).expanduser(), dict(changes or {})
  each = [reward] if callable(reward) else [*reward]
  named = lambda f: own.FROM_PYTHON + getattr(f, "__name__", type(f).__name__)
  rewards = {named(f): f for f in each}
  if len(rewards) < len(each):
    raise UserError(f"reward has two functions of one name: {[*rewards]}")
  if rewards:
    changed["reward.verifier"] = tuple(rewards)
  given = [data] if isinstance(data, str | os.PathLike) else [*data]
  if given and isinstance(given[0], Mapping):
    file = place.with_name(f"{place.name}.jsonl")
    given = [_written(file, given, begin_again)]
  if given:
    changed["data.files"] = tuple(str(path) for path in given)
  settings.require_fields(changed, c, "changes: ")
  with as_user_error(TypeError, ValueError):
    c.update_from_flattened_dict(changed)
  made = settings.training(c)
  process.keep_freed_memory()
  process.take_most_of_a_gpu()
  process.keep_programs(None)
  here = resolve.here(made.devices)
  this = resolve.resolve(made, here, None if begin_again else place)
  calls = {"rewards": rewards, "callbacks": callbacks}
  how = {"allow_change": allow_config_change, "begin_again": begin_again}
  return TrainedRun(place, run(this, place, **how, **calls))


def _written(path: pathlib.Path, rows: Sequence, anew: bool) -> pathlib.Path:
  """A file of these rows; raises UserError if it has others."""
  text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
  if path.exists() and not anew and path.read_text() != text:
    must = "choose another workdir, or pass begin_again=True"
    raise UserError(f"{path} has other rows than data; {must}")
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  return path
