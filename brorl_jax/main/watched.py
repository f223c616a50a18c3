"""The stages of a step, watched: which runs, and what nobody could judge."""

from collections.abc import Callable, Mapping
from typing import Any

from brorl_jax import train
from brorl_jax.runs import events

Beat = Callable[[int, str], None]
Tell = Callable[[int, Mapping[str, Any]], None]


def stages(
  inner: train.Stages, step: int, beat: Beat, tell: Tell
) -> train.Stages:
  """Stages with the same results, which call `beat` where one begins.

  Args:
    inner: The stages of the step.
    step: The step.
    beat: Receives the step and what begins; called by the main thread.
    tell: Receives the step and an event, if verifiers failed.
  """

  def rollouts(params, feed, key):
    beat(step, "sampling")
    for done in inner.rollouts(params, feed, key):
      beat(step, "sampling")
      yield done

  def advantages(kept, progress):
    beat(step, "advantages")
    return inner.advantages(kept, progress)

  def update(state, kept, credit):
    beat(step, "update")
    return inner.update(state, kept, credit)

  def guard(progress, scalars, sampled, updated):
    groups = sampled.groups
    responses = groups.scores.responses[groups.rollouts.drawn]
    failed = [(x.task, x.verdict.reason) for x in responses if not x.valid]
    if event := events.unjudged(failed, len(responses)):
      tell(step, event)
    return inner.guard(progress, scalars, sampled, updated)

  return inner._replace(
    rollouts=rollouts, advantages=advantages, update=update, guard=guard
  )
