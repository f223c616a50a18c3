"""Tests of brorl_jax/rl/filtering.py."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_rate_by_hand():
  """1 - 1/16 - 1/16 = 7/8 for a half and n = 4; for certainties nothing.

  1 - (1/4)^4 - (3/4)^4 = 1 - 82/256 = 174/256.
  """
  rate = lambda *p: float(filtering.expected_pass_rate(jnp.array(p), 4))
  assert rate(0.5) == pytest.approx(7 / 8)
  assert rate(0.25) == rate(0.75) == pytest.approx(174 / 256)
  assert rate(0.0) == rate(1.0) == 0.0
  assert rate(0.5, 0.25, 0.0, 1.0) == pytest.approx((224 + 174) / 256 / 4)


@pytest.mark.parametrize("p", [1e-8, 0.3, 1 - 2**-20])
def test_rate_is_stable_at_512(p):
  p = float(np.float32(p))
  log_q = math.log1p(-p)
  # -expm1 and log1p in float64 are the reference.
  want = -math.expm1(512 * log_q) - p**512
  if p > 0.5:
    want = -math.expm1(512 * math.log(p)) - math.exp(512 * log_q)
  got = float(filtering.expected_pass_rate(jnp.array([p]), 512))
  assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("n", tiers.some([2, 5], 1))
def test_rate_at_m_is_the_share_of_subsets_with_both_outcomes(n):
  for m in range(1, n + 1):
    subsets = list(itertools.combinations(range(n), m))
    for c in range(n + 1):
      want = np.mean([min(s) < c <= max(s) for s in subsets])
      got = filtering.pass_rate_at(m, jnp.array([c]), n)
      assert float(got) == pytest.approx(want, abs=1e-6)


def test_rate_at_m_is_a_mean_over_prompts_by_hand():
  """Of 4 with 1 or 3 right a pair has both with 3/6, with 2 right 4/6."""
  rate = lambda *c: float(filtering.pass_rate_at(2, jnp.array(c), 4))
  assert rate(1) == pytest.approx(rate(3)) == pytest.approx(1 / 2)
  assert rate(2) == pytest.approx(2 / 3)
  assert rate(0, 1, 2, 4) == pytest.approx((1 / 2 + 2 / 3) / 4)


@pytest.mark.ci
@settings(deadline=None, max_examples=10)
@given(st.floats(0.02, 0.98), st.sampled_from([(2, 6), (4, 12), (6, 6)]))
def test_which_estimate_is_unbiased(p, sizes):
  """Over all draws of n answers, each right with probability p."""
  m, n = sizes
  c = np.arange(n + 1)
  chance = [math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in c]
  truth = 1 - p**m - (1 - p) ** m
  at = [float(filtering.pass_rate_at(m, jnp.array([i]), n)) for i in c]
  assert np.dot(chance, at) == pytest.approx(truth, abs=1e-5)
  plug_in = [
    float(filtering.expected_pass_rate(jnp.array([i / n]), m)) for i in c
  ]
  assert np.dot(chance, plug_in) < truth - 1e-4


@pytest.mark.parametrize("m", [0, 5, -1])
def test_says_which_m_is_wrong(m):
  with pytest.raises(ValueError, match=rf"m = {m} is not in \[1, 4\]"):
    filtering.pass_rate_at(m, jnp.array([1]), 4)


def test_needs_a_rollout():
  with pytest.raises(ValueError, match="n = 0"):
    filtering.expected_pass_rate(jnp.array([0.5]), 0)


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


@pytest.mark.parametrize(
  "function, message",
  [
    (lambda reward: reward[:, 0] > 0, "TypeError"),
    (lambda reward, valid: reward > 0.5, r"bool\[4,6\]"),
    (lambda reward, valid: reward[:, 0], r"float32\[4\]"),
  ],
)
def test_an_own_rule_of_another_shape_is_refused(function, message):
  with pytest.raises(ValueError, match=message) as error:
    filtering.from_user(function)
  assert "\n" not in str(error.value)
