import dataclasses

import pytest

from brorl_jax.verdicts.base import Example, Verdict


@pytest.mark.parametrize(
  "status, reward", [("pass", 1.0), ("fail", 0.0), ("invalid", 0.0)]
)
def test_reward_is_the_status_and_ignores_partial_credit(status, reward):
  assert Verdict(status, 0.75, "", "4").reward == reward


@pytest.mark.parametrize(
  "thing, field",
  [
    (Verdict("pass", 1.0, "", "4"), "status"),
    (Example("gcd/train/0", "gym", "gcd", (), {}), "messages"),
  ],
)
def test_records_cannot_be_changed(thing, field):
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(thing, field, "other")


@pytest.mark.parametrize(
  "reason, code", [("", ""), ("wrong", "wrong"), ("too long: 5: 3", "too long")]
)
def test_the_code_is_the_reason_up_to_its_details(reason, code):
  assert Verdict("fail", 0.0, reason, "4").code == code


def test_the_question_is_what_the_user_asked_last():
  messages = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
  )
  assert Example("a", "math", "b", messages, {}).question == "1 + 1?"
