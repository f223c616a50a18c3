"""The training loop: prompts, rollouts, rewards, advantages, update, save.

Read `train` from top to bottom: each step goes once around the README's figure.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from brorl_jax import types
from brorl_jax.many import processes
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.rollout.dynamic_sampling import SampledGroups, collect
from brorl_jax.runs import checkpoints, metrics, run_state
from brorl_jax.types import Credit, Groups, Prompts, Rollouts, RunState, Updated
from brorl_jax.verdicts.base import Values

_SAVING = "time/checkpoint_s"  # for which saving held up the loop


class Stages(NamedTuple):
  """The stages of a step as functions; main/train.py makes them."""

  target: int  # number of groups to train on
  plan: dynamic_sampling.RoundPlan  # how many rollouts each candidate gets
  # On accelerators prompts are begun that will probably be needed, and what was
  # sampled of a step outlives a signal. On a CPU both would change a result's
  # last bits: which rollouts decode together then depends on when it came.
  accelerated: bool
  # If there are fewer, the step trains on a multiple of this many.
  least: int
  max_age: int  # steps that a rollout may cross
  # step -> indices of the prompts to draw from, in that order
  candidates: Callable[[int, RunState], Sequence[int]]
  prompts: Callable[[int, Sequence[int]], Prompts]  # step, candidates
  # (params, feed, key), and if they may cross the step what crosses: to the
  # host.
  rollouts: Callable[..., Iterator[tuple[Prompts, Rollouts]]]
  scores: Callable[[int, Prompts, Rollouts], types.Scores]
  informative: Callable[[Groups], Bool[np.ndarray, " P"]]
  advantages: Callable[[Groups, RunState], Credit]
  # The last one is asked before each batch whether to raise Interrupted.
  update: Callable[
    [Any, Groups, Credit, Callable[[], bool]], tuple[Any, Updated]
  ]
  # Run state, metrics, samples, update -> run state, what it says of the step
  guard: Callable[
    [RunState, Values, SampledGroups, Updated], tuple[RunState, types.Judgement]
  ]
  # After update and evaluation: may make the policy the new reference. The text
  # is the reason, None without a reset.
  reference: Callable[[Any, RunState], tuple[Any, RunState, str | None]]
  # Config fields that a phase changes at this step.
  changed: dict[str, Any] | None = None
  # What an environment adds to rollouts; None: they have one turn.
  reply: Callable[[int, Prompts, Rollouts], Rollouts] | None = None

  @property
  def ahead(self) -> bool:
    """Whether prompts are begun that may not be needed."""
    return self.accelerated or self.max_age > 0


@runtime_checkable
class StepRecorder(Protocol):
  """Writes metrics, events, samples and evaluations."""

  def lacks(self, step: int) -> str | None:
    """Why the files do not cover the steps up to this one, None if they do."""

  def start(self, done: int) -> None:
    """Drop what was written after step `done`; -1 drops everything."""

  def event(self, step: int, what: Values) -> None:
    """Record something that does not happen in every step."""

  def step(
    self, step: int, scalars: Values, kept: Groups, sampled: SampledGroups
  ) -> None:
    """Record the metrics of a step, what it was trained on and what it drew."""

  def dump(self, step: int, kept: Groups, credit: Credit, drawn: Groups):
    """Keep what the last step of a run was trained on, or else all it drew."""

  def keep(self, step: int, finished: types.Finished) -> None:
    """Keep what was sampled of a step before it is done."""

  def sampled(self, step: int) -> types.Finished:
    """What was kept of this step."""
    ...

  def evaluate(self, step: int, params: PyTree) -> float:
    """Evaluate these parameters on held-out prompts; returns the score."""
    ...

  def sync(self) -> None:
    """Return when everything written would survive a power loss."""


class RunEnded(RuntimeError):
  """The numbers of a run ended it; its state is being saved."""

  def __init__(self, step: int, why: str):
    back = f"see stopped/step_{step}.npz; --from_step= goes back"
    super().__init__(f"step {step}: {why}; the step is saved, {back}")


@metrics.counting()
def train(
  state: Any,
  make_stages: Callable[[int], Stages],
  store: checkpoints.Store,
  recorder: StepRecorder,
  *,
  seed: int,
  steps: int,
  save_every: int,
  eval_every: int,
  max_samples: int = 0,
  agree: Callable[[], bool] = lambda: False,
  asked: Callable[[], bool] = lambda: False,
) -> Any:
  """Runs the steps after the newest checkpoint and returns the last state.

  A killed run resumes with the same numbers: the prompts and the randomness of
  step s depend on (seed, s) alone, and everything else is in the checkpoint.
  The state before the first step is saved too. So a run that has written the
  line of a step also has a checkpoint, unless somebody removed it.

  Args:
    state: If `store` holds a checkpoint, only its structure is used.
    save_every: Steps between checkpoints. The last step is always saved.
    eval_every: Steps between evaluations, beside the first and the last.
    max_samples: The run ends with the step at which the rollouts generated so
      far reach this; 0: no bound.
    agree: Called before the first step and at the end of each: whether all
      processes of the run stop now; also in an update, which is given up if
      the state before it is saved.
    asked: Whether this process is to stop; sampling then ends in all.

  Raises:
    RunEnded: Too many bad steps in a row, or a guard ended the run.
    Interrupted: A step was given up, of which the next start repeats what it
      must; the state before it is saved.
    TooManyInvalid: Verifiers failed on too many responses of a step.
    FloatingPointError: A parameter is not finite. The state is not saved.
  """
  state, progress, saving_s = _begun(state, store, recorder)
  key, stop, score, unsaved = jax.random.key(seed), agree(), None, False
  before: types.Finished | None = None
  spent_up = lambda p: 0 < max_samples <= p.samples

  for step in range(int(state.step) + 1, steps + 1):
    if spent_up(progress) or stop:
      break
    started, stages = metrics.now(), make_stages(step)

    # Stages 1 to 3: prompts, rollouts, rewards, until enough have a gradient.
    before = recorder.sampled(step) if before is None else before
    try:
      sampled = _sample(stages, step, state, progress, key, asked, before)
    except types.Interrupted as e:
      recorder.keep(step, e.finished if stages.ahead else {})
      if unsaved:
        _save(step - 1, state, progress, score, store, recorder)
      raise
    kept = sampled.kept_groups(stages.least)
    progress = run_state.generated(progress, sampled.groups, sampled.kept)

    # Stage 4: advantages of the groups that were kept.
    credit = stages.advantages(kept, progress)

    # Stage 5: the update.
    saving_s += metrics.timed(store.release)[1]  # the update donates the state
    gives_up = (lambda: False) if unsaved else agree
    updating = stages.update, state, kept, credit, gives_up
    try:
      (state, updated), update_s = metrics.timed(*updating)
    except types.Interrupted:
      if not stages.max_age:
        recorder.keep(step, sampled.chunks(stages.plan.chunk))
      raise
    before = sampled.unfinished if stages.max_age else None
    processes.trim()
    scalars = _scalars(sampled, credit, updated) | {"time/update_s": update_s}
    spent = metrics.since(started)
    scalars |= {**spent, _SAVING: saving_s + metrics.timed(store.check)[1]}
    stop, progress, score = agree(), credit.progress, None
    last = step == steps or spent_up(progress)
    if step % eval_every == 0 or last:
      progress, score = _evaluated(step, state, progress, recorder)
    progress, judged = stages.guard(progress, scalars, sampled, updated)
    # First the lines, then the checkpoint: a restart drops lines that are newer
    # than the newest checkpoint, but it could not replace a missing line.
    recorder.step(step, judged.scalars, kept, sampled)
    state, progress, reason = stages.reference(state, progress)
    _record_events(recorder, step, stages.changed, judged.events, reason)
    saving_s = 0.0
    save = step % save_every == 0 or last or stop or judged.end is not None
    unsaved = not save
    if save:
      saving_s = _save(step, state, progress, score, store, recorder, before)
    if judged.end is not None:
      recorder.dump(step, kept, credit, sampled.groups)
      raise RunEnded(step, judged.end)
  store.wait()
  return state


def _begun(
  state: Any, store: checkpoints.Store, recorder: StepRecorder
) -> tuple[Any, RunState, float]:
  """The newest checkpoint, or what step 0 saves; seconds of saving."""
  if (saved := store.restore(state, recorder.lacks)) is not None:
    recorder.start(int(saved[0].step))
    return saved[0], run_state.from_json(saved[1]), 0.0
  recorder.start(-1)
  progress, score = _evaluated(0, state, RunState(), recorder)
  saving_s = _save(0, state, progress, score, store, recorder)
  return state, progress, saving_s


def _sample(
  stages: Stages,
  step: int,
  state: Any,
  progress: RunState,
  key: jax.Array,
  stopping: Callable[[], bool],
  before: types.Finished,
) -> SampledGroups:
  """Stages 1 to 3: prompts, rollouts, rewards, until `target` groups remain."""
  key = jax.random.fold_in(key, step)
  sampled = collect(
    lambda *feed: stages.rollouts(state.params, feed[0], key, *feed[1:]),
    lambda *rollouts: stages.scores(step, *rollouts),
    stages.informative,
    lambda candidates: stages.prompts(step, candidates),
    stages.candidates(step, progress),
    target=stages.target,
    plan=stages.plan,
    usual=progress.passed if stages.ahead else None,
    # Not into another phase, in which rollouts may have other sizes.
    before={} if stages.max_age and stages.changed else before,
    stopping=stopping,
    max_age=stages.max_age,
    reply=stages.reply and functools.partial(stages.reply, step),
  )
  processes.trim()
  return sampled


def _record_events(
  recorder: StepRecorder,
  step: int,
  changed: Values | None,
  judged: Sequence[Values],
  reset: str | None,
) -> None:
  if changed is not None:
    recorder.event(step, {"event": "phase", "changed": changed})
  for event in judged:
    recorder.event(step, event)
  if reset is not None:
    recorder.event(step, {"event": "reference reset", "why": reset})


def _evaluated(
  step: int, state: Any, progress: RunState, recorder: StepRecorder
) -> tuple[RunState, float]:
  score = recorder.evaluate(step, state.params)
  processes.trim()
  return run_state.evaluated(progress, score), score


def _save(
  step: int,
  state: Any,
  progress: RunState,
  score: float | None,
  store: checkpoints.Store,
  recorder: StepRecorder,
  unfinished: types.Finished | None = None,
) -> float:
  """Starts to save a step; returns the seconds that this took."""
  start = time.perf_counter()
  if unfinished is not None:
    recorder.keep(step + 1, unfinished)
  recorder.sync()  # the lines of a step are on disk before its checkpoint
  store.save(step, state, progress.to_json(), score)
  return time.perf_counter() - start


def _scalars(
  sampled: SampledGroups, credit: Credit, updated: Updated
) -> dict[str, Any]:
  groups, spent = sampled.groups, sampled.spent
  of, slowest = (groups.rollouts, groups.scores), max(sampled.rollout_s)
  seen = metrics.group_metrics(*of, sampled.kept, rollout_s=slowest)
  seen |= metrics.score_metrics(groups.scores, score_s=spent["score"])
  seen["sampling/surplus_prompts"] = float(sampled.surplus)
  age, mask = groups.rollouts.age, groups.rollouts.mask
  seen["rollout/age_mean"] = 0.0 if age is None else float(age[mask].mean())
  times = {f"time/{part}_s": seconds for part, seconds in spent.items()}
  if len(sampled.rollout_s) > 1:
    each = enumerate(sampled.rollout_s)
    times |= {f"time/rollout_s/{process}": s for process, s in each}
  out = seen | times | credit.metrics | updated.metrics
  out["data/tokens_total"] = credit.progress.tokens
  return out | {"data/samples_total": credit.progress.samples}
