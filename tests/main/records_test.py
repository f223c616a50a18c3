"""Tests of brorl_jax/main/records.py; more are in recorder_test.py."""

import dataclasses

import numpy as np
import pytest

from brorl_jax.main import records


@pytest.mark.ci
def test_a_sample_is_one_that_was_drawn(wired):
  """Of the second prompt a wrong one is looked for, and all are right."""
  kept = wired.kept
  mask, reward = kept.rollouts.mask.copy(), kept.scores.reward.copy()
  responses = kept.scores.responses.copy()
  reward[1], reward[1, 0] = 1.0, 0.0
  mask[1, 0], responses[1, 0] = False, None  # no rollout is there
  some = kept._replace(
    rollouts=dataclasses.replace(kept.rollouts, mask=mask),
    scores=kept.scores._replace(reward=reward, responses=responses),
  )
  lines = [*records.samples(1, some, wired.examples)]
  assert len(lines) == 4 and lines[1]["reward"] == 1.0
  assert lines[1]["tokens"] == int(mask[1, 1].sum()) > 0
  assert np.isfinite([line["score"] for line in lines]).all()
