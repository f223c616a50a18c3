"""The training loop: prompts, rollouts, rewards, advantages, update, save.

Read `train` from top to bottom: it goes around the README's figure once per
step. Nothing below this file knows about configs, flags or files.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float, PyTree

from brorl_jax import clock, metrics
from brorl_jax import ledger as ledgers
from brorl_jax.collect import Drawn, Feed, collect, expected_pass_rates
from brorl_jax.ledger import Ledger
from brorl_jax.types import Groups, Prompts, Rollouts, Scores

_HELD = "time/checkpoint_s"  # what saving after the step before held this up


class Credit(NamedTuple):
  """What stage 4 makes of rewards."""

  advantage: Float[np.ndarray, "P N"]
  counts: Bool[np.ndarray, "P N"]  # False: out of the loss
  ledger: Ledger
  told: dict[str, float | None]  # metrics


class Stages(NamedTuple):
  """A step's stages, each a function; main/training.py wires the real ones."""

  target: int  # groups that a step trains on
  # step -> numbers of the prompts that it may draw, in the order of drawing
  candidates: Callable[[int, Ledger], Sequence[int]]
  prompts: Callable[[int, Sequence[int]], Prompts]  # step, candidates
  rollouts: Callable[
    [PyTree, Feed, jax.Array], Iterator[tuple[Prompts, Rollouts]]
  ]  # to the host
  scores: Callable[[int, Prompts, Rollouts], Scores]
  informative: Callable[[Groups], Bool[np.ndarray, " P"]]
  visited: Callable[[Ledger, int, Drawn], Ledger]
  advantages: Callable[[Groups, Ledger], Credit]
  update: Callable[[Any, Groups, Credit], tuple[Any, dict[str, Any]]]
  # After step and evaluation: the reference policy, and why it was reset.
  reference: Callable[
    [Any, Ledger, Mapping[str, Any]], tuple[Any, Ledger, str | None]
  ]
  # What the schedule changes at this step.
  changed: dict[str, Any] | None = None


@runtime_checkable
class Store(Protocol):
  """Where states go and come from."""

  def restore(
    self, like: Any, lacks: Callable[[int], str | None]
  ) -> tuple[Any, dict[str, Any]] | None:
    """The newest step that is whole and of which nothing is lacking."""
    ...

  def save(self, step: int, state: Any, ledger: dict[str, Any]) -> None:
    """Begins to."""
    ...

  def wait(self) -> None:
    """Returns when what was saved is there."""
    ...


@runtime_checkable
class Record(Protocol):
  """Where numbers go."""

  def lacks(self, step: int) -> str | None:
    """What is missing of what was written up to this step, None if nothing."""
    ...

  def start(self, done: int) -> float:
    """Forget what was written of steps after `done`, -1 for all.

    Returns:
      time/busy_s of the steps up to there, added up.
    """
    ...

  def event(self, step: int, what: Mapping[str, Any]) -> None:
    """Something that does not happen in every step."""
    ...

  def step(self, step: int, scalars: Mapping[str, Any], kept: Groups) -> None:
    """The metrics of a step, and the groups that it was trained on."""
    ...

  def evaluate(self, step: int, params: PyTree) -> float:
    """Measure these parameters on held-out prompts."""
    ...

  def sync(self) -> None:
    """Return when a loss of power loses nothing that was written."""
    ...


