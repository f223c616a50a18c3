"""Tests of brorl_jax/rl/stop_weight.py."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import advantages, stop_weight, stopping
from brorl_jax.rl.stopping import Rounds

ROUNDS = Rounds((2, 4, 6), 1, 1)


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
    if name in advantages.OPTIONS:
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


def test_each_round_has_its_own_baseline_by_hand():
  """10 | 11 | 0100 would be drawn as 2, 2 and 2 rollouts."""
  args = group([0, 0, 1, 1, 1, 0], [1, 0], [0, 0, 1, 0])
  got = stop_weight.by_round(loo, *args, rounds=ROUNDS)
  want = [[0, 0, 0, 0, 1, -1], [1, -1, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0]]
  np.testing.assert_allclose(got, want)


def stopped(draws):
  """The rewards that a prompt sees of these."""
  for n in ROUNDS.after:
    seen = draws[:n]
    if n == ROUNDS.after[-1] or 0 < sum(seen) < n:
      return seen
  raise AssertionError


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_the_gradient_of_each_treatment_by_enumeration(p):
  """Of p: exactly 1 with 'exact', E[n] with 'rounds', as said with 'pooled'.

  The score of a right rollout is 1 / p, of a wrong one -1 / (1 - p).
  """
  sums = dict.fromkeys(("pooled", "exact", "rounds", "n"), 0.0)
  for draws in itertools.product((0, 1), repeat=6):
    chance = p ** sum(draws) * (1 - p) ** (6 - sum(draws))
    seen = stopped(draws)
    args = group(seen)
    score = np.where(np.asarray(args[0]) > 0, 1 / p, -1 / (1 - p))
    score = np.where(args[1], score, 0.0)
    # One prompt: the mean over all rollouts is that over its own.
    once = float((np.asarray(pooled(*args)) * score).sum() / len(seen))
    ratio = stopping.correction(ROUNDS, right=sum(seen), drawn=len(seen))
    each = stop_weight.by_round(loo, *args, rounds=ROUNDS)
    sums["pooled"] += chance * once
    sums["exact"] += chance * once * ratio
    sums["rounds"] += chance * float((np.asarray(each) * score).sum())
    sums["n"] += chance * len(seen)
  told = stopping.expected(ROUNDS, p)
  assert sums["exact"] == pytest.approx(1.0, rel=1e-5)
  assert sums["rounds"] == pytest.approx(sums["n"], rel=1e-5)
  assert sums["n"] == pytest.approx(told["n"], rel=1e-6)
  assert sums["pooled"] == pytest.approx(told["hidden_weight"], rel=1e-5)
  assert abs(sums["pooled"] - 1.0) > 0.02


@pytest.mark.parametrize("kind", ["maxrl", "grpo", "tokens"])
def test_rounds_may_have_any_advantage(kind):
  args = group([0, 1, 1, 1, 1, 0], [1, 0])
  function = functools.partial(advantages.ADVANTAGES[kind])
  got = stop_weight.by_round(function, *args, rounds=ROUNDS)
  assert got.shape == (2, 6)
  np.testing.assert_array_equal(got[0, 2:4], 0.0)  # equal rewards
  np.testing.assert_array_equal(got[1, 2:], 0.0)
  assert float(jnp.abs(got[0, :2]).min()) > 0.1
