"""Tests of brorl_jax/rl/advantages.py."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from messages import refuses

from brorl_jax.rl import advantages

ALL = jnp.array([True, True])


def test_center_by_hand_on_rewards_that_are_not_binary():
  got = advantages.center_by_group(jnp.array([[3.0, 0.0, 0.0, 1.0], [1.0] * 4]))
  np.testing.assert_allclose(got, [[2.0, -1.0, -1.0, 0.0], [0.0] * 4])


def test_informative_prompts_have_both_outcomes():
  reward = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]])
  np.testing.assert_array_equal(
    advantages.informative(reward), [True, False, False, False]
  )


def by_trajectory(centered, where, valid=None):
  """Whitened with every rollout that counts of length 1."""
  ones = jnp.ones_like(centered)
  length = ones if valid is None else jnp.where(valid, ones, 0.0)
  return advantages.whiten_by_batch(centered, length, where)


def test_seven_times_a_tenth_gives_exactly_0():
  reward = jnp.full((2, 7), 0.1).at[1, 0].set(0.2)
  where = advantages.informative(reward)
  centered = advantages.center_by_group(reward)
  np.testing.assert_array_equal(centered[0], 0.0)
  for got in (advantages.whiten_by_batch(centered, jnp.ones((2, 7)), where),
    by_trajectory(centered, where)):  # fmt: skip
    np.testing.assert_array_equal(got[0], 0.0)
    assert (got[1] != 0.0).all()


def test_whitens_by_hand():
  """Lengths 1 and 3 count the right answers thrice less than the wrong ones.

  Of A' = 1/2 and -1/2: mean (1 - 3) / 2 / 4 = -1/4, deviations 3/4 and -1/4,
  variance (9 + 3) / 16 / 4 = 3/16.
  """
  centered = jnp.array([[0.5, -0.5], [-0.5, 0.5]])
  length = jnp.array([[1.0, 3.0], [3.0, 1.0]])
  right, wrong = 0.75 / (3 / 16) ** 0.5, -0.25 / (3 / 16) ** 0.5
  np.testing.assert_allclose(advantages.whiten_by_batch(centered, length, ALL),
    [[right, wrong], [wrong, right]], rtol=1e-6)  # fmt: skip
  np.testing.assert_allclose(
    by_trajectory(centered, ALL), [[1.0, -1.0], [-1.0, 1.0]], rtol=1e-6
  )


def example(p=6, n=16):
  kr, kl = jax.random.split(jax.random.key(0))
  reward = jax.random.bernoulli(kr, 0.3, (p, n)).astype(jnp.float32)
  return reward, jax.random.randint(kl, (p, n), 1, 40).astype(jnp.float32)


@pytest.mark.parametrize("bad", [1e6, jnp.nan])
def test_groups_that_are_not_kept_are_0_and_have_no_influence(bad):
  reward, length = example()
  centered = advantages.center_by_group(reward)
  where = jnp.arange(6) < 4
  spoilt = jnp.where(where[:, None], centered, bad)
  lengths = jnp.where(where[:, None], length, bad)
  for got, want in ((advantages.whiten_by_batch(spoilt, lengths, where),
      advantages.whiten_by_batch(centered[:4], length[:4], where[:4])),
    (by_trajectory(spoilt, where),
      by_trajectory(centered[:4], where[:4]))):  # fmt: skip
    np.testing.assert_array_equal(got[4:], 0.0)
    np.testing.assert_allclose(got[:4], want, rtol=1e-6)


def test_the_scale_of_rewards_does_not_matter(scale=10.0, shift=-1.0):
  reward, length = example()

  def of(r):
    where = advantages.informative(r)
    centered = advantages.center_by_group(r)
    return (advantages.whiten_by_batch(centered, length, where),
      by_trajectory(centered, where))  # fmt: skip

  for got, want in zip(of(scale * reward + shift), of(reward), strict=True):
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("deviation, want", [
  (1e-3, 1.0), (2e-4, 1.0), (1e-4, 1.0), (5e-5, 0.5), (1e-6, 0.01)
])  # fmt: skip
def test_a_variance_below_1e_8_counts_as_1e_8(deviation, want):
  """That of the released recipes."""
  centered = deviation * jnp.array([[1.0, -1.0], [-1.0, 1.0]])
  where = jnp.ones(2, bool)
  for got in (
    by_trajectory(centered, where),
    advantages.whiten_by_batch(centered, jnp.full((2, 2), 3.0), where),
  ):
    np.testing.assert_allclose(jnp.abs(got), want, rtol=1e-4)


def one_code_path(reward, length, valid):
  """Everything that is computed from rewards."""
  where = advantages.informative(reward, valid)
  centered = advantages.center_by_group(reward, valid)
  if valid is not None:
    length = jnp.where(valid, length, 0.0)
  return (where, centered, advantages.normalize_by_group(centered, valid),
    advantages.whiten_by_batch(centered, length, where),
    by_trajectory(centered, where, valid))  # fmt: skip


@pytest.mark.parametrize("bad", [1e6, jnp.nan])
def test_rollouts_that_do_not_count_are_0_and_have_no_influence(bad):
  reward, length = example()
  valid = jnp.broadcast_to(jnp.arange(16) < 11, reward.shape)
  spoilt = jnp.where(valid, reward, bad)
  want = one_code_path(reward[:, :11], length[:, :11], None)
  got = one_code_path(spoilt, jnp.where(valid, length, bad), valid)
  np.testing.assert_array_equal(got[0], want[0])
  for a, b in zip(got[1:], want[1:], strict=True):
    np.testing.assert_array_equal(a[:, 11:], 0.0)
    np.testing.assert_allclose(a[:, :11], b, rtol=1e-5, atol=1e-6)


def test_by_hand_with_rollouts_that_do_not_count():
  """The mean of 3, 0, 0 is 1; of one rollout, and of none, there is no group.

  In the last row the rollouts that count are equal, the others are not.
  """
  reward = jnp.array([[3.0, 0.0, 0.0, 9.0]] * 3 + [[1.0, 1.0, 0.0, 2.0]])
  valid = jnp.arange(4)[None] < jnp.array([3, 1, 0, 2])[:, None]
  np.testing.assert_array_equal(
    advantages.informative(reward, valid), [True, False, False, False]
  )
  want = np.zeros((4, 4))
  want[0] = [2.0, -1.0, -1.0, 0.0]
  np.testing.assert_allclose(advantages.center_by_group(reward, valid), want)


def test_a_rollout_of_length_0_gets_exactly_0_under_any_shift():
  """Lengths 1, 3, 0: the batch mean is (1/2 - 3/2) / 4 = -1/4, not 0."""
  centered = jnp.array([[0.5, -0.5, 0.5]])
  got = advantages.whiten_by_batch(
    centered, jnp.array([[1.0, 3.0, 0.0]]), jnp.array([True])
  )
  np.testing.assert_allclose(
    got, [[3.0**0.5, -(3.0**-0.5), 0.0]], rtol=1e-6
  )  # 3/4 and -1/4 over sqrt(3/16)
  assert got[0, 2] == 0.0


def test_normalizes_each_group_by_hand():
  """A' = 3/4 and thrice -1/4: variance (9 + 3) / 16 / 4 = 3/16.

  Twice that has twice the deviation and the same advantage, and 2 and -2 of
  1 right among 2 become 1 and -1.
  """
  one = np.array([0.75, -0.25, -0.25, -0.25])
  centered = jnp.array([one, 2.0 * one, [2.0, -2.0, 2.0, -2.0], [0.0] * 4])
  got = advantages.normalize_by_group(centered)
  root = 3.0**0.5
  want = [[root, -1 / root, -1 / root, -1 / root]] * 2
  want += [[1.0, -1.0, 1.0, -1.0], [0.0] * 4]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_normalizing_rounding_gives_exactly_0():
  """What a mean that is rounded would leave of a group of equal rewards."""
  left = jnp.full((1, 7), 0.1) - jnp.float32(0.1 + 1e-7)
  assert (left != 0.0).all()
  np.testing.assert_array_equal(advantages.normalize_by_group(left), 0.0)


def test_a_single_right_answer_weighs_the_root_of_the_others(n=512):
  """Its A' is (n - 1) / n, of deviation sqrt(n - 1) / n."""
  centered = advantages.center_by_group(jnp.zeros((1, n)).at[0, 3].set(1.0))
  got = advantages.normalize_by_group(centered)
  assert float(got[0, 3]) == pytest.approx((n - 1) ** 0.5, rel=1e-4)
  other = advantages.normalize_by_group(1e-3 * centered)
  assert float(other[0, 3]) == pytest.approx((n - 1) ** 0.5, rel=0.05)


