"""Tests of brorl_jax/report/stats.py."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.report import stats
from brorl_jax.rl import advantages


def test_by_hand():
  """1, 2, 6: mean 3, squared deviations 4 + 1 + 9, variance 7 of 3 values."""
  mean, half = stats.mean_interval(np.array([1.0, 2.0, 6.0]))
  assert mean == pytest.approx(3.0)
  assert half == pytest.approx(1.959964 * (7 / 3) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_refuses_what_has_no_spread(n):
  with pytest.raises(ValueError, match=f"at least 2 values, not {n}"):
    stats.mean_interval(np.zeros(n))


def test_paired_t_by_hand():
  """Differences 1, 2, 6: mean 3, variance 7, t = 3 / sqrt(7 / 3)."""
  got = stats.paired_t(np.array([2.0, 4.0, 9.0]), np.array([1.0, 2.0, 3.0]))
  assert got.difference == 3.0
  assert got.standard_error == pytest.approx((7 / 3) ** 0.5)
  assert got.t == pytest.approx(3 / (7 / 3) ** 0.5)
  assert (got.effect_size, got.dof) == (pytest.approx(3 / 7**0.5), 2)
  # With two degrees of freedom P(|T| > t) is 1 - t / sqrt(2 + t^2).
  t = got.t
  want = 1 - t / (2 + t * t) ** 0.5
  assert got.p_two_sided == pytest.approx(want, rel=1e-5)
  assert got.p_one_sided == pytest.approx(want / 2, rel=1e-5)


@pytest.mark.parametrize("n, t, p", [
  # 4 degrees of freedom: P(T > t) = 1/2 - s (1 - s^2 / 3) 3 / 4,
  # s = t / sqrt(4 + t^2), which is .6 and .8 here.
  (5, 1.5, 0.5 - 0.6 * (1 - 0.36 / 3) * 0.75),
  (5, 8 / 3, 0.5 - 0.8 * (1 - 0.64 / 3) * 0.75),
  # Of many it is the normal one, whose tails stand in every table; the
  # next term of the expansion in 1 / dof is (t^3 + t) / 4 of the density.
  (1_000_000, 1.959963984540054, 0.025 + 1.3865e-7),
  (1_000_000, 6.0, 9.86588e-10 + 3.372e-13),
])  # fmt: skip
def test_tails_of_students_t(n, t, p):
  d = np.resize([-1.0, 1.0], n)
  d = (d - d.mean()) / d.std(ddof=1) + t / n**0.5
  up = stats.paired_t(d, np.zeros(n))
  assert up.t == pytest.approx(t, rel=1e-7)
  assert up.p_one_sided == pytest.approx(p, rel=1e-5)
  assert up.p_two_sided == pytest.approx(2 * p, rel=1e-5)
  down = stats.paired_t(np.zeros(n), d)
  assert down.p_one_sided == pytest.approx(1 - p, rel=1e-9)
  assert down.p_two_sided == up.p_two_sided


def test_clustered_by_hand():
  """Differences 1, 3 | 2, 6: mean 3, sums of errors -2 and 2, n = 4, G = 2.

  se^2 = 2 / 1 * (4 + 4) / 16 = 1, where the plain one is 14 / 3 / 4.
  """
  d = np.array([1.0, 2.0, 3.0, 6.0])
  got = stats.paired_t(d, np.zeros(4), cluster=np.array([7, -1, 7, -1]))
  assert (got.standard_error, got.t) == (pytest.approx(1.0), pytest.approx(3.0))
  assert got.dof == 1
  # With one degree of freedom, Cauchy: P(|T| > 3) = 1 - 2 / pi atan(3).
  want = 1 - 2 / np.pi * np.arctan(3.0)
  assert got.p_two_sided == pytest.approx(want, rel=1e-5)
  assert got.effect_size == pytest.approx(3 / (14 / 3) ** 0.5)


def test_equal_differences_have_no_spread():
  zeros, ones = np.zeros(4), np.ones(4)
  same = stats.paired_t(ones, ones)
  assert [float(x) for x in same[:5]] == [0.0, 0.0, 0.0, 0.5, 1.0]
  assert same.effect_size == 0.0
  more = stats.paired_t(ones, zeros)
  assert [float(x) for x in more[2:5]] == [np.inf, 0.0, 0.0]
  less = stats.paired_t(zeros, ones, cluster=np.array([0, 0, 1, 1]))
  assert [float(x) for x in less[2:5]] == [-np.inf, 1.0, 0.0]


def test_paired_t_refuses_what_has_no_spread():
  with pytest.raises(ValueError, match="at least 2 pairs, not 1"):
    stats.paired_t(np.ones(1), np.ones(1))
  with pytest.raises(ValueError, match="at least 2 clusters, not 1"):
    stats.paired_t(np.ones(3), np.ones(3), cluster=np.full(3, 9))


@pytest.mark.parametrize("kind", ["maxrl", "grpo", "leave_one_out", "centered"])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_a_coefficient_is_the_expectation_over_counts(kind, n):
  """Of K right of n, with the advantages that a run would use."""
  reward = (np.arange(n) < np.arange(n + 1)[:, None]).astype(np.float32)
  given = jnp.asarray(reward), jnp.asarray(reward >= 0), jnp.ones_like(reward)
  a = np.asarray(advantages.ADVANTAGES[kind](*given))
  of_count = (a * reward).sum(axis=1) / n
  p, k = np.array([0.0, 1e-3, 0.03, 0.5, 0.97, 1.0]), np.arange(n + 1)
  ways = np.array([math.comb(n, i) for i in k])
  want = (ways * p[:, None] ** k * (1 - p[:, None]) ** (n - k)) @ of_count
  if kind == "centered":  # up to a factor of all prompts
    want *= n / (n - 1)
  got = stats.coefficient(kind, p, n)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)
  far, limit = (stats.coefficient(kind, p, n) for n in (200_000, np.inf))
  np.testing.assert_allclose(far, limit, rtol=5e-3, atol=1e-5)


def test_the_n_that_prompts_need_by_hand():
  """MaxRL has half of its limit once (1 - p)^(N - 1) <= 1/2: N = 2 for p = 1/2,
  8 for p = 1/8 (6.2), 64 for 1/64 (45.0)."""
  drawn = np.full(10, 512)
  of = lambda kind, *right: stats.protecting_n(kind, np.array(right), drawn)
  assert of("maxrl", *[256] * 10) == 2
  assert of("maxrl", *[64] * 10) == of("maxrl", *[64] * 9, 0) == 8
  assert of("maxrl", *[256] * 5, *[8] * 5) == 64
  assert of("maxrl", *[1] * 10) == 512  # (355.2), as many as were drawn
  assert of("maxrl", *[256] * 8, 0, 0) is None  # who knows
  assert of("leave_one_out", *[8] * 10) == of("tokens", *[1] * 10) == 2
  assert of("grpo", *[8] * 10) == 32  # between leave-one-out and MaxRL
