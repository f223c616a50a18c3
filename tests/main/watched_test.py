"""Tests of brorl_jax/main/watched.py."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import train_test
from train_test import bandit

from brorl_jax import train
from brorl_jax.main import watched
from brorl_jax.tasks.base import Verdict

HUNG = Verdict("invalid", 0.0, "late", "")


def half_unjudged(stages):
  """The first answer of each group is not judged; rewards stay."""

  def scores(step, prompts, rollouts):
    out = stages.scores(step, prompts, rollouts)
    responses = out.responses.copy()
    responses[:, 0] = [
      dataclasses.replace(one, verdict=HUNG) for one in responses[:, 0]
    ]
    return out._replace(responses=responses)

  return stages._replace(scores=scores)


@pytest.mark.parametrize("pipeline", [False, True])
def test_the_stages_do_the_same_and_say_where_they_are(pipeline):
  beats, told = [], []
  note = lambda *beat: beats.append(beat)
  tell = lambda *event: told.append(event)
  plain, seen = train_test.FakeRecorder(), train_test.FakeRecorder()
  stages = lambda step: watched.stages(bandit(), step, note, tell)
  how = dict(pipeline=pipeline, save_every=2)
  state = train_test.run(train_test.Memory(), 4, plain, **how)
  watched_state = train_test.run(
    train_test.Memory(), 4, seen, stages=stages, **how
  )
  np.testing.assert_array_equal(state.params, watched_state.params)
  without = train_test.without_times
  assert [without(x) for x in plain.steps.values()] == [
    without(x) for x in seen.steps.values()
  ]
  assert told == []
  order = [beat for beat, _ in itertools.groupby(beats)]
  each = lambda step: [
    (step, what) for what in ("sampling", "advantages", "update")
  ]
  if not pipeline:
    assert order == [beat for step in range(1, 5) for beat in each(step)]
  else:  # the next step is sampled before the update
    assert order[:4] == [*each(1)[:2], (2, "sampling"), (1, "update")]
    assert set(order) == {beat for step in range(1, 5) for beat in each(step)}
  assert len(beats) > len(order)  # also between the prompts of a step


def test_answers_that_nobody_judged_are_an_event_of_the_step(monkeypatch):
  monkeypatch.setattr("brorl_jax.rollout.dynamic_sampling.MAX_INVALID", 1.0)
  told = []
  stages = watched.stages(
    half_unjudged(bandit(n=4)),
    7,
    lambda *_: None,
    lambda *event: told.append(event),
  )
  key, params = jax.random.key(0), jax.numpy.zeros(3)
  sampled = train._sample(stages, 7, params, train_test.RunState(), key)
  updated = train.Updated(None, {})
  stages.guard(train_test.RunState(), {}, sampled, updated)
  ((step, event),) = told
  groups = len(sampled.kept)
  assert (step, event["count"], event["of"]) == (7, groups, 4 * groups)
  assert (event["event"], event["why"]) == ("unjudged", "late")
