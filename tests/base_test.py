import dataclasses

import pytest

from brorl_jax.tasks.base import Puzzle, Verdict


@pytest.mark.parametrize(
  "status, reward", [("pass", 1.0), ("fail", 0.0), ("invalid", 0.0)]
)
def test_reward_is_the_status_and_ignores_partial_credit(status, reward):
  assert Verdict(status, 0.75, "", "4").reward == reward


@pytest.mark.parametrize(
  "thing, field",
  [
    (Verdict("pass", 1.0, "", "4"), "status"),
    (Puzzle("gcd/train/0", "gcd", "?", {}), "question"),
  ],
)
def test_records_cannot_be_changed(thing, field):
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(thing, field, "other")
