"""The training loop: prompts, rollouts, rewards, advantages, update, save.

Read `train` from top to bottom: it goes around the README's figure once per
step. Nothing below this file knows about configs, flags or files.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float, PyTree

from brorl_jax import metrics
from brorl_jax.types import Prompts, Rollouts

Totals = dict[str, int]
_HELD = "time/checkpoint_s"  # what saving after the step before held this up


class Groups(NamedTuple):
  """Whole groups, on the host: of each prompt all N rollouts."""

  prompts: Prompts
  rollouts: Rollouts
  reward: Float[np.ndarray, "P N"]  # raw


class Stages(NamedTuple):
  """The five stages, each a function; main/training.py wires the real ones."""

  prompts: Callable[[int, int], Prompts]  # step, round
  rollouts: Callable[[PyTree, Prompts, jax.Array], Rollouts]  # to the host
  rewards: Callable[[int, Prompts, Rollouts], Float[np.ndarray, "P N"]]
  advantages: Callable[[Groups], Float[np.ndarray, "P N"]]
  update: Callable[[Any, Groups, Any], tuple[Any, dict[str, Any]]]


@runtime_checkable
class Store(Protocol):
  """Where states go and come from."""

  def restore(self, like: Any) -> tuple[Any, Totals] | None: ...
  def save(self, step: int, state: Any, totals: Totals) -> None: ...


@runtime_checkable
class Record(Protocol):
  """Where numbers go."""

  def start(self, done: int) -> None:
    """Forget what was written of steps after `done`, -1 for all."""
    ...

  def step(self, step: int, scalars: Mapping[str, Any], kept: Groups) -> None:
    """The metrics of a step, and the groups that it was trained on."""
    ...

  def evaluate(self, step: int, params: PyTree) -> None:
    """Measure these parameters on held-out prompts."""
    ...


class Starved(RuntimeError):
  """Dynamic sampling found too few prompts that carry a gradient."""


def train(
  state: Any,
  stages: Stages,
  store: Store,
  record: Record,
  *,
  informative: Callable[[Float[Any, "P N"]], Bool[Any, " P"]],
  seed: int,
  steps: int,
  target: int,
  max_rounds: int,
  save_every: int,
  eval_every: int,
) -> Any:
  """Runs the steps after the newest checkpoint and returns the last state.

  A killed run continues as if it had not been: step s draws its prompts and
  its randomness from (seed, s) alone, never from how the process came there.

  Args:
    state: Initial state; `state.params` is sampled, `state.step` counts. If
      `store` holds any, `state` only lends its structure.
    stages: What happens in a step.
    store: Checkpoints.
    record: Metrics and evaluations.
    informative: Which groups carry a gradient.
    seed: Root of all randomness.
    steps: Last step.
    target: Groups that are trained on in a step.
    max_rounds: Rounds of prompts that a step may draw.
    save_every: Steps between checkpoints; the last step is always saved.
    eval_every: Steps between evaluations; there is one before the first step
      and one after the last.

  Raises:
    Starved: A step found too few groups with a gradient.
    FloatingPointError: A metric is not finite. The state is not saved.
  """
  done, totals = -1, {"tokens": 0, "samples": 0}
  if (saved := store.restore(like=state)) is not None:
    state, totals = saved
    done = int(state.step)
  record.start(done)
  if done < 0:
    record.evaluate(0, state.params)
  root, held = jax.random.key(seed), 0.0

  for step in range(max(done, 0) + 1, steps + 1):
    key, clock = jax.random.fold_in(root, step), Clock()

    def draw(round: int, step=step, key=key, clock=clock, state=state):
      prompts = stages.prompts(step, round)
      with clock("rollout"):
        rollouts = stages.rollouts(state.params, prompts, key)
      if not np.isfinite(rollouts.logp).all():
        raise FloatingPointError(f"step {step}: sampled logp is not finite")
      with clock("score"):
        reward = stages.rewards(step, prompts, rollouts)
      return Groups(prompts, rollouts, reward)

    kept, drawn = collect(
      draw, informative, target=target, max_rounds=max_rounds
    )
    with clock("update"):
      advantages = stages.advantages(kept)
      state, learned = stages.update(state, kept, advantages)

    totals = {
      "tokens": totals["tokens"] + int(drawn.rollouts.mask.sum()),
      "samples": totals["samples"] + drawn.reward.size,
    }
    scalars = metrics.of_groups(
      drawn.rollouts,
      drawn.reward,
      np.asarray(informative(drawn.reward)),
      rollout_s=clock.spent["rollout"],
    )
    scalars |= learned | {f"data/{k}_total": v for k, v in totals.items()}
    if (bad := metrics.first_not_finite(scalars)) is not None:
      raise FloatingPointError(f"step {step}: {bad} is {scalars[bad]}")
    # Lines first, then the checkpoint: a line past the newest checkpoint is
    # dropped on restart, but one that is missing could not be replaced.
    record.step(step, scalars | clock.seconds() | {_HELD: held}, kept)
    if step % eval_every == 0 or step == steps:
      record.evaluate(step, state.params)
    if step % save_every == 0 or step == steps:
      with clock("save"):
        store.save(step, state, totals)
    held = clock.spent["save"]
  return state


def collect(
  draw: Callable[[int], Groups],
  informative: Callable[[Float[Any, "P N"]], Bool[Any, " P"]],
  *,
  target: int,
  max_rounds: int,
) -> tuple[Groups, Groups]:
  """Dynamic sampling: draws rounds of groups until `target` of them are kept.

  A group is kept iff its raw rewards are not all equal: the others have no
  gradient. Rounds are whole, so the last may keep more than are wanted; the
  first `target` in the order of drawing are trained on.

  Args:
    draw: Round number, from 0, to its groups.
    informative: The rule.
    target: Groups to keep.
    max_rounds: When to give up.

  Returns:
    The kept groups, and all that were drawn.

  Raises:
    Starved: `max_rounds` were not enough.

  References:
    Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
  """
  drawn, kept = [], 0
  while kept < target and len(drawn) < max_rounds:
    drawn.append(draw(len(drawn)))
    kept += int(np.sum(informative(drawn[-1].reward)))
  every = jax.tree.map(lambda *x: np.concatenate(x), *drawn)
  if kept < target:
    raise Starved(
      f"only {kept} of {len(every.reward)} prompts have rewards that differ, "
      f"{target} are needed: raise max_rounds ({max_rounds}), or train on "
      "prompts that are neither solved nor hopeless"
    )
  places = np.flatnonzero(informative(every.reward))[:target]
  return jax.tree.map(lambda x: x[places], every), every


class Clock:
  """Seconds spent in the parts of one step."""

  def __init__(self):
    self.spent = collections.defaultdict[str, float](float)

  @contextlib.contextmanager
  def __call__(self, part: str):
    start = time.perf_counter()
    yield
    self.spent[part] += time.perf_counter() - start

  def seconds(self) -> dict[str, float]:
    """As metrics."""
    return {f"time/{part}_s": spent for part, spent in self.spent.items()}