def test_leave_one_out_by_hand():
  """Each reward less the mean of the others, of those that count."""
  reward = jnp.array([[3.0, 0.0, 0.0, 1.0], [1.0, 0.0, 9.0, 9.0], [1.0] * 4])
  valid = jnp.array([[True] * 4, [True, True, False, False], [True] * 4])
  got = advantages.leave_one_out(reward, valid)
  want = [
    [3 - 1 / 3, -4 / 3, -4 / 3, 1 - 1.0], [1.0, -1.0, 0.0, 0.0], [0.0] * 4
  ]  # fmt: skip
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
  one = jnp.zeros((3, 4), bool).at[:, 0].set(True)
  np.testing.assert_array_equal(advantages.leave_one_out(reward, one), 0.0)


def test_maxrl_by_hand():
  """(r - mean) / mean: of one right in four (1 - 1/4) / (1/4) = 3 and -1.

  Of three right in four 1/3 and -1. Rewards that are not binary too: 3, 0, 0, 1
  have mean 1. A mean of 0, or below, is no scale.
  """
  reward = jnp.array([
    [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0],
    [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0],
    [-1.0, -3.0, -1.0, -3.0],
  ])  # fmt: skip
  third = 1.0 / 3.0
  want = [[3, -1, -1, -1], [third, third, -1, third], [2, -1, -1, 0]]
  want += [[0.0] * 4] * 4
  np.testing.assert_allclose(advantages.maxrl(reward), want, rtol=1e-6)
  # Of the first two that count: 1 and 0, mean 1/2.
  valid = jnp.ones((7, 4), bool).at[:, 2:].set(False)
  got = advantages.maxrl(reward.at[0, 3].set(jnp.nan), valid)[0]
  np.testing.assert_allclose(got, [1.0, -1.0, 0.0, 0.0])


