import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax.verdicts import base
from brorl_jax.verdicts.base import Example, Verdict, pick_family, posed


@pytest.mark.parametrize(
  "status, reward", [("pass", 1.0), ("fail", 0.0), ("invalid", 0.0)]
)
def test_reward_is_the_status_and_ignores_partial_credit(status, reward):
  assert Verdict(status, 0.75, "", "4").reward == reward


def test_a_reason_has_a_bound():
  long = Verdict("fail", 0.0, "a: " + "b" * base.MAX_REASON)
  assert len(long.reason) == base.MAX_REASON and long.code == "a"
  assert Verdict("fail", 0.0, "b" * base.MAX_REASON).reason[-1] == "b"


def test_the_code_is_the_reason_up_to_its_details():
  assert Verdict("fail", 0.0, "wrong", "4").code == "wrong"
  assert Verdict("fail", 0.0, "too long: 5: 3", "4").code == "too long"


def example(*messages):
  messages = tuple({"role": role, "content": text} for role, text in messages)
  return Example("a", "d", "t", messages, {})


ALONE = example(("user", "1 + 1?"))
TURNS = example(("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"))
KIND = example(("system", "Be kind."), ("user", "1 + 1?"))


@pytest.mark.parametrize("which, added, want", [
  (ALONE, {}, [("user", "1 + 1?")]),
  (ALONE, {"instruction": "Box it."}, [("user", "1 + 1?\nBox it.")]),
  (TURNS, {"system": "Be brief.", "instruction": "I"}, [("system",
    "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user",
    "2 + 2?\nI")]),
  # The system message of an example stays.
  (KIND, {"system": "Be brief."}, [("system", "Be kind."), ("user",
    "1 + 1?")]),
])  # fmt: skip
def test_what_is_added_and_where(which, added, want):
  before = [dict(message) for message in which.messages]
  assert [(m["role"], m["content"]) for m in posed(which, **added)] == want
  assert [*which.messages] == before  # an example is never changed


STEPS = st.integers(0, 2**40)
POSITIONS = st.integers(0, 2**20 - 1)


def draws(weights, count, seed=0, step=0):
  return [pick_family(seed, step, i, weights) for i in range(count)]


@pytest.mark.parametrize("weights", [[1, 2, 3, 4], [5, 0, 1, 1e-2]])
def test_shares_follow_the_weights(weights):
  count = 10_000
  chosen = [pick_family(0, step, 3, weights) for step in range(count)]
  total = sum(weights)
  chi2 = sum((chosen.count(i) - count * w / total) ** 2 / (count * w / total)
    for i, w in enumerate(weights) if w > 0)  # fmt: skip
  # Above the 0.9999 quantile for up to 6 degrees of freedom.
  assert chi2 < 27.9
  assert all(weights[i] > 0 for i in set(chosen))


@pytest.mark.parametrize("weights", [[1] * 12, [1, 2, 3, 4], [1, 0, 0.2]])
def test_each_step_has_its_share_of_each_family_from_the_first(weights):
  for step in range(20):
    chosen = draws(weights, 200, seed=step % 3, step=step)
    for count in (8, 12, 50, 200):
      for i, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        # Independent draws differ by 7 of 50 in a hundredth of all steps.
        assert abs(chosen[:count].count(i) - expected) < 2.5


@pytest.mark.parametrize("seed, step", [(1, 0), (0, 1)])
def test_neighbouring_steps_and_seeds_are_independent(seed, step):
  counts = [[0] * 3 for _ in range(3)]
  for at in range(4_500):
    x = pick_family(0, 2 * at, 5, [1, 1, 1])
    counts[x][pick_family(seed, 2 * at + step, 5, [1, 1, 1])] += 1
  chi2 = sum((c - 500) ** 2 / 500 for row in counts for c in row)
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
  assert pick_family(seed, step, position, weights) == pick_family(
    seed, step, position, scaled
  )


@given(STEPS, POSITIONS)
def test_a_single_positive_weight_always_wins(step, position):
  assert pick_family(0, step, position, [0.0, 0.0, 5e-324, 0.0]) == 2


def test_index_by_hand():
  assert base.candidate_index(0, 1_048_575) == 1_048_575
  assert base.candidate_index(3, 7) == 3_145_735
  for position in (-1, 2**20):
    with pytest.raises(ValueError, match=f"position = {position}"):
      base.candidate_index(0, position)


@pytest.mark.parametrize("weights, named", [
  ([1, -0.5], r"weights\[1\] = -0.5"), ([math.nan], r"weights\[0\] = nan"),
  ([2, 1, math.inf], r"weights\[2\] = inf"), ([0, 0.0], r"\[0, 0.0\]"),
  ([1e308, 1e308], "inf"),
])  # fmt: skip
def test_bad_weights_are_refused(weights, named):
  with pytest.raises(ValueError, match=named):
    base.check_weights(weights)
