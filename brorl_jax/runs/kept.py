"""Which saved steps of a run are kept."""

import math
from collections.abc import Mapping

from brorl_jax.config.run import RunConfig


def superfluous(
  scores: Mapping[int, float | None], *, newest: int, every: int
) -> list[int]:
  """The steps to delete, ascending.

  The `newest` steps stay, multiples of `every` (0: none), and the best one.
  """
  steps = sorted(scores)
  stay = {*steps[-newest:], *(s for s in steps if every and s % every == 0)}
  if (best := best_step(scores)) is not None:
    stay.add(best)
  return [s for s in steps if s not in stay]


def best_step(scores: Mapping[int, float | None]) -> int | None:
  """The earliest step with the highest score; None without any score."""
  known = {s: score for s, score in scores.items() if score is not None}
  return min(known, key=lambda s: (-known[s], s), default=None)


def too_rare(run: RunConfig, eval_every: int) -> str | None:
  """What to warn of before a run whose saved steps are of little use."""
  every, steps = run.save_every, run.steps
  if every > steps:
    return (
      f"run.save_every = {every} is above run.steps = {steps}: if the run is "
      "stopped, it starts again at step 1"
    )
  if math.lcm(every, eval_every) > steps:
    return (
      f"run.save_every = {every} and eval.every = {eval_every} fall on no step "
      f"up to run.steps = {steps}: only the first and the last saved step have "
      "a score by which to keep the best"
    )
  return None