def expected_weight(function, n, p):
  """d/dp of what is maximized, summed over all outcomes of N draws.

  E[mean_n A[n] * d log pi(n) / dp], right with chance p.
  """
  right = jnp.arange(n + 1)[:, None] > jnp.arange(n)[None]
  adv = np.asarray(function(right.astype(jnp.float32)), np.float64)
  c = np.arange(n + 1)
  chance = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in c]
  score = np.where(right, 1 / p, -1 / (1 - p))
  return chance @ (adv * score).mean(axis=1)


@pytest.mark.parametrize("n, p", tiers.some([(6, 0.3), (16, 0.9)], 1, 1))
def test_what_each_weight_maximizes_in_expectation(n, p):
  """Enumerated. MaxRL: the first N - 1 terms of the series of log p.

  grad log p = sum_{k=1..} (1 - p)^(k-1) grad p, p of the right answers.
  """
  near = functools.partial(pytest.approx, rel=1e-5)
  weight = functools.partial(expected_weight, n=n, p=p)
  assert weight(advantages.leave_one_out) == near(1.0)
  assert weight(advantages.center_by_group) == near((n - 1) / n)
  series = sum((1 - p) ** (k - 1) for k in range(1, n))
  assert weight(advantages.maxrl) == near(series)
  for k in (2, n - 1):
    of_k = functools.partial(advantages.pass_at_k, k=k)
    assert weight(of_k) == near(k * (1 - p) ** (k - 1), rel=1e-4)


def test_grpo_in_expectation_at_large_n(p=0.1):
  """1 / sqrt(p (1 - p)), the derivative of 2 asin(sqrt(p))."""
  whole = (p * (1 - p)) ** -0.5

  def grpo(reward):
    return advantages.normalize_by_group(advantages.center_by_group(reward))

  assert expected_weight(grpo, 400, p) == pytest.approx(whole, rel=0.01)


