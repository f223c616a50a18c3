import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax.verdicts import mixture

STEPS = st.integers(0, 2**40)
POSITIONS = st.integers(0, 2**20 - 1)


def draws(weights, count=20_000, seed=0, step=0):
  return [mixture.pick(seed, step, i, weights) for i in range(count)]


@pytest.mark.parametrize("weights", [[1, 2, 3, 4], [0.1] * 7, [5, 0, 1, 1e-2]])
def test_shares_follow_the_weights(weights):
  count = 20_000
  chosen = [mixture.pick(0, step, 3, weights) for step in range(count)]
  total = sum(weights)
  chi2 = sum(
    (chosen.count(i) - count * w / total) ** 2 / (count * w / total)
    for i, w in enumerate(weights)
    if w > 0
  )
  # Above the 0.9999 quantile for up to 6 degrees of freedom.
  assert chi2 < 27.9
  assert all(weights[i] > 0 for i in set(chosen))


@pytest.mark.parametrize("weights", [[1] * 12, [1, 2, 3, 4], [1, 0, 0.2]])
def test_every_step_has_its_share_of_each_family_from_the_first_positions(
  weights,
):
  for step in range(50):
    chosen = draws(weights, 200, seed=step % 3, step=step)
    for count in (8, 12, 50, 200):
      for i, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        # Independent draws differ by 7 of 50 in a hundredth of all steps.
        assert abs(chosen[:count].count(i) - expected) < 2.5


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}])
def test_neighbouring_steps_and_seeds_are_independent(other):
  by = {"seed": 0, "step": 0} | other
  counts = [[0] * 3 for _ in range(3)]
  for at in range(9_000):
    x = mixture.pick(0, 2 * at, 5, [1, 1, 1])
    y = mixture.pick(by["seed"], 2 * at + by["step"], 5, [1, 1, 1])
    counts[x][y] += 1
  chi2 = sum((c - 1_000) ** 2 / 1_000 for row in counts for c in row)
  assert chi2 < 31.8  # 0.9999 quantile, 8 degrees of freedom


def test_picks_never_change():
  # Recorded once. A change here changes the data of every resumed run.
  assert draws([1, 2, 3, 4], 12, seed=3, step=5) == [
    2, 3, 2, 1, 3, 2, 0, 3, 1, 3, 2, 1,
  ]  # fmt: skip


@given(STEPS, POSITIONS, st.integers(0, 2**70), st.integers(-30, 30))
def test_only_relative_weights_matter(step, position, seed, exponent):
  weights = [3, 0, 1, 2.5]
  scaled = [w * 2.0**exponent for w in weights]
  assert mixture.pick(seed, step, position, weights) == mixture.pick(
    seed, step, position, scaled
  )


@given(STEPS, POSITIONS)
def test_a_single_positive_weight_always_wins(step, position):
  assert mixture.pick(0, step, position, [0.0, 0.0, 5e-324, 0.0]) == 2


def test_index_by_hand():
  assert mixture.index(0, 0) == 0
  assert mixture.index(0, 1_048_575) == 1_048_575
  assert mixture.index(1, 0) == 1_048_576
  assert mixture.index(3, 7) == 3_145_735


@given(STEPS, POSITIONS, STEPS, POSITIONS)
def test_indexes_collide_only_with_themselves(s1, p1, s2, p2):
  same = mixture.index(s1, p1) == mixture.index(s2, p2)
  assert same == ((s1, p1) == (s2, p2))


@pytest.mark.parametrize(
  "weights, named",
  [
    ([1, -0.5], r"weights\[1\] = -0.5"),
    ([math.nan], r"weights\[0\] = nan"),
    ([2, 1, math.inf], r"weights\[2\] = inf"),
    (["1"], r"weights\[0\] = '1'"),
    ([0, 0.0], r"\[0, 0.0\] add up to 0"),
    ([], r"\[\] add up to 0"),
    ([1e308, 1e308], "add up to inf"),
  ],
)
def test_bad_weights_are_refused(weights, named):
  with pytest.raises(ValueError, match=named):
    mixture.check(weights)
  with pytest.raises(ValueError, match=named):
    mixture.pick(0, 0, 0, weights)


@pytest.mark.parametrize(
  "step, position, named",
  [
    (0, 2**20, "position = 1048576"),
    (0, -1, "position = -1"),
    (-1, 0, "step = -1"),
  ],
)
def test_out_of_range_is_refused(step, position, named):
  with pytest.raises(ValueError, match=named):
    mixture.index(step, position)
  with pytest.raises(ValueError, match=named):
    mixture.pick(0, step, position, [1])


def test_a_negative_seed_is_refused():
  with pytest.raises(ValueError, match="seed = -2"):
    mixture.pick(-2, 0, 0, [1])
