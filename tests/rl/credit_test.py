"""Tests of brorl_jax/rl/credit.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.rl import advantages, credit


def test_credit_by_answer_by_hand():
  """Four are right: three say 7 and one says -2, so c = 4 and D = 2.

  4 / (2 * 3) = 2/3 for a 7, and 4 / (2 * 1) = 2 for the -2. A wrong 7 is not
  one of them. In the second row none is right, in the third all say the same.
  """
  answer = jnp.array([[7, 7, -2, 7, 7, 0], [1, 1, 2, 2, 3, 3], [5] * 6])
  correct = jnp.array(
    [[True, True, True, False, True, False], [False] * 6, [True] * 6]
  )
  got = credit.credit_by_answer(answer, correct)
  third = 2.0 / 3.0
  want = [[third, third, 2.0, 1.0, third, 1.0], [1.0] * 6, [1.0] * 6]
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.ci
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.integers(1, 8))
def test_credit_moves_nothing_between_right_and_wrong(seed, answers):
  """The correct ones' factors add up to c, the advantages to 0."""
  rng = np.random.default_rng(seed)
  shape = 4, 32
  answer = rng.integers(-1, answers, shape)
  correct, valid = rng.random(shape) < 0.4, rng.random(shape) < 0.8
  counted = correct & valid
  reward = jnp.float32(correct)
  factor = np.asarray(
    credit.credit_by_answer(*map(jnp.asarray, (answer, correct, valid)))
  )
  np.testing.assert_array_equal(factor[~counted], 1.0)
  assert (factor >= 0.0).all()
  total = np.where(counted, factor, 0.0).sum(1)
  np.testing.assert_allclose(total, counted.sum(1), rtol=1e-5)
  valid = jnp.asarray(valid)
  centered = advantages.center_by_group(reward, valid)
  np.testing.assert_allclose((factor * centered).sum(1), 0.0, atol=1e-4)
  shared = credit.share_credit(reward, jnp.asarray(factor), valid)
  np.testing.assert_allclose(
    advantages.center_by_group(shared, valid), factor * centered, atol=1e-5
  )
  # Every distinct answer of a group has the same sum.
  for said, share, of in zip(answer, factor, counted, strict=True):
    sums = [share[of & (said == a)].sum() for a in set(said[of].tolist())]
    np.testing.assert_allclose(sums, sums[:1] * len(sums), rtol=1e-5)


def test_shared_credit_by_hand():
  """The mean is 3/4. What is right has 1/4 more, times 3/2, 3/4 and 3/4.

  The last rollout does not count. The second group is all right: whatever the
  factors, its rewards stay equal and no advantage sees a difference.
  """
  reward = jnp.array([[1.0, 1.0, 1.0, 0.0, 9.0], [0.1] * 4 + [9.0]])
  factor = jnp.array([[1.5, 0.75, 0.75, 1.0, 7.0], [1.5, 0.5, 1.0, 1.0, 1.0]])
  valid = jnp.ones((2, 5), bool).at[:, 4].set(False)
  got = credit.share_credit(reward, factor, valid)
  want = [1.125, 0.9375, 0.9375, 0.0, 0.75]
  np.testing.assert_allclose(got[0], want, rtol=1e-6)
  assert not advantages.informative(got, valid)[1]


def test_credit_by_answer_of_a_large_group():
  """1024 rollouts, all right, with 1024 / 4 of each of 4 answers: all 1."""
  answer = jnp.arange(1024)[None] % 4 * 10**6
  correct = jnp.ones((1, 1024), bool)
  np.testing.assert_allclose(
    credit.credit_by_answer(answer, correct), 1.0, rtol=1e-6
  )