def test_pass_at_k_by_hand():
  """One right in four, k = 2: 2 * 4 / 2 * C(2, 1) / C(3, 1) = 8/3.

  Two right: 4 * C(1, 1) / C(3, 1) = 4/3. Three right: 2 of them always have a
  right one.
  """
  reward = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]], jnp.float32)
  got = advantages.pass_at_k(reward, k=2)
  want = [[2, -2 / 3, -2 / 3, -2 / 3], [2 / 3, 2 / 3, -2 / 3, -2 / 3], [0] * 4]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  one = advantages.leave_one_out(reward)
  np.testing.assert_allclose(advantages.pass_at_k(reward, k=1), one, rtol=1e-6)


def test_pass_at_k_is_the_mean_over_all_sets_of_k():
  """Of the surrogate: each set of k pays 1 to its members if one is right.

  What a rollout gets is less by the mean of its group, and longer by
  N / (N - k), which makes up for its own part of that mean.
  """
  n, k = 7, 3
  reward = np.array([0, 1, 0, 0, 1, 0, 0])
  paid = np.zeros(n)
  sets = list(itertools.combinations(range(n), k))
  for chosen in sets:
    paid[list(chosen)] += reward[list(chosen)].max()
  paid *= n / len(sets)  # a mean over rollouts follows
  want = n / (n - k) * (paid - paid.mean())
  got = advantages.pass_at_k(jnp.float32(reward)[None], k=k)[0]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_pass_at_k_of_512_is_finite_and_right_where_binomials_are_not():
  n, k, right = 512, 128, 3
  reward = (jnp.arange(n) < right)[None].astype(jnp.float32)
  weight = k * n / (n - k)
  weight *= math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)
  got = advantages.pass_at_k(reward, k=k)
  want = np.where(reward > 0, 1 - right / n, -right / n) * weight
  np.testing.assert_allclose(got, want, rtol=1e-4)


def test_pass_at_k_of_groups_in_which_few_count():
  """Of three that count 2 may be drawn, of two 2 is all: nothing to compare."""
  reward = jnp.array([[1.0, 0.0, 0.0, jnp.nan], [1.0, 0.0, jnp.nan, jnp.nan]])
  got = advantages.pass_at_k(reward, ~jnp.isnan(reward), k=2)
  want = advantages.pass_at_k(reward[:1, :3], k=2)
  np.testing.assert_allclose(got[:1, :3], want, rtol=1e-6)
  np.testing.assert_array_equal(got[0, 3], 0.0)
  np.testing.assert_array_equal(got[1], 0.0)
  assert float(want[0, 0]) == pytest.approx(2.0)  # 6 * 1/2 * 2/3


@pytest.mark.parametrize("kind", advantages.ADVANTAGES)
def test_every_kind_is_its_function(kind):
  reward, length = example()
  valid = jax.random.bernoulli(jax.random.key(3), 0.8, reward.shape)
  centered = advantages.center_by_group(reward, valid)
  where = advantages.informative(reward, valid)
  want = {
    "tokens": lambda: advantages.whiten_by_batch(
      centered, jnp.where(valid, length, 0.0), where
    ),
    "trajectories": lambda: by_trajectory(centered, where, valid),
    "grpo": lambda: advantages.normalize_by_group(centered, valid),
    "centered": lambda: centered,
    "leave_one_out": lambda: advantages.leave_one_out(reward, valid),
    "maxrl": lambda: advantages.maxrl(reward, valid),
    "pass_at_k": lambda: advantages.pass_at_k(reward, valid, k=2),
  }[kind]()
  chosen = {"k": 2} if kind == "pass_at_k" else {}
  function = functools.partial(advantages.ADVANTAGES[kind], **chosen)
  spoilt = jnp.where(valid, reward, jnp.nan)
  np.testing.assert_array_equal(function(spoilt, valid, length), want)
  assert float(jnp.abs(want).max()) > 0.1
  np.testing.assert_array_equal(want[~valid], 0.0)
  assert advantages.from_user(function) is function


