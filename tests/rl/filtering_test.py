"""Tests of brorl_jax/rl/filtering.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import advantages, filtering

# One group of each kind.
REWARD = jnp.array(
  [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, 0.5], [0.2, 0.4], [0.4, 1.0]]
)


def test_the_three_rules_differ_only_on_rewards_in_between():
  same = [False, False, True]
  for rule, rest in (
    (advantages.informative, [False, True, True]),
    (filtering.partly_solved, [False, False, True]),
  ):
    np.testing.assert_array_equal(rule(REWARD), same + rest)


def test_only_a_full_reward_solves():
  got = filtering.partly_solved(jnp.array([[0.9, 0.0], [1.0, 0.0]]))
  assert got.tolist() == [False, True]


@pytest.mark.parametrize("bad", [1.0, jnp.nan])
def test_rollouts_that_do_not_count_have_no_influence(bad):
  reward = jnp.concatenate([REWARD, jnp.full((6, 1), bad)], 1)
  valid = jnp.ones((6, 3), bool).at[:, 2].set(False)
  none = jnp.zeros((6, 3), bool)
  one = none.at[:, 0].set(True)
  partly = lambda r, v: filtering.partly_solved(r / 0.4, v)
  np.testing.assert_array_equal(partly(reward, valid), partly(REWARD, None))
  assert not partly(reward, none).any()
  assert not partly(reward, one).any()  # one rollout cannot be two kinds


@pytest.mark.parametrize("kind", filtering.KEEP)
def test_every_rule_by_hand(kind):
  """The last rollout does not count; a group in which none does has no rule."""
  reward = jnp.concatenate([REWARD, jnp.full((6, 1), 7.0)], 1)
  valid = jnp.ones((6, 3), bool).at[:, 2].set(False)
  want = {
    "differ": [False, False, True, False, True, True],
    "solved": [False, False, True, False, False, True],
    "all": [True] * 6,
  }[kind]
  rule = filtering.KEEP[kind]
  np.testing.assert_array_equal(rule(reward, valid), want)
  assert filtering.from_user(rule) is rule


@pytest.mark.parametrize("function, message", [
  (lambda reward: reward[:, 0] > 0, "TypeError"),
  (lambda reward, valid: reward > 0.5, r"bool\[4,6\]"),
  (lambda reward, valid: reward[:, 0], r"float32\[4\]"),
])  # fmt: skip
def test_an_own_rule_of_another_shape_is_refused(function, message):
  with pytest.raises(ValueError, match=message) as error:
    filtering.from_user(function)
  assert "\n" not in str(error.value)
