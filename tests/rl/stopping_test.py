"""Tests of brorl_jax/rl/stopping.py."""

import itertools

import numpy as np
import pytest

from brorl_jax.rl import stopping
from brorl_jax.rl.stopping import Rounds

WIDE = (16, 64, 256, 1024)


@pytest.mark.parametrize(
  "right, drawn, want",
  [
    (4, 16, 0),
    (3, 16, 48),
    (13, 16, 48),
    (12, 16, 0),
    (3, 64, 192),
    (4, 64, 0),
    (0, 256, 0),  # the last round
  ],
)
def test_a_prompt_goes_on_until_both_suffice(right, drawn, want):
  rounds = Rounds((16, 64, 256), 4, 4)
  assert stopping.further(rounds, right=right, drawn=drawn) == want


def test_none_may_be_wrong_if_none_has_to_be():
  assert stopping.further(Rounds((4, 8), 1, 0), right=4, drawn=4) == 0
  assert stopping.further(Rounds((4, 8), 1, 1), right=4, drawn=4) == 4


def test_what_is_no_end_of_a_round_is_refused():
  with pytest.raises(ValueError, match="drawn = 20 is not one of"):
    stopping.further(Rounds((16, 64), 1, 1), right=0, drawn=20)


def runs(rounds, draws):
  """(n, K, the rewards) of one prompt that gets these rewards in turn."""
  for n in rounds.after:
    k = sum(draws[:n])
    if n == rounds.after[-1] or (k >= rounds.right and n - k >= rounds.wrong):
      return n, k, draws[:n]
  raise AssertionError


@pytest.mark.parametrize("right, wrong", [(1, 1), (2, 1), (1, 0)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_all_sequences_one_by_one(right, wrong, p):
  """2^9 sequences of rewards, rounds of 3, 5 and 9."""
  rounds = Rounds((3, 5, 9), right, wrong)
  sums = np.zeros(4)
  of_first: dict = {}
  for draws in itertools.product((0, 1), repeat=9):
    chance = p ** sum(draws) * (1 - p) ** (9 - sum(draws))
    n, k, seen = runs(rounds, draws)
    w = stopping.exact_weights(rounds)[n, k]
    sums += chance * np.array([n, 0 < k < n, k * (n - k) / (n * (n - 1)), w])
    first = sum(seen[:3])
    of_first.setdefault((n, k), {})[seen] = first * (3 - first) / 6
  sums[2:] /= p * (1 - p)
  got = stopping.expected(rounds, p)
  names = ["n", "informative", "hidden_weight", "exact_weight"]
  np.testing.assert_allclose([got[name] for name in names], sums, rtol=1e-12)
  assert sums[3] == pytest.approx(1.0)
  # Each weight is the mean over the sequences that end there.
  weights = stopping.exact_weights(rounds)
  assert weights.keys() == of_first.keys()
  for end, seen in of_first.items():
    assert weights[end] == pytest.approx(np.mean([*seen.values()]))


@pytest.mark.parametrize(
  "k, p, n, hidden",
  [
    (1, 0.001, 838, 3.02),
    (1, 0.01, 216, 2.09),
    (2, 0.01, 440, 1.48),
    (4, 0.01, 828, 1.175),
    (4, 0.1, 81, 1.11),
    (4, 0.5, 17, 1.01),
  ],
)
def test_the_weights_that_the_documents_name(k, p, n, hidden):
  got = stopping.expected(Rounds(WIDE, k, k), p)
  assert got["n"] == pytest.approx(n, abs=0.6)
  assert got["hidden_weight"] == pytest.approx(hidden, abs=0.006)
  assert got["exact_weight"] == pytest.approx(1.0, rel=1e-9)


def test_a_single_round_has_its_own_estimate():
  weights = stopping.exact_weights(Rounds((6,), 1, 1))
  assert weights == {(6, k): pytest.approx(k * (6 - k) / 30) for k in range(7)}


def test_the_correction_by_hand():
  """Rounds of 2 and 4, one right and one wrong suffice.

  (2, 1) is the first round's own estimate. (4, 1) stops there if its right one
  is the third or the fourth: the first round estimates 0, K (n - K) / n (n - 1)
  is 1/4. (4, 0) has no gradient, (4, 2) began with 11 or 00.
  """
  rounds = Rounds((2, 4), 1, 1)
  correct = lambda right, drawn: stopping.correction(
    rounds, right=right, drawn=drawn
  )
  assert correct(1, 2) == pytest.approx(1.0)
  assert correct(1, 4) == 0.0
  assert correct(0, 4) == correct(4, 4) == 1.0
  assert correct(1, 3) == 1.0  # no end of a round
