"""Tests of brorl_jax/learner/step.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from one_step import groups

from brorl_jax.learner import packing, update
from brorl_jax.learner import step as steps


def packed_tokens(parts):
  """Every token that the loss sees: how often, and its advantage."""
  seen = {}
  for batch in (batch for part in parts for batch in part):
    for at in np.argwhere(batch.mask):
      row = tuple(at[:-1])
      assert int(batch.response[tuple(at)]) not in seen
      seen[int(batch.response[tuple(at)])] = (
        float(batch.weight[row]),
        float(batch.advantage[row]),
      )
  return seen


def test_rollouts_that_do_not_count_are_not_packed():
  some = groups(
    [[1, 0, 1, 0], [0, 0, 1, 1]], length=[[1, 2, 3, 4], [4, 4, 1, 1]]
  )
  cut = np.array([[False, False, False, True], [True, True, False, False]])
  advantage = np.arange(8, dtype=np.float32).reshape(2, 4)
  minibatches = lambda counted: steps.minibatches(
    some,
    advantage,
    counted,
    packing.Layout(rows=2, blocks=2, length=4),
    count=2,
    seed=(0, 1),
    scale=lambda length: None,
  )
  parts = minibatches(~cut)
  want = {}
  for p, n, t in np.argwhere(some.rollouts.mask):
    if not cut[p, n]:
      token = int(some.rollouts.tokens[p, n, t])
      want[token] = (1.0, float(advantage[p, n]))
  assert packed_tokens(parts) == want and len(want) == 1 + 2 + 3 + 1 + 1
  # Five count, and all of them differ.
  shares = steps.packing_metrics(parts, 5)
  assert shares["update/distinct_fraction"] == 1.0
  parts = minibatches(np.ones((2, 4), bool))
  assert len(packed_tokens(parts)) == some.rollouts.mask.sum() == 20


def test_a_gradient_that_is_not_finite_is_named():
  params = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}
  good = update.Stats.zero(params)
  steps.refuse_not_finite([good], params, 7)
  bad = dataclasses.replace(good, finite=jnp.array([True, False]))
  with pytest.raises(
    FloatingPointError, match=r"step 7: .*b/c.*lower .*optim\.lr"
  ):
    steps.refuse_not_finite([good, bad], params, 7)