@pytest.mark.parametrize("function, message", [
  (lambda reward, valid: reward, "TypeError"),
  (lambda reward, valid, length: reward[0], "float32[6]"),
  (lambda reward, valid, length: valid, "bool[4,6]"),
])  # fmt: skip
def test_an_own_function_of_another_shape_is_refused(function, message):
  with refuses(ValueError, message):
    advantages.from_user(function)


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
  return advantages.each_prompt_once(function, *args, whitened=whitened)


def test_every_prompt_counts_once_by_hand():
  """Of 2, 4 and 6 rollouts on average 4: factors 2, 1 and 2/3."""
  args = group([1, 0], [1, 0, 0, 0], [0, 0, 0, 0, 1, 1])
  got = np.asarray(pooled(*args))
  want = np.asarray(loo(*args)) * np.array([[2.0], [1.0], [2 / 3]])
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # So that each has the same share of the sum: 4 (K / n) (1 - K / n) n / (n-1).
  right = (got * (np.asarray(args[0]) > 0)).sum(axis=1)
  want = [4 / 2, 4 / 4, 4 * 2 / 6 * 4 / 5]
  np.testing.assert_allclose(right, want, rtol=1e-6)


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


@pytest.mark.parametrize("enough, p, n, weight", [
  (1, 0.001, 838, 3.02), (1, 0.01, 216, 2.09), (4, 0.01, 828, 1.175)
])  # fmt: skip
def test_the_bias_that_the_documents_name(enough, p, n, weight):
  got = expected((16, 64, 256, 1024), enough, p)
  assert got[0] == pytest.approx(n, abs=0.6)
  assert got[1] == pytest.approx(weight, abs=0.006)


def test_the_gradient_by_enumeration(p=0.1):
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


# Which prompts a step trains on.

# One group of each kind.
KINDS = jnp.array(
  [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, 0.5], [0.2, 0.4], [0.4, 1.0]]
)


def test_the_three_rules_differ_only_on_rewards_in_between():
  same = [False, False, True]
  for rule, rest in ((advantages.informative, [False, True, True]),
    (advantages.partly_solved, [False, False, True])):  # fmt: skip
    np.testing.assert_array_equal(rule(KINDS), same + rest)


def test_only_a_full_reward_solves():
  got = advantages.partly_solved(jnp.array([[0.9, 0.0], [1.0, 0.0]]))
  assert got.tolist() == [False, True]


@pytest.mark.parametrize("bad", [1.0, jnp.nan])
def test_rollouts_that_do_not_count_have_no_influence(bad):
  reward = jnp.concatenate([KINDS, jnp.full((6, 1), bad)], 1)
  valid = jnp.ones((6, 3), bool).at[:, 2].set(False)
  none = jnp.zeros((6, 3), bool)
  one = none.at[:, 0].set(True)
  partly = lambda r, v: advantages.partly_solved(r / 0.4, v)
  np.testing.assert_array_equal(partly(reward, valid), partly(KINDS, None))
  assert not partly(reward, none).any()
  assert not partly(reward, one).any()  # one rollout cannot be two kinds


@pytest.mark.parametrize("kind", advantages.KEEP)
def test_every_rule_by_hand(kind):
  """The last rollout does not count; a group in which none does has no rule."""
  reward = jnp.concatenate([KINDS, jnp.full((6, 1), 7.0)], 1)
  valid = jnp.ones((6, 3), bool).at[:, 2].set(False)
  want = {
    "differ": [False, False, True, False, True, True],
    "solved": [False, False, True, False, False, True],
    "all": [True] * 6,
  }[kind]
  rule = advantages.KEEP[kind]
  np.testing.assert_array_equal(rule(reward, valid), want)
  assert advantages.rule_from_user(rule) is rule


@pytest.mark.parametrize("function, message", [
  (lambda reward: reward[:, 0] > 0, "TypeError"),
  (lambda reward, valid: reward > 0.5, "bool[4,6]"),
  (lambda reward, valid: reward[:, 0], "float32[4]"),
])  # fmt: skip
def test_an_own_rule_of_another_shape_is_refused(function, message):
  with refuses(ValueError, message):
    advantages.rule_from_user(function)
