"""Tests of brorl_jax/rl/stats.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiers

from brorl_jax.rl import stats


def test_by_hand():
  """1, 2, 6: mean 3, squared deviations 4 + 1 + 9, variance 7 of 3 values."""
  mean, half = stats.mean_interval(jnp.array([1.0, 2.0, 6.0]))
  assert float(mean) == pytest.approx(3.0)
  assert float(half) == pytest.approx(1.959964 * (7 / 3) ** 0.5, rel=1e-6)


def test_agrees_with_scipy():
  values = jax.random.uniform(jax.random.key(0), (60,))
  mean, half = stats.mean_interval(values)
  low, high = scipy.stats.norm.interval(
    0.95, loc=np.mean(values), scale=scipy.stats.sem(values)
  )
  assert float(mean - half) == pytest.approx(low, rel=1e-5)
  assert float(mean + half) == pytest.approx(high, rel=1e-5)


@pytest.mark.ci
def test_holds_the_truth_in_95_of_100_experiments():
  """Pass rates of 200 prompts: most are near 0 or near 1."""
  count = 1000
  values = jax.random.beta(jax.random.key(1), 0.3, 0.7, (count, 200))
  mean, half = jax.vmap(stats.mean_interval)(values)
  held = float(jnp.mean(jnp.abs(mean - 0.3) <= half))
  noise = 3 * (0.95 * 0.05 / count) ** 0.5
  assert held == pytest.approx(0.95, abs=noise + 0.003)


def test_equal_values_have_no_width():
  mean, half = stats.mean_interval(jnp.full(5, 0.25))
  assert (float(mean), float(half)) == (0.25, 0.0)


@pytest.mark.parametrize("n", [0, 1])
def test_refuses_what_has_no_spread(n):
  with pytest.raises(ValueError, match=f"at least 2 values, not {n}"):
    stats.mean_interval(jnp.zeros(n))


# --------------------------------------------------------------------- paired


def pairs(n, seed=0, gain=0.05):
  rng = np.random.default_rng(seed)
  b = rng.beta(0.5, 0.5, n).astype(np.float32)
  return (b + rng.normal(gain, 0.2, n)).astype(np.float32), b


def test_paired_t_by_hand():
  """Differences 1, 2, 6: mean 3, variance 7, t = 3 / sqrt(7 / 3)."""
  got = stats.paired_t(jnp.array([2.0, 4.0, 9.0]), jnp.array([1.0, 2.0, 3.0]))
  assert float(got.difference) == 3.0
  assert float(got.standard_error) == pytest.approx((7 / 3) ** 0.5)
  assert float(got.t) == pytest.approx(3 / (7 / 3) ** 0.5)
  assert float(got.effect_size) == pytest.approx(3 / 7**0.5)
  assert (got.dof, got.n, got.clusters) == (2, 3, 3)
  # With two degrees of freedom P(|T| > t) is 1 - t / sqrt(2 + t^2).
  t = float(got.t)
  want = 1 - t / (2 + t * t) ** 0.5
  assert float(got.p_two_sided) == pytest.approx(want, rel=1e-5)
  assert float(got.p_one_sided) == pytest.approx(want / 2, rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 30, 480, 10_000])
@pytest.mark.parametrize("gain", [-0.05, 0.0, 0.01, 0.05])
def test_paired_t_agrees_with_scipy(n, gain):
  a, b = pairs(n, seed=n, gain=gain)
  got = stats.paired_t(jnp.asarray(a), jnp.asarray(b))
  wide = [np.asarray(a - b, np.float64), np.zeros(n)]  # as float32 has them
  two = scipy.stats.ttest_rel(*wide)
  upper = scipy.stats.ttest_rel(*wide, alternative="greater")
  assert float(got.t) == pytest.approx(two.statistic, rel=2e-3, abs=1e-4)
  assert got.dof == two.df == n - 1
  at = float(got.t)  # p by itself, not through a t that was rounded
  p = float(scipy.stats.t.sf(abs(at), n - 1))
  assert float(got.p_two_sided) == pytest.approx(2 * p, rel=1e-4)
  one = p if at > 0 else 1 - p
  assert float(got.p_one_sided) == pytest.approx(one, rel=1e-4)
  assert float(got.p_two_sided) == pytest.approx(two.pvalue, rel=0.05)
  assert float(got.p_one_sided) == pytest.approx(upper.pvalue, rel=0.05)


@pytest.mark.parametrize("dof", [1, 7, 99, 100, 480, 10_000, 1_000_000])
@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 2.1, -3.5, 6.0])
def test_students_t_agrees_with_scipy(dof, t):
  got = float(stats._outside(jnp.asarray(t, jnp.float32), dof))
  exact = float(np.float32(t))
  want = 2 * scipy.stats.t.sf(abs(exact), dof)
  assert got == pytest.approx(want, rel=1e-4)


def test_the_papers_test_comes_out():
  """t = 4.84 over 10,000 pairs: one-sided p 6.5e-7."""
  d = np.random.default_rng(0).normal(size=10_000)
  d = (d - d.mean()) / d.std(ddof=1) + 4.84 / 100
  got = stats.paired_t(jnp.asarray(d, jnp.float32), jnp.zeros(10_000))
  assert float(got.t) == pytest.approx(4.84, rel=1e-4)
  assert float(got.p_one_sided) == pytest.approx(6.6e-7, rel=0.01)
  assert float(got.effect_size) == pytest.approx(0.0484, rel=1e-4)


def test_clustered_by_hand():
  """Differences 1, 3 | 2, 6: mean 3, sums of errors -2 and 2, n = 4, G = 2.

  se^2 = 2 / 1 * (4 + 4) / 16 = 1, where the plain one is 14 / 3 / 4.
  """
  d = jnp.array([1.0, 2.0, 3.0, 6.0])
  got = stats.paired_t(d, jnp.zeros(4), cluster=jnp.array([7, -1, 7, -1]))
  assert float(got.standard_error) == pytest.approx(1.0)
  assert float(got.t) == pytest.approx(3.0)
  assert (got.dof, got.n, got.clusters) == (1, 4, 2)
  # With one degree of freedom, Cauchy: P(|T| > 3) = 1 - 2 / pi atan(3).
  want = 1 - 2 / np.pi * np.arctan(3.0)
  assert float(got.p_two_sided) == pytest.approx(want, rel=1e-5)
  assert float(got.effect_size) == pytest.approx(3 / (14 / 3) ** 0.5)


def cr1(d, cluster):
  """The sandwich of a regression on a column of ones, written with matrices."""
  n, x = len(d), np.ones((len(d), 1))
  bread = np.linalg.inv(x.T @ x)
  error = d - x @ (bread @ (x.T @ d))
  names = np.unique(cluster)
  meat = sum(
    np.outer(s, s)
    for s in (x[cluster == g].T @ error[cluster == g] for g in names)
  )
  G = len(names)
  correction = G / (G - 1) * (n - 1) / (n - x.shape[1])
  return float(np.sqrt(correction * (bread @ meat @ bread)[0, 0]))


@pytest.mark.parametrize("clusters", tiers.some([2, 8, 40], 1))
def test_clustered_agrees_with_the_sandwich(clusters):
  a, b = pairs(480, seed=clusters)
  cluster = np.random.default_rng(1).integers(0, clusters, 480)
  a = a + np.float32(0.1) * np.sin(cluster).astype(np.float32)
  got = stats.paired_t(
    jnp.asarray(a), jnp.asarray(b), cluster=jnp.asarray(cluster)
  )
  d = (a - b).astype(np.float64)
  want = cr1(d, cluster)
  assert float(got.standard_error) == pytest.approx(want, rel=1e-4)
  assert got.clusters == got.dof + 1 == clusters
  p = 2 * scipy.stats.t.sf(abs(d.mean() / want), clusters - 1)
  assert float(got.p_two_sided) == pytest.approx(p, rel=1e-3)


def test_every_pair_its_own_cluster_is_the_plain_test():
  a, b = map(jnp.asarray, pairs(60))
  plain = stats.paired_t(a, b)
  names = jax.random.permutation(jax.random.key(0), 60)
  alone = stats.paired_t(a, b, cluster=names)
  for x, y in zip(plain, alone, strict=True):
    assert float(x) == pytest.approx(float(y), rel=1e-4)


@pytest.mark.ci
def test_copies_of_a_cluster_are_no_evidence():
  """Each prompt ten times: the plain error shrinks, the clustered does not."""
  a, b = map(jnp.asarray, pairs(40))
  once = stats.paired_t(a, b)
  many = [jnp.repeat(x, 10) for x in (a, b)]
  robust = stats.paired_t(*many, cluster=jnp.repeat(jnp.arange(40), 10))
  assert float(robust.t) == pytest.approx(float(once.t), rel=1e-3)
  assert robust.dof == once.dof
  assert float(stats.paired_t(*many).t) > 3 * float(once.t)


def test_swapping_sides_turns_the_sign():
  a, b = map(jnp.asarray, pairs(50))
  one, other = stats.paired_t(a, b), stats.paired_t(b, a)
  assert float(one.t) == -float(other.t)
  assert float(one.p_two_sided) == float(other.p_two_sided)
  total = float(one.p_one_sided + other.p_one_sided)
  assert total == pytest.approx(1.0, abs=1e-6)
  assert float(one.p_one_sided) < 0.5


def test_equal_differences_have_no_spread():
  zeros, ones = jnp.zeros(4), jnp.ones(4)
  same = stats.paired_t(ones, ones)
  assert [float(x) for x in same[:5]] == [0.0, 0.0, 0.0, 0.5, 1.0]
  assert float(same.effect_size) == 0.0
  more = stats.paired_t(ones, zeros)
  assert [float(x) for x in more[2:5]] == [np.inf, 0.0, 0.0]
  less = stats.paired_t(zeros, ones, cluster=jnp.array([0, 0, 1, 1]))
  assert [float(x) for x in less[2:5]] == [-np.inf, 1.0, 0.0]


def test_paired_t_refuses_what_has_no_spread():
  with pytest.raises(ValueError, match="at least 2 pairs, not 1"):
    stats.paired_t(jnp.ones(1), jnp.ones(1))
  with pytest.raises(ValueError, match="at least 2 clusters, not 1"):
    stats.paired_t(jnp.ones(3), jnp.ones(3), cluster=jnp.full(3, 9))


# ------------------------------------------------------------------ bootstrap


def test_every_group_is_drawn_from_itself():
  """Members of a group share a value, so that its mean cannot move."""
  groups = jnp.array([2, 0, 1, 0, 2, 2])
  values = jnp.array([0.5, 3.0, 8.0, 3.0, 0.5, 0.5])
  means = stats.bootstrap_means(
    jax.random.key(0), values, groups, count=3, draws=50
  )
  np.testing.assert_array_equal(
    means, jnp.tile(jnp.array([3.0, 8.0, 0.5]), (50, 1))
  )


def test_a_mean_of_two_takes_its_three_values_as_often_as_chance_has_it():
  values, groups = jnp.array([0.0, 1.0]), jnp.zeros(2, int)
  means = stats.bootstrap_means(
    jax.random.key(1), values, groups, count=1, draws=20_000
  )
  assert set(np.unique(means)) == {0.0, 0.5, 1.0}
  for value, chance in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
    share = float(jnp.mean(means == value))
    noise = 5 * (chance * (1 - chance) / 20_000) ** 0.5
    assert share == pytest.approx(chance, abs=noise)


def test_bootstrap_agrees_with_scipy_and_with_the_normal_interval():
  values = jax.random.uniform(jax.random.key(0), (300,))
  zero = jnp.zeros(300, int)
  draws = stats.bootstrap_means(jax.random.key(2), values, zero, count=1)
  assert draws.shape == (2000, 1)
  low, high = map(float, stats.percentile_interval(draws[:, 0]))
  mean, half = stats.mean_interval(values)
  assert high - low == pytest.approx(2 * float(half), rel=0.1)
  want = scipy.stats.bootstrap(
    [np.asarray(values)],
    np.mean,
    n_resamples=2000,
    method="percentile",
    rng=np.random.default_rng(0),
  ).confidence_interval
  assert (low, high) == pytest.approx(tuple(want), abs=0.1 * float(half))
  assert low < float(mean) < high


def test_groups_do_not_lend_each_other_their_spread():
  """Two groups far apart: drawn apart the mean of means is narrow."""
  values = jnp.concatenate([jnp.linspace(0, 0.1, 50), jnp.linspace(9, 9.1, 50)])
  groups = jnp.repeat(jnp.arange(2), 50)
  key = jax.random.key(3)
  apart = stats.bootstrap_means(key, values, groups, count=2).mean(axis=1)
  low, high = stats.percentile_interval(apart)
  assert 0.0 < float(high - low) < 0.02
  key = jax.random.key(3)
  mixed = stats.bootstrap_means(key, values, groups * 0, count=1)[:, 0]
  low, high = stats.percentile_interval(mixed)
  assert float(high - low) > 1.0


def test_percentiles_by_hand():
  low, high = stats.percentile_interval(jnp.arange(201.0)[::-1])
  assert (float(low), float(high)) == pytest.approx((5.0, 195.0))


@pytest.mark.slow
def test_more_values_than_are_drawn_at_once(monkeypatch):
  values = jax.random.uniform(jax.random.key(0), (40,))
  groups = jnp.arange(40) % 3
  want = stats.bootstrap_means(
    jax.random.key(4), values, groups, count=3, draws=7
  )
  monkeypatch.setattr(stats, "_AT_ONCE", 80)  # 2 draws, and one is left
  jax.clear_caches()
  got = stats.bootstrap_means(
    jax.random.key(4), values, groups, count=3, draws=7
  )
  jax.clear_caches()
  np.testing.assert_allclose(got, want, rtol=1e-6)
