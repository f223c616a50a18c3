"""Tests of brorl_jax/rl/allocation.py."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import allocation


def allocate(name, p, *, known=None, budget, **sizes):
  p = jnp.asarray(p, jnp.float32)
  known = jnp.ones(len(p), bool) if known is None else jnp.asarray(known)
  sizes["each"] = budget / int(known.sum())
  value = allocation.VALUES[name]
  return np.asarray(allocation.allocate(value, p, known, **sizes)).tolist()


@pytest.mark.parametrize("name", allocation.VALUES)
@pytest.mark.parametrize("budget", [6, 7, 8, 10, 13, 18, 40])
def test_no_other_numbers_are_worth_more(name, budget):
  """All of them, one by one: 3 prompts with 2, 4 or 6 rollouts."""
  p = np.array([0.05, 0.4, 0.9], np.float32)
  got = allocate(name, p, least=2, most=6, budget=budget)
  assert sum(got) <= max(budget, 6)

  def worth(n):
    numbers = jnp.asarray(n, jnp.float32)[:, None]
    return float(
      allocation.VALUES[name](numbers, jnp.asarray(p)[:, None]).sum()
    )

  others = [
    n for n in itertools.product((2, 4, 6), repeat=3)
    if sum(n) <= max(budget, 6)
  ]  # fmt: skip
  assert worth(got) == pytest.approx(max(map(worth, others)), rel=1e-6)


def test_history_gives_in_proportion_to_the_root():
  """1 / sqrt(p): 4 to 2 to 1, of 7 x 64 rollouts."""
  p = [1 / 16 / 16, 1 / 8 / 8, 1 / 4 / 4]
  got = allocate("history", p, least=1, most=1024, budget=448)
  np.testing.assert_allclose(got, [256, 128, 64], atol=1)


def test_knapsack_looks_for_both_outcomes_where_they_may_come():
  got = allocate(
    "knapsack", [1e-4, 0.1, 0.3, 0.98], least=2, most=64, budget=64
  )
  assert got[1] > got[2] > 2 and got[0] == 2
  assert got[3] <= 8  # (1 - p)^2 is .0004


def test_coba_turns_to_hard_prompts_once_most_succeed():
  least, most = 4, 64
  bad = allocate(
    "coba", [0.05, 0.1, 0.1, 0.4], least=least, most=most, budget=96
  )
  good = allocate(
    "coba", [0.05, 0.9, 0.9, 0.9], least=least, most=most, budget=96
  )
  assert bad[3] > bad[0] and good[0] > good[1]


def test_what_is_not_known_gets_the_least():
  got = allocate(
    "history", [0.5, 1e-3, 0.5], known=[True, False, True],
    least=4, most=64, budget=56,
  )  # fmt: skip
  assert got[1] == 4 and got[0] + got[2] == 56


def test_prompts_that_are_not_known_are_no_part_of_the_mean_of_coba():
  rates = [0.1, 0.1, 0.9, 0.9, 0.2]
  sizes = dict(least=16, most=512)
  alone = allocate("coba", rates, budget=5 * 128, **sizes)
  padded = allocate(
    "coba", [*rates, *[0.5] * 40], known=[True] * 5 + [False] * 40,
    budget=5 * 128, **sizes,
  )  # fmt: skip
  assert padded == [*alone, *[16] * 40] and len({*alone}) > 1


def test_a_budget_below_the_least_gives_the_least_and_a_large_one_the_most():
  sizes = dict(least=4, most=16)
  assert allocate("knapsack", [0.1, 0.5], budget=3, **sizes) == [4, 4]
  assert allocate("knapsack", [0.1, 0.5], budget=99, **sizes) == [16, 16]
  assert allocate("coba", [0.1, 0.5], budget=8, least=4, most=4) == [4, 4]


def test_estimates_of_the_pass_rate():
  got = allocation.estimate(jnp.array([0.0, 3.0]), jnp.array([16.0, 3.0]))
  np.testing.assert_allclose(got, [0.5 / 17, 3.5 / 4], rtol=1e-6)