def train(
  state: Any,
  stages: Callable[[int], Stages],
  store: Store,
  record: Record,
  *,
  seed: int,
  steps: int,
  save_every: int,
  eval_every: int,
  pipeline: bool = False,
  max_busy_s: float = math.inf,
) -> Any:
  """Runs the steps after the newest checkpoint and returns the last state.

  A killed run continues as if it had not been: step s draws its prompts and
  its randomness from (seed, s) alone, and all else that it depends on is in
  the checkpoint. The state before the first step is saved too: where there is
  a line of a step there is a checkpoint, or one that was lost.

  Args:
    state: Initial state; `state.params` is sampled, `state.step` counts. If
      `store` holds any, `state` only lends its structure.
    stages: What happens in a step.
    store: Checkpoints.
    record: Metrics and evaluations.
    seed: Root of all randomness.
    steps: Last step at most.
    save_every: Steps between checkpoints; the last step is always saved.
    eval_every: Steps between evaluations; there is one before the first step
      and one after the last.
    pipeline: Sample the next step with the parameters before this update, which
      then happens while the devices would wait for verdicts; but for the step
      after a checkpoint, so that a run can go on from there.
    max_busy_s: The step that brings time/busy_s of all steps to this is the
      last one.

  Raises:
    Starved: A step found too few groups with a gradient.
    Unjudged: Verifiers failed on too many of a step's responses.
    FloatingPointError: A metric is not finite. The state is not saved.
  """
  done, ledger = -1, Ledger()
  if (saved := store.restore(state, record.lacks)) is not None:
    state, ledger = saved[0], Ledger.from_json(saved[1])
    done = int(state.step)
  spent = record.start(done)
  held = 0.0
  if done < 0:
    ledger = ledgers.evaluated(ledger, record.evaluate(0, state.params))
    held = _save(0, state, ledger, store, record)
  root, ahead = jax.random.key(seed), None

  def draw(step: int, params: PyTree, ledger: Ledger, **meanwhile) -> Drawn:
    now, key = stages(step), jax.random.fold_in(root, step)
    return collect(
      lambda feed: _finite(now.rollouts(params, feed, key), step),
      lambda *rollouts: now.scores(step, *rollouts),
      now.informative,
      lambda some: now.prompts(step, some),
      now.candidates(step, ledger),
      target=now.target,
      **meanwhile,
    )

  for step in range(max(done, 0) + 1, steps + 1):
    if spent >= max_busy_s:
      break
    begin, now = clock.now(), stages(step)
    if now.changed is not None:
      record.event(step, {"event": "phase", "changed": now.changed})
    save = step % save_every == 0 or step == steps
    drawn = ahead or draw(step, state.params, ledger)
    kept = drawn.trained()
    ledger = now.visited(_generated(ledger, drawn), step, drawn)
    credit = now.advantages(kept, ledger)

    update, ahead = _Once(lambda: now.update(state, kept, credit)), None
    if pipeline and not save:
      old = jax.tree.map(jax.numpy.copy, state.params)  # the update donates
      ahead = draw(step + 1, old, credit.ledger, meanwhile=update)
    state, learned = update()

    scalars = _of_draw(drawn) | credit.told | learned
    scalars |= {"time/update_s": update.spent, **_of_ledger(ledger, step)}
    scalars |= clock.since(begin)
    scalars |= {_HELD: held + _waited(store)}
    if (bad := metrics.first_not_finite(scalars)) is not None:
      raise FloatingPointError(f"step {step}: {bad} is {scalars[bad]}")
    # Lines first, then the checkpoint: a line past the newest checkpoint is
    # dropped on restart, but one that is missing could not be replaced.
    record.step(step, scalars, kept)
    ledger, spent = credit.ledger, spent + scalars["time/busy_s"]
    last = step == steps or spent >= max_busy_s
    if step % eval_every == 0 or last:
      ledger = ledgers.evaluated(ledger, record.evaluate(step, state.params))
    state, ledger, why = now.reference(state, ledger, scalars)
    if why is not None:
      record.event(step, {"event": "reference reset", "why": why})
    held = _save(step, state, ledger, store, record) if save or last else 0.0
  store.wait()
  return state


def _save(
  step: int, state: Any, ledger: Ledger, store: Store, record: Record
) -> float:
  """Begins to save a step; seconds that this took."""
  start = time.perf_counter()
  record.sync()  # so that no step is on disk without its lines
  store.save(step, state, ledger.to_json())
  return time.perf_counter() - start


def _waited(store: Store) -> float:
  """Seconds until the step that is being saved was on disk, and read back."""
  start = time.perf_counter()
  store.wait()
  return time.perf_counter() - start


class _Once:
  """A function without arguments that is called at most once."""

  def __init__(self, function: Callable[[], Any]):
    self._function, self._result, self.spent = function, None, 0.0

  def __call__(self) -> Any:
    if self._result is None:
      start = time.perf_counter()
      self._result = self._function()
      self.spent = time.perf_counter() - start
    return self._result


def _finite(
  done: Iterator[tuple[Prompts, Rollouts]], step: int
) -> Iterator[tuple[Prompts, Rollouts]]:
  for prompts, rollouts in done:
    if not np.isfinite(rollouts.logp).all():
      raise FloatingPointError(f"step {step}: sampled logp is not finite")
    yield prompts, rollouts


def _generated(ledger: Ledger, drawn: Drawn) -> Ledger:
  mask = drawn.groups.rollouts.mask
  return ledgers.generated(
    ledger,
    tokens=int(mask.sum()),
    samples=mask[..., 0].size,
    prompts=len(mask),
  )


def _of_draw(drawn: Drawn) -> dict[str, float | None]:
  """Metrics of everything that was generated, and where the time went."""
  groups, spent = drawn.groups, drawn.spent
  seen = metrics.of_groups(
    groups.rollouts,
    groups.scores,
    drawn.kept,
    rollout_s=spent["rollout"],
  )
  seen |= metrics.of_scores(groups.scores, score_s=spent["score"])
  expected = expected_pass_rates(groups.scores.reward)
  times = {f"time/{part}_s": seconds for part, seconds in spent.items()}
  return {**seen, **expected, **times}


def _of_ledger(ledger: Ledger, step: int) -> dict[str, int]:
  return {
    "data/tokens_total": ledger.tokens,
    "data/samples_total": ledger.samples,
    "sampling/resting_prompts": len(ledgers.resting(ledger, step + 1)),
  }
