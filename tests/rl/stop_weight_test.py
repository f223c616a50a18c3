"""Tests of brorl_jax/rl/stop_weight.py."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import advantages, stop_weight


def loo(reward, valid, length):
  return advantages.leave_one_out(reward, valid)


def group(*rewards, most=6):
  """Rewards, valid and lengths of prompts with these rollouts."""
  reward = np.zeros((len(rewards), most), np.float32)
  valid = np.zeros((len(rewards), most), bool)
  for p, some in enumerate(rewards):
    reward[p, : len(some)], valid[p, : len(some)] = some, True
  return jnp.asarray(reward), jnp.asarray(valid), jnp.ones(reward.shape)


def pooled(*args, function=loo, whitened=False):
  return stop_weight.pooled(function, *args, whitened=whitened)


def test_every_prompt_counts_once_by_hand():
  """Of 2, 4 and 6 rollouts on average 4: factors 2, 1 and 2/3."""
  args = group([1, 0], [1, 0, 0, 0], [0, 0, 0, 0, 1, 1])
  got = np.asarray(pooled(*args))
  want = np.asarray(loo(*args)) * np.array([[2.0], [1.0], [2 / 3]])
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # So that each has the same share of the sum: 4 (K / n) (1 - K / n) n / (n-1).
  right = (got * (np.asarray(args[0]) > 0)).sum(axis=1)
  np.testing.assert_allclose(
    right, [4 / 2, 4 / 4, 4 * 2 / 6 * 4 / 5], rtol=1e-6
  )


def test_prompts_of_equal_size_are_as_they_were():
  args = group([1, 0, 0], [1, 1, 0], most=3)
  for name, function in advantages.ADVANTAGES.items():
    if name == "pass_at_k":
      continue
    whitened = name in advantages.WHITENED
    np.testing.assert_allclose(
      pooled(*args, function=function, whitened=whitened),
      function(*args),
      rtol=1e-6,
    )


def test_a_prompt_of_which_none_counts_is_no_prompt():
  args = group([1, 0], [], [1, 0, 0, 0])
  got = pooled(*args)
  rest = pooled(*(x[jnp.array([0, 2])] for x in args))
  np.testing.assert_allclose(got[jnp.array([0, 2])], rest)
  np.testing.assert_array_equal(got[1], 0.0)


@pytest.mark.parametrize("kind", advantages.WHITENED)
def test_whitening_counts_every_prompt_once_too(kind):
  """As if the shorter one had been drawn thrice: its weights are thrice."""
  few, many = [1, 0], [1, 0, 0, 0, 0, 0]
  function = advantages.ADVANTAGES[kind]
  got = pooled(*group(few, many), function=function, whitened=True)
  np.testing.assert_allclose(
    got[0, :2] / 2.0,  # its factor: (2 + 6) / 2 / 2
    function(*group(few * 3, many))[0, :2],
    rtol=1e-5,
  )


def expected(after, enough, p):
  """Of a pass rate p and rounds: mean rollouts, and the weight of `pooled`.

  The weight is E[K (n - K) / n (n - 1)] / p (1 - p), 1 without bias.
  """
  ways, n, rollouts, weight = {0: 1}, 0, 0.0, 0.0
  for last, more in zip(after, np.diff(after, prepend=0).tolist(), strict=True):
    n, before, ways = last, ways, {}
    for k, c in before.items():
      for j in range(more + 1):
        ways[k + j] = ways.get(k + j, 0) + c * math.comb(more, j)
    ends = {
      k: c for k, c in ways.items() if n == after[-1] or min(k, n - k) >= enough
    }
    for k, c in ends.items():
      del ways[k]
      # In logarithms: there are 2^1024 sequences of 1,024 rewards.
      log = math.log(c) + k * math.log(p) + (n - k) * math.log1p(-p)
      rollouts += math.exp(log) * n
      weight += math.exp(log) * k * (n - k) / (n * (n - 1))
  return rollouts, weight / (p * (1 - p))


@pytest.mark.parametrize(
  "enough, p, n, weight",
  [
    (1, 0.001, 838, 3.02),
    (1, 0.01, 216, 2.09),
    (2, 0.01, 440, 1.48),
    (4, 0.01, 828, 1.175),
    (4, 0.1, 81, 1.11),
    (4, 0.5, 17, 1.01),
  ],
)
def test_the_bias_that_the_documents_name(enough, p, n, weight):
  got = expected((16, 64, 256, 1024), enough, p)
  assert got[0] == pytest.approx(n, abs=0.6)
  assert got[1] == pytest.approx(weight, abs=0.006)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_the_gradient_by_enumeration(p):
  """The score of a right rollout is 1 / p, of a wrong one -1 / (1 - p)."""
  after = (2, 4, 6)
  total = 0.0
  for draws in itertools.product((0, 1), repeat=6):
    n = next(n for n in after if n == 6 or 0 < sum(draws[:n]) < n)
    args = group(draws[:n])
    score = np.where(np.asarray(args[0]) > 0, 1 / p, -1 / (1 - p))
    once = (np.asarray(pooled(*args)) * np.where(args[1], score, 0.0)).sum()
    total += p ** sum(draws) * (1 - p) ** (6 - sum(draws)) * float(once) / n
  assert total == pytest.approx(expected(after, 1, p)[1], rel=1e-5)
  assert abs(total - 1.0) > 0.02
